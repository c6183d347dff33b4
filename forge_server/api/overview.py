"""``GET /overview``: whether all is well, in one answer. Computed at most once a second, however many
watch, and less often where that takes long."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa
from litestar import get
from litestar.params import FromQuery
from sqlalchemy import Connection

from forge_server import __version__
from forge_server.api import views
from forge_server.api.alarms import Facts, alarms
from forge_server.api.health import Probe
from forge_server.client import schemas as s
from forge_server.domain import ids
from forge_server.domain.outcome import Outcome
from forge_server.domain.run import EXTERNAL
from forge_server.domain.states import AttemptState, PolicyState
from forge_server.store import tables as t
from forge_server.store.database import Store

FRESH_S = 1.0
STALE_S = 5.0
SHARE = 50
"""It is good for so many times as long as it took: watching never costs more than that part of a core."""
WINDOW_S = 60.0
RECENT_S = 900.0
LONGEST_CALL_S = 900.0
"""Calls are found by when they began; one that takes longer is not seen to end."""


class Turns(Protocol):
    turns: int
    """Grows when a run or a policy is not as it was: whoever has just steered must see it."""


class Traffic(Protocol):
    """The proxy's gate."""

    running: int
    waiting: int

    @property
    def held(self) -> bool: ...


def overview_routes(
    store: Store,
    probes: Sequence[Probe],
    news: Turns,
    traffic: Traffic,
    in_flight: Callable[[], int],
    policy: str,
    breaker: int,
) -> list[Any]:
    """``in_flight`` gives N."""
    known: dict[str | None, tuple[float, int, s.Overview]] = {}  # the moment until which it is good, turns
    one_at_a_time = asyncio.Lock()

    @get("/overview", summary="Whether all is well: counts, rates, alarms")
    async def overview(run: FromQuery[str | None] = None) -> s.Overview:
        async with one_at_a_time:
            until, turns, found = known.get(run, (0.0, -1, None))
            began, now = time.monotonic(), news.turns
            if found is None or began >= until or turns != now:
                found = await look(run)
                if len(known) > 64:
                    known.clear()
                good_s = SHARE * (time.monotonic() - began)
                known[run] = (began + min(max(FRESH_S, good_s), STALE_S), now, found)
            found.in_flight = in_flight()
            found.calls_running, found.calls_waiting, found.held = (
                traffic.running,
                traffic.waiting,
                traffic.held,
            )
            return found

    async def look(run: str | None) -> s.Overview:
        checks = [await probe() for probe in probes]
        now = time.time()
        view, more = await store.read(lambda c: read(c, run, now, policy))
        view.checks, view.breaker = checks, breaker
        view.alarms = alarms(
            Facts(
                checks=checks,
                run=view.run,
                trainer=view.trainer,
                rejected=more.rejected,
                infra_streak=view.infra_streak,
                breaker=breaker,
                lost=view.lost,
                recent_attempts=view.recent_attempts,
                held_s=more.held_s,
                silence_s=0.0 if traffic.running or traffic.held else more.silence_s,
                figures=more.figures,
            )
        )
        return view

    return [overview]


class More(msgspec.Struct):
    """What only the alarms need (see ``Facts``)."""

    rejected: str
    held_s: float
    silence_s: float
    figures: dict[str, float | None]


def read(connection: Connection, run: str | None, now: float, policy: str) -> tuple[s.Overview, More]:
    """What the database knows. Without ``run`` the newest that has not ended, else the newest. Raises NotFound."""
    row = _run(connection, run)
    by_kind = views.counts_of(connection, row.id) if row is not None else []
    states = connection.execute(
        sa.select(t.attempts.c.state, sa.func.count())
        .where(t.attempts.c.state.in_([state.value for state in AttemptState if state != "ended"]))
        .group_by(t.attempts.c.state)
    )
    recent, lost = _recent(connection, now)
    rates, last_call = _rates(connection, now)
    versions = views.policies_of(connection, policy)
    trained_out = row is not None and any(
        version.run_id == row.id
        and version.step == row.settings.get("steps")
        and version.state != PolicyState.REJECTED
        for version in versions
    )
    view = s.Overview(
        version=__version__,
        now=now,
        last_event=connection.execute(sa.select(sa.func.max(t.events.c.id))).scalar() or 0,
        run=views.run_view(connection, row, by_kind) if row is not None else None,
        checks=[],
        alarms=[],
        in_flight=0,
        attempts={state: count for state, count in states},
        calls_running=0,
        calls_waiting=0,
        held=False,
        rates=rates,
        policy=next((v for v in versions if v.state in (PolicyState.LIVE, PolicyState.LOADING)), None),
        # it leaves with its last step; what is left to be done is an evaluation
        trainer=_trainer(connection, row.id, now) if row is not None and not trained_out else None,
        failures={
            f"{outcome}/{kind}": n for _, outcome, kind, n in by_kind if outcome not in (None, "completed")
        },
        lost=lost,
        recent_attempts=recent,
        infra_streak=row.infra_streak if row is not None else 0,
        breaker=0,
    )
    newest = next((version for version in versions if row is not None and version.run_id == row.id), None)
    return view, More(
        rejected=newest.reason if newest is not None and newest.state == PolicyState.REJECTED else "",
        held_s=_held(connection, now),
        silence_s=_silence(connection, now, last_call),
        figures=_figures(connection, row.id) if row is not None else {},
    )


def _run(connection: Connection, run: str | None) -> Any:
    """The run of rollouts that register themselves never ends: it comes last, unless it alone goes on."""
    if run is not None:
        return views.run_row(connection, run)
    c, r = t.runs.c, t.rollouts.c
    waits = sa.select(r.id).where(r.run_id == c.id, r.state != "ended").exists()
    going = c.state.in_(("active", "paused"))
    rank = sa.case(
        (sa.and_(going, c.name != EXTERNAL), 0), (sa.and_(going, waits), 1), (c.name != EXTERNAL, 2), else_=3
    )
    return connection.execute(sa.select(t.runs).order_by(rank, c.id.desc()).limit(1)).first()


def _recent(connection: Connection, now: float) -> tuple[int, dict[str, int]]:
    c = t.attempts.c
    rows = connection.execute(
        sa.select(c.outcome, c.kind, sa.func.count())
        .where(c.ended_at > now - RECENT_S)
        .group_by(c.outcome, c.kind)
    ).all()
    lost = {kind: count for outcome, kind, count in rows if outcome == Outcome.INFRA_FAILURE}
    return sum(row[2] for row in rows), lost


def _rates(connection: Connection, now: float) -> tuple[s.Rates, float]:
    """Of the calls that ended within the window; and when one began or ended last, 0 if that is long ago."""
    c = t.calls.c
    ended = c.ended_at > now - WINDOW_S

    def of_ended(value: sa.ColumnElement[Any] | int) -> sa.ColumnElement[Any]:
        return sa.case((ended, value))

    row = connection.execute(
        sa.select(
            sa.func.count(of_ended(c.ended_at)),
            sa.func.sum(of_ended(c.prompt_len)),
            sa.func.sum(of_ended(c.completion_len)),
            sa.func.sum(of_ended(sa.case((c.end == "ok", 0), else_=1))),
            sa.func.avg(of_ended(c.engine_ms)),
            sa.func.max(sa.func.coalesce(c.ended_at, c.began_at)),
        ).where(c.id > ids.first_call_id(now - LONGEST_CALL_S))
    ).one()
    calls, prompt, completion, failed, engine_ms, last = row
    return s.Rates(
        window_s=WINDOW_S,
        calls=calls / WINDOW_S,
        prompt_tokens=(prompt or 0) / WINDOW_S,
        completion_tokens=(completion or 0) / WINDOW_S,
        failed=failed or 0,
        engine_ms=engine_ms,
    ), last or 0.0


def _trainer(connection: Connection, run_id: str, now: float) -> s.TrainerView | None:
    c = t.trainer_sessions.c
    query = sa.select(t.trainer_sessions).where(c.run_id == run_id).order_by(c.fence.desc()).limit(1)
    row = connection.execute(query).first()
    if row is None:
        return None
    return s.TrainerView(
        phase=row.phase, world_size=row.world_size, alive=row.lease_until > now, since=row.created_at
    )


def _held(connection: Connection, now: float) -> float:
    c = t.holds.c
    query = sa.select(sa.func.min(c.begin_at)).where(c.end_at.is_(None), c.reason == "weight_update")
    begin = connection.execute(query).scalar()
    return now - begin if begin is not None else 0.0


def _silence(connection: Connection, now: float, last_call: float) -> float:
    """Since the last call, or since the first harness of those that run began, whichever is later."""
    c = t.attempts.c
    query = sa.select(sa.func.min(c.running_at)).where(c.state == AttemptState.RUNNING.value)
    began = connection.execute(query).scalar()
    return now - max(began, last_call or now - LONGEST_CALL_S) if began is not None else 0.0


def _figures(connection: Connection, run_id: str) -> dict[str, float | None]:
    c = t.step_metrics.c
    figures: dict[str, float | None] = {}
    for source in ("controller", "trainer"):
        query = sa.select(c.metrics).where(c.run_id == run_id, c.source == source)
        figures |= connection.execute(query.order_by(c.step.desc()).limit(1)).scalar() or {}
    return figures
