"""What a person should look at, from the facts of one overview. Pure: each rule is one sentence and its mend."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from forge_server.client.schemas import Alarm, Check, RunView, TrainerView

LOST_SHARE = 0.1
QUIET_S = 120.0
HELD_S = 120.0
LOGPROB_GAP = 0.1
MIXED_SHARE = 0.1


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """``figures``: the run's last of every source. ``rejected``: reason of the newest version if it was rejected.
    ``silence_s``: how long the oldest running harness has been running while no call came from any."""

    checks: Sequence[Check]
    run: RunView | None
    trainer: TrainerView | None
    rejected: str
    infra_streak: int
    breaker: int
    lost: Mapping[str, int]
    recent_attempts: int
    held_s: float
    silence_s: float
    figures: Mapping[str, float | None]


def alarms(facts: Facts) -> list[Alarm]:
    """Errors first."""
    found = [*_checks(facts), *_run(facts), *_attempts(facts), *_learning(facts)]
    return sorted(found, key=lambda alarm: alarm.level != "error")


def _checks(facts: Facts) -> Iterator[Alarm]:
    for check in facts.checks:
        if not check.ok:
            yield Alarm("error", check.name, check.detail or "not ready", "`forge-server check` tells more")


def _run(facts: Facts) -> Iterator[Alarm]:
    run = facts.run
    if run is None:
        return
    if run.state == "paused":
        by_person = run.reason.startswith("paused by a person")
        level: str = "warning" if by_person else "error"
        yield Alarm(level, "paused", run.reason or "the run is paused", "resume it once that is mended")  # type: ignore[arg-type]
    if run.state == "failed":
        yield Alarm(
            "error", "failed", run.reason or "the run has failed", "look at its events and the server's log"
        )
    if run.state != "active":
        return
    if facts.trainer is not None and not facts.trainer.alive:
        yield Alarm(
            "error",
            "trainer",
            f"it is silent (last phase {facts.trainer.phase or '-'})",
            "look at the trainer's log",
        )
    if facts.rejected:
        yield Alarm(
            "error",
            "policy",
            f"the newest version was rejected, {facts.rejected}",
            "the version before it stays live",
        )
    if facts.held_s > HELD_S:
        yield Alarm(
            "warning", "held", f"calls have been held for {facts.held_s:.0f} s", "a weight update takes long"
        )


def _attempts(facts: Facts) -> Iterator[Alarm]:
    if facts.infra_streak >= max(2, facts.breaker // 2):
        yield Alarm(
            "warning",
            "breaker",
            f"{facts.infra_streak} infra failures in a row; at {facts.breaker} the run pauses",
            "look at the failed attempts' evidence",
        )
    lost = sum(facts.lost.values())
    if lost >= 3 and lost > LOST_SHARE * facts.recent_attempts:
        kind = max(facts.lost, key=lambda name: facts.lost[name])
        yield Alarm(
            "warning",
            "lost",
            f"{lost} of {facts.recent_attempts} attempts were lost in 15 min, most by {kind}",
            f"look at rollouts of kind {kind}",
        )
    if facts.silence_s > QUIET_S:
        yield Alarm(
            "warning",
            "silence",
            f"harnesses run, but no call came for {facts.silence_s:.0f} s",
            "look at their logs",
        )


def _learning(facts: Facts) -> Iterator[Alarm]:
    def figure(name: str) -> float:
        return facts.figures.get(name) or 0.0

    if figure("nonfinite_gradients") > 0:
        yield Alarm(
            "error", "gradients", "the last update skipped gradients that are no numbers", "lower the rate"
        )
    if figure("logprob_gap_mean") > LOGPROB_GAP:
        gap = figure("logprob_gap_mean")
        yield Alarm(
            "error",
            "logprobs",
            f"engine and trainer disagree by {gap:.3g} on average",
            "see docs/training.md, Metrics",
        )
    mixed = facts.figures.get("groups/mixed_share")
    if mixed is not None and mixed < MIXED_SHARE:
        yield Alarm(
            "warning",
            "signal",
            f"only {mixed:.0%} of groups had unequal rewards",
            "other tasks, or more per group",
        )
    if figure("staleness/dropped") > 0:
        count = figure("staleness/dropped")
        yield Alarm(
            "warning", "stale", f"{count:.0f} rollouts were too old to be trained", "raise max_staleness"
        )
