"""What the database remembers of an attempt's calls, for a session that is opened again after a restart."""

from typing import Any

import msgspec
import sqlalchemy as sa
import structlog

from forge_server.domain.call import Call
from forge_server.domain.states import CallEnd, Delivery
from forge_server.domain.turn import Completion, from_message
from forge_server.proxy.splice_keys import Key, key_of, key_of_tool
from forge_server.store import messages
from forge_server.store import tables as t
from forge_server.trajectory import codec

log = structlog.get_logger(__name__)


class Said(msgspec.Struct, frozen=True):
    """What was asked with a call and what was answered. ``tools`` and ``keys``: what stands for its tools and its
    messages; ``spliced``: its prompt holds the recorded tokens of earlier answers."""

    call: Call
    spliced: bool
    tools: tuple[bytes, ...]
    keys: tuple[Key, ...]
    completion: Completion


class Past(msgspec.Struct, frozen=True):
    """``taken``: how many calls were numbered; ``own``: how many of them are charged to the policy; ``tokens``:
    completion tokens sampled; ``calls``: those with ids, in order; ``undelivered``: (call id, request digest,
    delivery, completion) of answers that nobody is known to have got; ``said``: the ``calls`` once more, with
    their messages; ``forgotten``: some answer is not among them.
    """

    taken: int
    own: int
    tokens: int
    calls: tuple[Call, ...]
    undelivered: tuple[tuple[int, bytes, Delivery, Completion], ...]
    said: tuple[Said, ...] = ()
    forgotten: bool = False


_LAST_SEQ = sa.select(sa.func.max(t.calls.c.seq)).where(t.calls.c.attempt_id == sa.bindparam("attempt"))
_CALLS = (
    sa.select(t.calls, t.call_tokens, t.messages.c.body)
    .outerjoin(t.call_tokens, t.call_tokens.c.call_id == t.calls.c.id)
    .outerjoin(t.call_messages, t.call_messages.c.call_id == t.calls.c.id)
    .outerjoin(t.messages, t.messages.c.digest == t.call_messages.c.response)
    .where(t.calls.c.attempt_id == sa.bindparam("attempt"))
    .order_by(t.calls.c.seq)
)


def past_calls(connection: sa.Connection, attempt_id: str, *, with_messages: bool) -> Past:
    """Read and rebuild; runs in a reader's thread. Most sessions are new: one small query tells. ``said`` is
    left empty unless ``with_messages``."""
    last = connection.execute(_LAST_SEQ, {"attempt": attempt_id}).scalar_one()
    if last is None:
        return Past(taken=0, own=0, tokens=0, calls=(), undelivered=())
    own = [row for row in connection.execute(_CALLS, {"attempt": attempt_id}) if row.retry_of is None]
    calls = _rebuild(own)
    answered = {row.id: row for row in own if row.end == CallEnd.OK and row.body is not None}
    said = _said(connection, attempt_id, calls, answered) if with_messages else ()
    return Past(
        taken=last + 1,
        own=sum(_charged(row) for row in own),
        tokens=sum(row.completion_len or 0 for row in own),
        calls=calls,
        undelivered=tuple(
            (row.id, row.request_digest, Delivery(row.delivered), _completion(row))
            for row in answered.values()
            if row.delivered != Delivery.YES and row.status == 200  # others are withheld for good
        ),
        said=said,
        forgotten=with_messages and len(said) < len(answered),
    )


def _said(
    connection: sa.Connection, attempt_id: str, calls: tuple[Call, ...], answered: dict[int, Any]
) -> tuple[Said, ...]:
    requests = messages.requests_of(connection, attempt_id)
    bodies = dict(messages.bodies_of(connection, {d for _, digests in requests.values() for d in digests}))
    keys = {digest: key_of(body) for digest, body in bodies.items()}
    said = []
    for call in calls:
        row = answered.get(call.id)
        tools, digests = requests.get(call.id, (0, []))
        if row is None or not digests or any(digest not in bodies for digest in digests):
            continue
        said.append(
            Said(
                call=call,
                spliced=row.mode == "splice",
                tools=tuple(key_of_tool(bodies[digest]) for digest in digests[:tools]),
                keys=tuple(keys[digest] for digest in digests[tools:]),
                completion=_completion(row),
            )
        )
    return tuple(said)


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
