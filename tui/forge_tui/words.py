"""Words, symbols and figures for what the API says. Pure."""

import time
from typing import Any

from forge_tui.ink import Span
from forge_tui.plot import number

SYMBOLS: dict[str, Span] = {
    "pending": ("◌", "muted"),
    "queued": ("◌", "muted"),
    "launching": ("◔", "info"),
    "starting": ("◑", "info"),
    "running": ("▶", "info"),
    "active": ("▶", "info"),
    "sealed": ("◕", "accent"),
    "verifying": ("◕", "accent"),
    "completed": ("✔", "good"),
    "policy_failure": ("▼", "warn"),
    "infra_failure": ("✖", "bad"),
    "task_failure": ("■", "bad"),
    "cancelled": ("⊘", "muted"),
    "paused": ("‖", "warn"),
    "failed": ("✖", "bad"),
    "live": ("●", "good"),
    "loading": ("◔", "info"),
    "exported": ("◌", "info"),
    "retired": ("○", "muted"),
    "rejected": ("✖", "bad"),
}
"""Symbol and colour of states and outcomes; the word always stands next to it."""

LIVE = ("queued", "launching", "starting", "running", "sealed", "verifying")
OUTCOMES = ("completed", "policy_failure", "infra_failure", "task_failure", "cancelled")


def symbol(state: str | None) -> Span:
    return SYMBOLS.get(state or "", ("·", "muted"))


def told(state: str | None) -> Span:
    """Symbol and word."""
    mark, style = symbol(state)
    return f"{mark} {(state or '-').replace('_', ' ')}", style


def span_of(seconds: float | None) -> str:
    """A duration."""
    if seconds is None:
        return "-"
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes}m{int(seconds % 60):02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes:02d}m"
    return f"{hours // 24}d{hours % 24:02d}h"


def clock_of(at: float | None) -> str:
    """A time of day."""
    return "-" if at is None else time.strftime("%H:%M:%S", time.localtime(at))


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def money(value: float | None) -> str:
    """Without its currency; what is less than a tenth by its first digits."""
    if value is None:
        return "-"
    return f"{value:,.2f}" if value >= 0.1 or value <= 0 else number(value, 2)


def reward(value: float | None) -> Span:
    if value is None:
        return "-", "muted"
    return f"{value:.2f}", "good" if value >= 1 else "text" if value > 0 else "warn"


def version(number: int | None) -> str:
    """Of a policy; -1 is none."""
    return "-" if number is None or number < 0 else f"v{number}"


def short(id: str | None) -> str:
    """The end of an id: what tells it apart at a glance."""
    return "-" if not id else id[-8:]


def data(values: dict[str, Any]) -> str:
    """Event data in one line."""
    return " ".join(
        f"{key}={_value(value)}" for key, value in values.items() if value not in (None, "", {}, [])
    )


def _value(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return "{" + data(value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_value(each) for each in value) + "]"
    return str(value)
