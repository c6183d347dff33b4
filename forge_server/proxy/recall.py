"""What the database remembers of an attempt's calls, for a session that is opened again after a restart."""

from typing import Any

import msgspec
import sqlalchemy as sa
import structlog

from forge_server.domain.call import Call
from forge_server.domain.states import CallEnd, Delivery
from forge_server.domain.turn import Completion, from_message
from forge_server.store import messages
from forge_server.store import tables as t
from forge_server.trajectory import codec

log = structlog.get_logger(__name__)


class Past(msgspec.Struct, frozen=True):
    """``taken``: how many calls were numbered; ``own``: how many of them are charged to the policy; ``tokens``:
    completion tokens sampled; ``calls``: those with ids, in order; ``undelivered``: (call id, request digest,
    delivery, completion) of answers that nobody is known to have got.
    """

    taken: int
    own: int
    tokens: int
    calls: tuple[Call, ...]
    undelivered: tuple[tuple[int, bytes, Delivery, Completion], ...]


_LAST_SEQ = sa.select(sa.func.max(t.calls.c.seq)).where(t.calls.c.attempt_id == sa.bindparam("attempt"))
_CALLS = (
    sa.select(t.calls, t.call_tokens, t.messages.c.body)
    .outerjoin(t.call_tokens, t.call_tokens.c.call_id == t.calls.c.id)
    .outerjoin(t.call_messages, t.call_messages.c.call_id == t.calls.c.id)
    .outerjoin(
        t.messages,
        sa.and_(t.messages.c.digest == t.call_messages.c.response, t.calls.c.delivered != Delivery.YES),
    )
    .where(t.calls.c.attempt_id == sa.bindparam("attempt"))
    .order_by(t.calls.c.seq)
)


def past_calls(connection: sa.Connection, attempt_id: str) -> Past:
    """Read and rebuild; runs in a reader's thread. Most sessions are new: one small query tells."""
    last = connection.execute(_LAST_SEQ, {"attempt": attempt_id}).scalar_one()
    if last is None:
        return Past(taken=0, own=0, tokens=0, calls=(), undelivered=())
    own = [row for row in connection.execute(_CALLS, {"attempt": attempt_id}) if row.retry_of is None]
    return Past(
        taken=last + 1,
        own=sum(_charged(row) for row in own),
        tokens=sum(row.completion_len or 0 for row in own),
        calls=_rebuild(own),
        undelivered=tuple(
            (row.id, row.request_digest, Delivery(row.delivered), _completion(row))
            for row in own
            if row.end == CallEnd.OK and row.body is not None
        ),
    )


def _charged(row: Any) -> bool:
    """Not what failed for a reason of ours: the engine, the database, a hold that took too long, a restart."""
    return row.end != CallEnd.SERVER_LOST and (row.status or 0) < 500


def _rebuild(rows: list[Any]) -> tuple[Call, ...]:
    names = codec.CallRow.__struct_fields__
    try:
        return tuple(
            codec.decode_attempt(codec.CallRow(**{n: getattr(row, n) for n in names}) for row in rows)
        )
    except codec.CorruptRecord as error:
        # later calls are stored without a parent; the attempt is not trained when its samples are cut
        log.error("earlier calls cannot be read back", attempt=rows[0].attempt_id, error=str(error))
        return ()


def _completion(row: Any) -> Completion:
    return from_message(
        messages.value(row.body),
        id=completion_id(row.id),
        created=int(row.began_at),
        finish_reason=row.finish_reason or "stop",
        prompt_tokens=row.prompt_len or 0,
        completion_tokens=row.completion_len or 0,
    )


def completion_id(call_id: int) -> str:
    """The id that the harness sees."""
    return f"chatcmpl-{call_id:x}"
