"""What one rollout did, in parts that a person reads: turns of its conversations, segments, tokens.

Nothing here is stored: turns come from what calls share, segments from cutting the calls as training would.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from litestar import get
from litestar.params import FromPath, QueryParameter
from sqlalchemy import Connection

from forge_server.api import views
from forge_server.api.paging import Since
from forge_server.client import schemas as s
from forge_server.domain.errors import NotFound
from forge_server.store import messages
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.store.recordings import call_rows
from forge_server.trajectory.attempt import Cut, cut

Pieces = Callable[[Sequence[int]], list[str] | None]
"""The text of each token, or None where the tokenizer is not known."""

TOKENS = 4096
Offset = Annotated[int, QueryParameter(ge=0, le=2**31)]
Attempt = Annotated[str | None, QueryParameter(max_length=64)]


def inspect_routes(store: Store, pieces: Pieces, window: int) -> list[Any]:
    """``window``: the engine's, the longest segment of a run that sets none."""

    @get("/rollouts/{rollout_id:str}/turns", summary="Its conversations, turn by turn")
    async def turns(
        rollout_id: FromPath[str],
        attempt: Attempt = None,
        since: Since = 0,
        limit: Annotated[int, QueryParameter(ge=1, le=500)] = 100,
    ) -> list[s.Turn]:
        return await store.read(lambda c: turns_of(c, attempt_of(c, rollout_id, attempt), since, limit))

    @get("/rollouts/{rollout_id:str}/segments", summary="The samples that it is cut into as it stands")
    async def segments(rollout_id: FromPath[str], attempt: Attempt = None) -> s.SegmentsView:
        def read(connection: Connection) -> s.SegmentsView:
            of = attempt_of(connection, rollout_id, attempt)
            return _segments(of, _cut(connection, rollout_id, of, window))

        return await store.read(read)

    @get("/rollouts/{rollout_id:str}/segments/{index:int}/tokens", summary="Tokens of a segment")
    async def tokens(
        rollout_id: FromPath[str],
        index: FromPath[int],
        attempt: Attempt = None,
        offset: Offset = 0,
        limit: Annotated[int, QueryParameter(ge=1, le=TOKENS)] = TOKENS,
    ) -> s.TokensView:
        def read(connection: Connection) -> s.TokensView:
            found = _cut(connection, rollout_id, attempt_of(connection, rollout_id, attempt), window)
            if not 0 <= index < len(found.samples):
                raise NotFound(
                    f"there is no segment {index}", where=rollout_id, mend=f"of {len(found.samples)}"
                )
            sample = found.samples[index]
            part = slice(offset, offset + limit)
            ids = sample.tokens[part].tolist()
            return s.TokensView(
                length=int(sample.tokens.size),
                offset=offset,
                ids=ids,
                mask=sample.loss_mask[part].tolist(),
                logprobs=[round(value, 5) for value in sample.logprobs[part].tolist()],
                versions=sample.versions[part].tolist(),
                text=pieces(ids),
            )

        return await store.read(read)

    return [turns, segments, tokens]


def attempt_of(connection: Connection, rollout_id: str, attempt_id: str | None) -> str:
    """The attempt that is asked for, else the rollout's newest. Raises NotFound."""
    detail = views.rollout_detail(connection, rollout_id)
    known = [attempt.id for attempt in detail.attempts]
    if attempt_id is None and known:
        return known[-1]
    if attempt_id not in known or attempt_id is None:
        raise NotFound(
            f"there is no attempt {attempt_id!r}" if attempt_id else "nothing was attempted yet",
            where=rollout_id,
        )
    return attempt_id


def turns_of(connection: Connection, attempt_id: str, since: int, limit: int) -> list[s.Turn]:
    """The attempt's calls from ``seq`` ``since`` on, each with what it says beyond the one that it goes on from."""
    requests = messages.requests_of(connection, attempt_id)
    c, m = t.calls.c, t.call_messages.c
    query = (
        sa.select(c.id, c.seq, c.flags, c.label, c.end, m.response)
        .outerjoin(t.call_messages, m.call_id == c.id)
        .where(c.attempt_id == attempt_id, c.seq < since + limit)
        .order_by(c.seq)
    )
    rows = connection.execute(query).all()
    conversations, offers = Conversations(), dict[int, list[bytes]]()
    planned = []
    for row in rows:
        tools, keys = requests.get(row.id, (0, []))
        offers[row.seq], said = keys[:tools], keys[tools:]
        after, shared = conversations.add(row.seq, said)
        if row.seq >= since:
            known = after is not None and offers[row.seq] == offers[after]
            planned.append((row, after, [] if known else offers[row.seq], said[shared:]))
    wanted = {key for _, _, offered, said in planned for key in (*offered, *said)}
    wanted |= {bytes(row.response) for row, *_ in planned if row.response is not None}
    bodies = {key: msgspec.json.decode(body) for key, body in messages.bodies_of(connection, wanted)}
    return [
        s.Turn(
            call_id=row.id,
            attempt_id=attempt_id,
            seq=row.seq,
            after=after,
            agent=str((row.flags or {}).get("agent", "")),
            parent_agent=str((row.flags or {}).get("parent_agent", "")),
            label=row.label,
            tools=[_tool(bodies.get(key)) for key in offered],
            messages=_without_echo([bodies.get(key) for key in said], after is not None),
            response=bodies.get(bytes(row.response)) if row.response is not None else None,
            end=row.end,
        )
        for row, after, offered, said in planned
    ]


class Conversations:
    """Which earlier call each one goes on from: the last of those with which it shares the longest beginning, which is
    at least half of what that one says. In time linear in what is said: beginnings are nodes of a tree."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, bytes], int] = {}
        self._said: dict[int, int] = {}  # by node: the last call that says this, and at most as much again

    def add(self, seq: int, said: Sequence[bytes]) -> tuple[int | None, int]:
        """The call that this one goes on from, and how many messages they share."""
        path, node = [], 0
        for key in said:
            node = self._nodes.setdefault((node, key), len(self._nodes) + 1)
            path.append(node)
        shared = next((length for length in range(len(path), 0, -1) if path[length - 1] in self._said), 0)
        after = self._said[path[shared - 1]] if shared else None
        for node in path[(len(path) - 1) // 2 if path else 0 :]:
            self._said[node] = seq
        return after, shared


def _without_echo(said: list[Any], continued: bool) -> list[Any]:
    """The first new message of a conversation that goes on is the answer before, handed back."""
    if continued and said and isinstance(said[0], dict) and said[0].get("role") == "assistant":
        return said[1:]
    return said


def _tool(body: Any) -> str:
    function = body.get("function", body) if isinstance(body, dict) else {}
    return str(function.get("name", "?")) if isinstance(function, dict) else "?"


def _cut(connection: Connection, rollout_id: str, attempt_id: str, window: int) -> Cut:
    query = sa.select(t.runs.c.settings).join(t.rollouts, t.rollouts.c.run_id == t.runs.c.id)
    settings = connection.execute(query.where(t.rollouts.c.id == rollout_id)).scalar_one()
    return cut(call_rows(connection, attempt_id), int(settings.get("max_sample_tokens", 0)) or window)


def _segments(attempt_id: str, found: Cut) -> s.SegmentsView:
    seqs = {call.id: call.seq for call in found.calls}
    return s.SegmentsView(
        attempt_id=attempt_id,
        segments=[
            s.SegmentView(
                index=sample.index,
                length=int(sample.tokens.size),
                trained=int(sample.loss_mask.sum()),
                prompt_len=sample.prompt_len,
                break_reason=sample.break_reason.value,
                min_version=sample.min_version,
                max_version=sample.max_version,
                calls=[seqs[span.call_id] for span in sample.spans if span.owned],
            )
            for sample in found.samples
        ],
        untrained={seqs[id]: reason.value for id, reason in found.untrained.items() if id in seqs},
        clipped={seqs[id]: count for id, count in found.clipped.items() if id in seqs},
        fault=found.fault.value if found.fault is not None else "",
        detail=found.detail,
    )
