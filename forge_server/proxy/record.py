"""The rows of a call: its intent, its end, its delivery (I1, I2), as statements and pure builders.

Statements are built once, so that the store gathers the rows of calls that wait together into one execution.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from forge_server.domain.call import VersionSpan, count_fault
from forge_server.domain.engine import ChatResult
from forge_server.domain.media import Media
from forge_server.domain.states import CallEnd, Delivery, Untrainable
from forge_server.proxy.flights import Flight
from forge_server.proxy.ports import CallPolicy, Row
from forge_server.store.tables import call_messages, calls
from forge_server.trajectory import codec
from forge_server.trajectory.forest import Placement
from forge_server.trajectory.media import pack

Rows = list[tuple[sa.Table | sa.Executable, Row]]

_OK = (
    "mode",
    "ended_at",
    "end",
    "status",
    "untrainable",
    "flags",
    "parent_id",
    "prefix_len",
    "storage_parent_id",
    "prompt_len",
    "completion_len",
    "finish_reason",
    "policy_version",
    "engine_ms",
    "held_ms",
)
_FAILED = ("ended_at", "end", "status", "error", "delivered", "untrainable", "flags", "held_ms")


def _end(names: tuple[str, ...]) -> sa.Update:
    """Gives a call its end, once."""
    return (
        sa.update(calls)
        .where(calls.c.id == sa.bindparam("b_id"), calls.c.end.is_(None))
        .values({name: sa.bindparam(name) for name in names})
    )


ANSWERED = _end(_OK)
FAILED = _end(_FAILED)
RESPONSE = (
    sa.update(call_messages)
    .where(call_messages.c.call_id == sa.bindparam("b_id"))
    .values(response=sa.bindparam("b_response"))
)
WITHHELD = (
    sa.update(calls)
    .where(calls.c.id == sa.bindparam("b_id"))
    .values({name: sa.bindparam("b_" + name) for name in ("status", "error", "delivered", "untrainable")})
)
DELIVERED = (  # yes is final, whatever order the writes came in
    sa.update(calls)
    .where(calls.c.id == sa.bindparam("b_id"), calls.c.delivered != Delivery.YES)
    .values(delivered=sa.bindparam("b_delivered"))
)


def intent(attempt_id: str, flight: Flight, policy: CallPolicy) -> Row:
    """The row of ``calls`` that is durable before the call is forwarded."""
    return {
        "id": flight.id,
        "attempt_id": attempt_id,
        "seq": flight.seq,
        "dialect": flight.dialect,
        "mode": "record",
        "request_digest": flight.digest,
        "began_at": flight.began_at,
        "label": flight.label,
        "forest_key": policy.model[:64],
        "temperature": policy.temperature,
    }


def replayed(attempt_id: str, flight: Flight, original: int, policy: CallPolicy, at: float) -> Row:
    """The one row of a request that was given the answer of call ``original``: nothing was sampled for it."""
    return intent(attempt_id, flight, policy) | {
        "retry_of": original,
        "ended_at": at,
        "end": CallEnd.OK,
        "status": 200,
        "untrainable": Untrainable.DUPLICATE,
    }


def failed(
    flight: Flight, end: CallEnd, status: int, error: str, *, at: float, flags: dict[str, Any], held_ms: float
) -> Row:
    """The end of a call without an answer."""
    return {
        "b_id": flight.id,
        "ended_at": at,
        "end": end,
        "status": status,
        "error": error[:2000].replace("\0", "\ufffd"),  # Postgres takes no NUL in texts
        "delivered": Delivery.NO,
        "untrainable": Untrainable.NOT_OK,
        "flags": flags or None,
        "held_ms": held_ms,
    }


def answered(
    flight: Flight,
    result: ChatResult,
    placement: Placement | None,
    untrainable: Untrainable | None,
    *,
    at: float,
    version: int,
    spliced: bool,
    flags: dict[str, Any],
    engine_ms: float,
    held_ms: float,
) -> Row:
    """The end of a call that the engine answered. ``placement`` is None when the engine gave no ids. ``version``:
    the one in force when it was asked, unless it says itself."""
    if result.versions and result.versions[0].version >= 0:
        version = result.versions[0].version
    return {
        "b_id": flight.id,
        "mode": "splice" if spliced else "record",
        "ended_at": at,
        "end": CallEnd.OK,
        "status": 200,
        "untrainable": untrainable,
        "flags": flags or None,
        "parent_id": placement.parent if placement else None,
        "prefix_len": placement.shared if placement else None,
        "storage_parent_id": placement.storage_parent if placement else None,
        "prompt_len": result.usage_prompt,
        "completion_len": result.usage_completion,
        "finish_reason": result.finish_reason[:24],
        "policy_version": version,
        "engine_ms": engine_ms,
        "held_ms": held_ms,
    }


def withheld(
    call_id: int, status: int, error: str, untrainable: Untrainable = Untrainable.NOT_DELIVERED
) -> Row:
    """An answer that was not given; the harness got ``status`` in its place."""
    return {
        "b_id": call_id,
        "b_status": status,
        "b_error": error[:2000].replace("\0", "\ufffd"),
        "b_delivered": Delivery.NO,
        "b_untrainable": untrainable,
    }


def tokens(
    flight: Flight,
    result: ChatResult,
    placement: Placement,
    version: int,
    digests: codec.PromptDigests,
    media: Media,
) -> Row:
    """The row of ``call_tokens``; only for a result with ids. Its delivery stays unknown for the time
    being. ``digests`` are the session's."""
    assert result.prompt_ids is not None and result.completion_ids is not None
    spans = result.versions or (VersionSpan(version, 0, result.completion_ids.size),)
    return {
        "call_id": flight.id,
        "data": codec.encode(
            result.prompt_ids, placement.shared, result.completion_ids, result.logprobs, spans
        ),
        "prompt_digest": digests.of(result.prompt_ids),
        "media": pack(media, placement.shared),
    }


def untrainable(
    result: ChatResult,
    policy: CallPolicy,
    *,
    label: str,
    constrained: bool,
    mixed: bool,
    versions: frozenset[int],
    media: Media | None,
) -> Untrainable | None:
    """Why the answer may not be trained whatever becomes of its delivery (the closed list), or None. ``mixed``:
    more than one of the ``versions`` that were in force may have answered. ``media``: the images of its prompt,
    None when they cannot be told."""
    if result.finish_reason == "abort":
        return Untrainable.ABORTED
    if result.prompt_ids is None or result.completion_ids is None:
        return Untrainable.COUNT_MISMATCH
    if result.prompt_ids.size != result.usage_prompt:
        return Untrainable.COUNT_MISMATCH
    fault = count_fault(result.completion_ids, result.logprobs, result.usage_completion)
    if fault is not None:
        return fault
    if constrained:
        return Untrainable.CONSTRAINED
    if any(span.version not in versions for span in result.versions):
        return Untrainable.UNKNOWN_VERSION
    if mixed and not result.versions:
        return Untrainable.MIXED_VERSIONS
    if label:
        return Untrainable.SIDE_CALL
    if policy.mode == "eval":
        return Untrainable.EVALUATION
    if media != () and policy.mode == "train":
        return Untrainable.MEDIA
    return Untrainable.MEDIA_UNKNOWN if media is None else None


def settle_receipts(
    connection: sa.Connection, attempt_id: str, read: Sequence[int], lost: Sequence[int]
) -> None:
    """The relay's word on deliveries of an attempt whose books may be closed; yes is final."""
    for call_ids, delivery, before, reason in (
        (read, Delivery.YES, (Delivery.UNKNOWN, Delivery.NO), None),
        (lost, Delivery.NO, (Delivery.UNKNOWN,), Untrainable.NOT_DELIVERED),
    ):
        answered = sa.update(calls).where(
            calls.c.attempt_id == attempt_id,
            calls.c.id.in_(call_ids),
            calls.c.end == CallEnd.OK,
            calls.c.status == 200,
            calls.c.delivered.in_(before),
        )
        of_delivery = calls.c.untrainable.in_((Untrainable.NOT_DELIVERED, Untrainable.DELIVERY_UNKNOWN))
        connection.execute(answered.where(of_delivery).values(untrainable=reason))
        connection.execute(answered.values(delivered=delivery))


def settle_attempt(connection: sa.Connection, attempt_id: str) -> None:
    """Close the books of a sealed attempt: what is not known to be delivered is not trained (I3)."""
    for delivery, reason in (
        (Delivery.NO, Untrainable.NOT_DELIVERED),
        (Delivery.UNKNOWN, Untrainable.DELIVERY_UNKNOWN),
    ):
        connection.execute(
            sa.update(calls)
            .where(
                calls.c.attempt_id == attempt_id,
                calls.c.end == CallEnd.OK,
                calls.c.untrainable.is_(None),
                calls.c.delivered == delivery,
            )
            .values(untrainable=reason)
        )
