"""Libraries that only some people want: whether they are here, and how to get them."""

from importlib.util import find_spec

from forge_server.domain.errors import ConfigError


def require(extra: str, module: str, *, wanted_by: str) -> None:
    """Raises ConfigError when ``module``, which the extra brings, is not installed. Imports nothing but its parents."""
    try:
        found = find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent
        found = False
    if not found:
        raise ConfigError(
            f"{wanted_by} needs {module.partition('.')[0]}, which is not installed",
            mend=f"pip install 'forge-server[{extra}]'",
        )
