"""The server's side of the trainer link: sessions, batches, metrics, checkpoints. Every act may be
repeated.

A session is a fencing token: opening one ends every older one, whose holder gets Conflict from then on
and exits. The lease only tells the launcher that a trainer is gone; it never lets two trainers in.
Once a run has trained, the server's own overrides are as fixed as the run's: the optimiser's state keeps
some of them (its learning rate) and takes others (clipping, loss) anew.
Invariant I8: batch k is one stored body, sent as often as it is asked for.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection

from forge_server.controller.bell import Bells, listen
from forge_server.controller.policies import add_exported
from forge_server.controller.ports import Events
from forge_server.domain import policy
from forge_server.domain.errors import ConfigError, Conflict, Gone, NotFound, TrainerError
from forge_server.domain.events import Noted, RunPaused
from forge_server.domain.run import RunSettings
from forge_server.domain.states import RunState
from forge_server.store import batch_bodies
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.store.policy_rows import versions_in
from forge_server.store.step_metrics import merge_metrics

LONG_POLL_S = 25.0
FREE = (
    "max_token_len_per_gpu",
    "checkpointing",
    "offload",
    "offload_policy",
    "forward_prefetch",
    "reshard_after_forward",
    "use_torch_compile",
)
"""Ends of the keys of overrides that may change while a run goes on: what they cost is memory and time."""
FENCED_OFF = "fenced_off"


class SessionRequest(msgspec.Struct, frozen=True):
    """``resume_step``: the newest step that the trainer has on disk; 0: none."""

    world_size: int
    resume_step: int = 0
    resume_manifest_sha256: str | None = None


class SessionReply(msgspec.Struct, frozen=True):
    """``next_batch`` may be less than what follows ``resume_step``: the trainer goes back to where the
    run stands, or before a checkpoint that was rejected.
    """

    session: str
    fence: int
    lease_s: float
    next_batch: int
    live_version: int
    model_path: str
    checkpoint_dir: str
    overrides: list[str]
    total_steps: int
    export_every: int
    save_every: int
    seed: int


class Heartbeat(msgspec.Struct, frozen=True):
    session: str
    phase: str
    step: int


class HeartbeatReply(msgspec.Struct, frozen=True):
    """``acked_step``: exports older than this step may be pruned. ``save``: not empty when a person wants the full
    state saved with this step, whatever ``save_every`` says; the step's metrics bring it back.
    """

    action: str
    acked_step: int
    save: str = ""


class MetricsReport(msgspec.Struct, frozen=True):
    """``saved``: the wish that the state saved with this step answers."""

    session: str
    metrics: dict[str, float | None]
    saved: str = ""


class CheckpointReport(msgspec.Struct, frozen=True):
    session: str
    k: int
    path: str
    manifest_sha256: str


class CheckpointReply(msgspec.Struct, frozen=True):
    version: int


class BatchBody(msgspec.Struct, frozen=True):
    body: bytes
    sha256: str


class TrainerLink:
    """``overrides`` go before the run's own; ``folder`` gives a run's checkpoint folder; ``moved`` is told where the
    weights of each version lie that is reported: a live one may have been written again, to another folder."""

    def __init__(
        self,
        store: Store,
        events: Events,
        bells: Bells,
        folder: Callable[[str], Path],
        moved: Callable[[int, Path], None],
        *,
        overrides: tuple[str, ...] = (),
        lease_s: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._events, self._bells, self._folder = store, events, bells, folder
        self._moved = moved
        self._overrides, self._lease_s, self._clock = overrides, lease_s, clock
        self._closed = False

    def close(self) -> None:
        """End the long polls: the server stops, and its trainers ask again when it is back."""
        self._closed = True
        self._bells.ring_all()

    async def open_session(self, run_id: str, request: SessionRequest) -> SessionReply:
        """Fence off every older session. Raises NotFound, Gone (the run has ended), Conflict,
        TrainerError, ConfigError (trained with other overrides; the run is paused)."""
        token, now = secrets.token_hex(24), self._clock()

        def write(connection: Connection) -> tuple[int, Any, int, str, int]:
            run = _run(connection, run_id)
            _refuse_ended(run)
            settings = _settings(run)
            versions = versions_in(connection, settings.policy)
            base = next((v for v in versions if v.version == run.base_version), None)
            if base is None:
                raise TrainerError("the run has no initial weights yet", where=run_id, mend="retry")
            _refuse_changed(connection, run_id, self._overrides)
            fence = _add_session(
                connection,
                run_id,
                token=token,
                world_size=request.world_size,
                resume_step=request.resume_step,
                phase="start",
                lease_until=now + self._lease_s,
                created_at=now,
                overrides=list(self._overrides),
            )
            serving = policy.live(versions)
            live_version = serving.version if serving is not None else -1
            resume = policy.resume_step(versions, run_id, min(request.resume_step, run.step))
            return fence, run, live_version, base.path, resume

        try:
            fence, run, live_version, model_path, resume = await self._store.write(write)
        except ConfigError as error:
            await self._events.apply(RunPaused(run_id=run_id, reason=str(error)))
            raise
        self._bells.ring(run_id)
        settings = _settings(run)
        return SessionReply(
            session=token,
            fence=fence,
            lease_s=self._lease_s,
            next_batch=resume + 1,
            live_version=live_version,
            model_path=_weights_folder(model_path),
            checkpoint_dir=str(self._folder(run_id)),
            overrides=[*self._overrides, *settings.overrides],
            total_steps=settings.steps,
            export_every=settings.export_every,
            save_every=settings.save_every,
            seed=settings.seed,
        )

    async def fenced_off_since(self, run_id: str, at: float) -> bool:
        """Whether ``fence_off`` ended the run's sessions at ``at`` or later."""
        c = t.trainer_sessions.c
        query = sa.select(sa.func.max(c.created_at)).where(c.run_id == run_id, c.phase == FENCED_OFF)
        last = await self._store.read(lambda connection: connection.execute(query).scalar_one())
        return last is not None and last >= at

    async def fence_off(self, run_id: str, pause: RunPaused) -> None:
        """End every session of the run, whose trainer gets Conflict and exits, and pause it: both or neither."""
        now = self._clock()

        def write(connection: Connection) -> None:
            _add_session(
                connection,
                run_id,
                token=secrets.token_hex(24),  # nobody is told
                world_size=0,
                resume_step=0,
                phase=FENCED_OFF,
                lease_until=now,
                created_at=now,
            )

        applied = await self._events.apply(pause, also=write)
        if applied.refusal is not None:  # it is paused already, or over
            await self._store.write(write)
        self._bells.ring(run_id)

    async def heartbeat(self, run_id: str, beat: Heartbeat) -> HeartbeatReply:
        """Renew the lease. Raises NotFound and Conflict (fenced off)."""

        def write(connection: Connection) -> HeartbeatReply:
            run = _run(connection, run_id)
            self._renew(connection, run_id, beat.session, phase=beat.phase)
            versions = versions_in(connection, _settings(run).policy)
            return HeartbeatReply(
                action="stop" if _ended(run) else "continue",
                acked_step=policy.acknowledged_step(versions, run_id, _bases(connection)),
                save=run.save_asked or "",
            )

        return await self._store.write(write)

    async def batch(self, run_id: str, k: int, session: str, wait_s: float = LONG_POLL_S) -> BatchBody | None:
        """Batch ``k``, or None when it is not there after ``wait_s``.

        Raises NotFound, Conflict (fenced off), Gone (there will be no such batch) and TrainerError (it is damaged).
        """
        deadline = self._clock() + wait_s
        while True:
            ear = self._bells.ear(run_id)
            digest = await self._store.write(lambda connection: self._take(connection, run_id, k, session))
            if digest is not None:
                self._bells.ring(run_id)
                body = await self._store.read(partial(_body, run_id=run_id, k=k, digest=digest))
                return BatchBody(body=body, sha256=digest)
            left = deadline - self._clock()
            if self._closed or left <= 0 or not await listen(ear, left):
                return None

    def _take(self, connection: Connection, run_id: str, k: int, session: str) -> str | None:
        """The batch's digest; None when it is not there yet."""
        run = _run(connection, run_id)
        self._renew(connection, run_id, session)
        _refuse_ended(run)
        if k > _settings(run).steps:
            raise Gone(f"the run has {_settings(run).steps} steps", where=run_id)
        c = t.batches.c
        row = connection.execute(sa.select(t.batches).where(c.run_id == run_id, c.k == k)).one_or_none()
        if row is None:
            return None
        if row.fetched_at is None:
            connection.execute(
                sa.update(t.batches)
                .where(c.run_id == run_id, c.k == k)
                .values(state="fetched", fetched_at=self._clock())
            )
        digest: str = row.sha256
        return digest

    async def metrics(self, run_id: str, k: int, report: MetricsReport) -> None:
        """Store what the trainer says of step ``k``. Raises NotFound and Conflict (fenced off)."""
        now = self._clock()

        def write(connection: Connection) -> None:
            _run(connection, run_id)
            self._renew(connection, run_id, report.session)
            merge_metrics(connection, run_id, k, "trainer", report.metrics, now)
            _mark_trained(connection, run_id, k, now)

        def write_saved(connection: Connection) -> None:
            write(connection)
            connection.execute(sa.update(t.runs).where(_wished(run_id, report.saved)).values(save_asked=None))

        if await self._store.read(lambda c: _is_wished(c, run_id, report.saved)):
            note = Noted(kind="state_saved", run_id=run_id, data={"step": k})
            await self._events.apply(note, also=write_saved)
        else:
            await self._store.write(write)
        self._bells.ring(run_id)

    async def checkpoint(self, run_id: str, report: CheckpointReport) -> CheckpointReply:
        """Take checkpoint ``k`` as a new policy version; the same one again is the same version.

        Raises NotFound, Conflict (fenced off, or no such batch), TrainerError.
        """
        if not Path(report.path).is_absolute():
            raise TrainerError("the checkpoint's path is not absolute", where=report.path)
        now = self._clock()
        versions: list[int] = []

        def also(connection: Connection) -> None:
            run = _run(connection, run_id)
            self._renew(connection, run_id, report.session)
            if not 1 <= report.k <= run.step:
                raise Conflict(f"there is no batch {report.k} to have trained on", where=run_id)
            _mark_trained(connection, run_id, report.k, now)
            version = add_exported(
                connection,
                _settings(run).policy,
                run_id=run_id,
                step=report.k,
                path=report.path,
                manifest_sha256=report.manifest_sha256,
                at=now,
            )
            versions.append(version)

        note = Noted(kind="checkpoint_reported", run_id=run_id, data={"step": report.k, "path": report.path})
        await self._events.apply(note, also=also)
        self._moved(versions[-1], Path(report.path))
        self._bells.ring(run_id)
        return CheckpointReply(version=versions[-1])

    def _renew(self, connection: Connection, run_id: str, session: str, phase: str | None = None) -> None:
        c = t.trainer_sessions.c
        newest = connection.execute(
            sa.select(c.fence, c.token).where(c.run_id == run_id).order_by(c.fence.desc()).limit(1)
        ).one_or_none()
        if newest is None or not compare_digest(newest.token, session):
            raise Conflict("a newer trainer session has taken over", where=run_id, mend="exit")
        values: dict[str, Any] = {"lease_until": self._clock() + self._lease_s}
        if phase is not None:
            values["phase"] = phase[:16]
        connection.execute(
            sa.update(t.trainer_sessions).where(c.run_id == run_id, c.fence == newest.fence).values(values)
        )


def _bases(connection: Connection) -> frozenset[int]:
    """The versions that runs which have not ended go on from: one may have begun from another's."""
    c = t.runs.c
    query = sa.select(c.base_version).where(c.ended_at.is_(None), c.base_version.is_not(None))
    return frozenset(connection.execute(query).scalars())


def _add_session(connection: Connection, run_id: str, **values: Any) -> int:
    c = t.trainer_sessions.c
    newest = connection.execute(sa.select(sa.func.max(c.fence)).where(c.run_id == run_id)).scalar_one()
    fence = 1 + (newest or 0)
    connection.execute(sa.insert(t.trainer_sessions).values(run_id=run_id, fence=fence, **values))
    return fence


def _body(connection: Connection, *, run_id: str, k: int, digest: str) -> bytes:
    body = batch_bodies.read(connection, run_id, k)
    if sha256(body).hexdigest() != digest:
        raise TrainerError(
            f"batch {k} in the database is damaged", where=run_id, mend="restore it from a backup"
        )
    return body


def _refuse_changed(connection: Connection, run_id: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError when the run has trained with others. Until then they may be mended."""
    b, c = t.batches.c, t.trainer_sessions.c
    trained = sa.select(b.k).where(b.run_id == run_id, b.trained_at.is_not(None)).limit(1)
    had = sa.select(c.overrides).where(c.run_id == run_id, c.overrides.is_not(sa.null()))
    row = connection.execute(had.order_by(c.fence.desc()).limit(1)).one_or_none()
    if row is None or connection.execute(trained).first() is None:
        return
    before, now = _by_key(row.overrides), _by_key(overrides)
    changed = (key for key in before | now if before.get(key) != now.get(key))
    key = next((key for key in changed if not key.endswith(FREE)), None)
    if key is not None:
        mend = f"restore {before[key]!r}" if key in before else "remove it"
        raise ConfigError(
            f"the run has trained with another value of {key}",
            where="[trainer] overrides",
            mend=f"{mend} and resume the run, or give a new run the changed one",
        )


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    """The value that each key is given in the end."""
    return {key.lstrip("+"): value for key, _, value in (text.partition("=") for text in overrides)}


def _mark_trained(connection: Connection, run_id: str, k: int, at: float) -> None:
    """The trainer is through with batch ``k`` and all before it."""
    c = t.batches.c
    connection.execute(
        sa.update(t.batches)
        .where(c.run_id == run_id, c.k <= k, c.trained_at.is_(None))
        .values(state="trained", trained_at=at)
    )


def _wished(run_id: str, save: str) -> sa.ColumnElement[bool]:
    return sa.and_(t.runs.c.id == run_id, t.runs.c.save_asked == save)


def _is_wished(connection: Connection, run_id: str, save: str) -> bool:
    """Whether the wish stands: a report that is repeated has been heard."""
    return connection.execute(sa.select(t.runs.c.id).where(_wished(run_id, save))).first() is not None


def _run(connection: Connection, run_id: str) -> Any:
    row = connection.execute(sa.select(t.runs).where(t.runs.c.id == run_id)).one_or_none()
    if row is None or row.kind != "train":
        raise NotFound(f"there is no training run {run_id!r}", mend="`forge-server run list` shows the runs")
    return row


def _settings(run: Any) -> RunSettings:
    return msgspec.convert(run.settings, RunSettings, strict=False)


def _ended(run: Any) -> bool:
    return run.state not in (RunState.ACTIVE, RunState.PAUSED)


def _refuse_ended(run: Any) -> None:
    if _ended(run):
        raise Gone(f"the run is {run.state}", where=run.id)


def _weights_folder(path: str) -> str:
    """The Hugging Face folder of a version: a checkpoint keeps it under ``huggingface``."""
    inner = Path(path) / "huggingface"
    return str(inner) if inner.is_dir() else path
