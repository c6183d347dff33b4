"""Finds what ships beside the code: migrations, harness specs, Kubernetes templates — in a wheel or a checkout.

It also stages the sub-packages that run in other environments (``trainer`` in veRL's, ``engine_ext`` in
vLLM's, ``runner`` in pods, the ``staged`` part of ``demo`` in both): a folder that holds nothing of the
server but an empty ``forge_server`` package and the one sub-package, fit for PYTHONPATH without shadowing
anything there.
"""

import shutil
from pathlib import Path

from forge_server.domain.errors import NotFound

_PACKAGE = Path(__file__).resolve().parent
STAGED = ("trainer", "engine_ext", "runner", "demo")


def folder(name: str) -> Path:
    """The folder of the asset ``migrations``, ``harness_specs`` or ``k8s_templates``. Raises NotFound."""
    for candidate in (_PACKAGE / "_assets" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise NotFound(
        f"the folder {name} is not part of this installation",
        where=str(_PACKAGE),
        mend="reinstall forge-server from a complete wheel or checkout",
    )


def stage_package(name: str, into: Path) -> Path:
    """Copy sub-package ``name`` (one of STAGED) to ``into/forge_server/NAME``; returns ``into`` for PYTHONPATH.

    An older copy is replaced by rename, so that a process that is starting never sees half a package.
    """
    if name not in STAGED:
        raise ValueError(f"{name} is not a package that can be staged")
    package = into / "forge_server"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text('"""Staged parts of forge-server."""\n')
    target = package / name
    fresh = package / f".{name}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(_PACKAGE / name, fresh, ignore=shutil.ignore_patterns("__pycache__"))
    if target.exists():
        old = package / f".{name}.old"
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        fresh.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        fresh.rename(target)
    return into
