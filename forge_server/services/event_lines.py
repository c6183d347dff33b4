"""Committed events as lines of the log, with the ids they are about: every one at debug, what a person may have to
act on above that."""

import structlog

from forge_server.domain.events import EventRow
from forge_server.domain.outcome import Outcome

log = structlog.get_logger(__name__)

_TOLD = frozenset({"run_created", "run_resumed", "run_ended", "policy_live", "batch_assembled"})
_WARNED = frozenset({"run_paused", "policy_rejected", "task_failed", "group_dropped"})
_LOST = frozenset({Outcome.INFRA_FAILURE, Outcome.TASK_FAILURE})


def log_event(row: EventRow) -> None:
    """Subscribed to the lifecycle."""
    ids = {"run": row.run_id, "rollout": row.rollout_id, "attempt": row.attempt_id}
    lost = row.kind == "attempt_ended" and row.data["outcome"] in _LOST
    tell = log.warning if lost or row.kind in _WARNED else log.info if row.kind in _TOLD else log.debug
    known = {name: value for name, value in ids.items() if value is not None}
    tell(row.kind, id=row.id, **{**row.data, **known})
