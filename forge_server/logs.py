"""Structured logs on stderr: lines for a terminal, JSON for everything else."""

import contextlib
import logging
import sys
from typing import Any

import structlog

_QUIET = ("apscheduler", "uvicorn", "aiohttp", "alembic", "httpx", "httpcore", "asyncio", "opentelemetry")


class _Stderr:
    """Writes lines to what stderr is now. A log that cannot be written (a closed terminal, a full disk) is no
    reason for whoever logs to fail.
    """

    def msg(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(message, file=sys.stderr, flush=True)

    debug = info = warning = error = critical = exception = msg


def configure(level: str, form: str) -> None:
    """``form``: auto (by whether stderr is a terminal), console or json."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: Any = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if console
        else structlog.processors.JSONRenderer()
    )
    if not console:
        shared.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: _Stderr(),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.CRITICAL)
