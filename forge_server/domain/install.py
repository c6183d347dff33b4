"""What a harness needs installed: the ``install`` section of a harness spec."""

import msgspec


class Install(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Packages of one ecosystem, pinned.

    ``pip`` packages go into a virtual environment of Python ``python`` (``"3.12"``; empty: the server's own),
    ``npm`` packages into a ``node_modules`` with Node ``node`` (``"24"``; empty: the machine's own) from npm.
    Programs of both, and ``node``, end up in the environment's ``bin``. The environment is named as the harness, or
    ``env``: specs that install the same share one.
    """

    pip: tuple[str, ...] = ()
    python: str = ""
    npm: tuple[str, ...] = ()
    node: str = ""
    env: str = ""
    size_mb: int = 300
    """About how much room it takes; told before it is installed."""
