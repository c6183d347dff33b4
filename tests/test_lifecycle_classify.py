"""Attribution: a table with every kind, and invariant I5 as a property over what an agent can make."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_server.domain import outcome as o
from forge_server.domain.classify import (
    DISK_EXCESS,
    POLICY_STOPS,
    CallFact,
    Facts,
    Finish,
    NotTrained,
    classify,
    hole,
)
from forge_server.domain.events import Clock, Fact
from forge_server.domain.outcome import Kind, Outcome
from forge_server.domain.states import CallEnd

OK = (CallFact(0, CallEnd.OK, status=200),)
ENGINE = (*OK, CallFact(1, CallEnd.UPSTREAM_ERROR, "engine_unavailable: gone", 503))
GOOD = Finish(exit_code=0, verifier="ok")


def ended(**facts: object) -> Facts:
    """An attempt whose harness started, was answered once, and finished well, changed by ``facts``."""
    base: dict[str, object] = {"harness_started": True, "calls": OK, "reward": 1.0}
    if not facts.keys() & {"backend", "deadline", "server_lost", "cancelled", "finish"}:
        base["finish"] = GOOD
    return Facts(**(base | facts))  # type: ignore[arg-type]


DONE, POLICY, INFRA = Outcome.COMPLETED, Outcome.POLICY_FAILURE, Outcome.INFRA_FAILURE
TASK, STOPPED = Outcome.TASK_FAILURE, Outcome.CANCELLED
TABLE = [
    ("all is well", ended(), DONE, Kind.OK),
    ("recording needs no reward", ended(reward=None, reward_wanted=False, finish=Finish()), DONE, Kind.OK),
    ("a person cancels", ended(cancelled=True), STOPPED, Kind.CANCELLED),
    ("its group has enough", ended(cancelled=True, surplus=True), STOPPED, Kind.SURPLUS),
    ("no node takes it", ended(backend=Fact.UNSCHEDULABLE, harness_started=False), INFRA, Kind.UNSCHEDULABLE),
    ("no image", ended(backend=Fact.IMAGE_PULL, harness_started=False), INFRA, Kind.IMAGE_PULL),
    ("it never started", ended(deadline=Clock.STARTUP, harness_started=False), INFRA, Kind.STARTUP_TIMEOUT),
    ("the pod was deleted", ended(backend=Fact.POD_LOST), INFRA, Kind.POD_LOST),
    ("evicted", ended(backend=Fact.EVICTED), INFRA, Kind.EVICTED),
    ("the node died", ended(backend=Fact.NODE_LOST), INFRA, Kind.NODE_LOST),
    ("launch refused", ended(backend=Fact.LAUNCH_FAILED, harness_started=False), INFRA, Kind.RUNNER_LOST),
    (
        "the runner died early",
        ended(backend=Fact.PROCESS_GONE, harness_started=False),
        INFRA,
        Kind.RUNNER_LOST,
    ),
    ("it died out of reach", ended(backend=Fact.PROCESS_GONE, independent=True), INFRA, Kind.RUNNER_LOST),
    ("it died within reach", ended(backend=Fact.PROCESS_GONE), POLICY, Kind.RUNNER_LOST),
    ("it fell silent early", ended(deadline=Clock.HEARTBEAT, harness_started=False), INFRA, Kind.RUNNER_LOST),
    ("it fell silent", ended(deadline=Clock.HEARTBEAT), POLICY, Kind.RUNNER_LOST),
    (
        "it could not start",
        ended(finish=Finish(runner_error="x"), harness_started=False),
        INFRA,
        Kind.RUNNER_LOST,
    ),
    ("it gave up", ended(finish=Finish(runner_error="x")), POLICY, Kind.RUNNER_LOST),
    ("the engine was the end of it", ended(calls=ENGINE), INFRA, Kind.ENGINE_ERROR),
    (
        "one of two choices failed",
        ended(calls=(*ENGINE, CallFact(2, CallEnd.OK, "withheld", 503)), reward=0.0),
        INFRA,
        Kind.ENGINE_ERROR,
    ),
    ("though it exited 0", ended(calls=ENGINE, finish=GOOD, reward=0.0), INFRA, Kind.ENGINE_ERROR),
    (
        "and though its time ran out",
        ended(calls=ENGINE, stop_reason="agent_timeout"),
        INFRA,
        Kind.ENGINE_ERROR,
    ),
    (
        "even cut short by the seal",
        ended(calls=(*ENGINE, CallFact(2, CallEnd.REJECTED, "", 409))),
        INFRA,
        Kind.ENGINE_ERROR,
    ),
    (
        "held too long",
        ended(calls=(*OK, CallFact(1, CallEnd.REJECTED, "held", 503))),
        INFRA,
        Kind.ENGINE_ERROR,
    ),
    ("but the engine came back", ended(calls=(*ENGINE, CallFact(2, CallEnd.OK))), DONE, Kind.OK),
    ("died with the server", ended(server_lost=True), INFRA, Kind.SERVER_LOST),
    (
        "its call died with the server",
        ended(calls=(*OK, CallFact(1, CallEnd.SERVER_LOST))),
        INFRA,
        Kind.SERVER_LOST,
    ),
    (
        "its answer was withheld",
        ended(calls=(*OK, CallFact(1, CallEnd.REJECTED, "store: disk full", 503))),
        INFRA,
        Kind.RECORD_INCOMPLETE,
    ),
    ("no call", ended(calls=(), finish=Finish(exit_code=1)), INFRA, Kind.HARNESS_NO_CALL),
    ("no call in time", ended(calls=(), stop_reason="agent_timeout"), INFRA, Kind.HARNESS_NO_CALL),
    ("no call, then silence", ended(calls=(), deadline=Clock.HEARTBEAT), INFRA, Kind.RUNNER_LOST),
    ("no call, then gone", ended(calls=(), backend=Fact.PROCESS_GONE), INFRA, Kind.RUNNER_LOST),
    (
        "the first prompt did not fit",
        ended(calls=(CallFact(0, CallEnd.REJECTED, "context_length_exceeded: 9", 400),)),
        POLICY,
        Kind.CONTEXT_OVERFLOW,
    ),
    ("no answer", ended(calls=(CallFact(0, CallEnd.CLIENT_GONE),)), INFRA, Kind.HARNESS_NO_CALL),
    (
        "verifier dies on gold too",
        ended(finish=Finish(verifier="crash"), verifier_fails_on_gold=True),
        INFRA,
        Kind.VERIFIER_CRASH,
    ),
    ("verifier dies", ended(finish=Finish(verifier="crash"), reward=None), POLICY, Kind.VERIFIER_CRASH),
    ("verifier hangs", ended(finish=Finish(verifier="timeout"), reward=None), POLICY, Kind.VERIFIER_CRASH),
    ("verifier babbles", ended(finish=Finish(verifier="invalid"), reward=None), POLICY, Kind.VERIFIER_CRASH),
    ("verifier says nothing", ended(finish=Finish(verifier="ok"), reward=None), POLICY, Kind.VERIFIER_CRASH),
    ("verify clock", ended(deadline=Clock.VERIFY, reward=None), POLICY, Kind.VERIFIER_CRASH),
    ("agent clock", ended(stop_reason="agent_timeout"), POLICY, Kind.AGENT_TIMEOUT),
    (
        "agent clock, by the runner",
        ended(finish=Finish(stopped_by="agent_timeout")),
        POLICY,
        Kind.AGENT_TIMEOUT,
    ),
    (
        "it took the disk",
        ended(finish=Finish(stopped_by="disk_excess", verifier="crash"), reward=None),
        POLICY,
        Kind.RUNNER_LOST,
    ),
    (
        "and so a call could not be recorded",
        ended(
            finish=Finish(stopped_by="disk_excess"),
            calls=(*OK, CallFact(1, CallEnd.REJECTED, "store: disk full", 503)),
        ),
        POLICY,
        Kind.RUNNER_LOST,
    ),
    ("calls used up", ended(stop_reason="budget_calls"), POLICY, Kind.BUDGET_CALLS),
    ("tokens used up", ended(stop_reason="budget_tokens"), POLICY, Kind.BUDGET_TOKENS),
    (
        "budget comes before the engine",
        ended(stop_reason="budget_tokens", calls=ENGINE),
        POLICY,
        Kind.BUDGET_TOKENS,
    ),
    (
        "window full",
        ended(calls=(*OK, CallFact(1, CallEnd.REJECTED, "context_length_exceeded: 40000", 400))),
        POLICY,
        Kind.CONTEXT_OVERFLOW,
    ),
    ("bad tool call", ended(stop_reason="bad_tool_call"), POLICY, Kind.BAD_TOOL_CALL),
    ("exit 1", ended(finish=Finish(exit_code=1, verifier="ok")), POLICY, Kind.HARNESS_EXIT),
    ("killed by a signal", ended(finish=Finish(signal=11, verifier="ok")), POLICY, Kind.HARNESS_EXIT),
    ("out of memory", ended(backend=Fact.OOM_AGENT), POLICY, Kind.OOM_AGENT),
    ("cannot be launched", ended(backend=Fact.BAD_SPEC, harness_started=False), TASK, Kind.BAD_SPEC),
    (
        "nobody gives a reward",
        ended(finish=Finish(verifier="none"), reward=None),
        TASK,
        Kind.VERIFIER_INVALID,
    ),
    (
        "verifier babbles on gold",
        ended(finish=Finish(verifier="invalid"), verifier_fails_on_gold=True),
        TASK,
        Kind.VERIFIER_INVALID,
    ),
]


@pytest.mark.parametrize(
    ("facts", "outcome", "kind"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_table(facts: Facts, outcome: Outcome, kind: Kind) -> None:
    verdict = classify(facts)
    assert (verdict.outcome, verdict.kind) == (outcome, kind)


def test_every_kind_of_an_attempt_is_in_the_table() -> None:
    elsewhere = {(TASK, Kind.GOLD_FAILS)}  # a fact about a task, found by `task validate`
    elsewhere |= {(POLICY, Kind.RECORD_INCOMPLETE)}  # an answer withheld is always the store's doing
    seen = {(outcome, kind) for _, _, outcome, kind in TABLE}
    assert {(out, kind) for out, kinds in o.KINDS.items() for kind in kinds} == seen | elsewhere


call_ends = st.sampled_from([None, *CallEnd])
call_logs = st.lists(
    st.builds(
        CallFact,
        st.just(0),
        call_ends,
        st.sampled_from(["", "context_length_exceeded: x", "store: full"]),
        st.sampled_from([None, 200, 400, 409, 503]),
    ),
    max_size=5,
).map(lambda log: tuple(CallFact(n, c.end, c.error, c.status) for n, c in enumerate(log)))
finishes = st.builds(
    Finish,
    exit_code=st.sampled_from([None, 0, 1]),
    signal=st.sampled_from([None, 9]),
    stopped_by=st.sampled_from(["", "server", DISK_EXCESS, *sorted(POLICY_STOPS)]),
    verifier=st.sampled_from(["ok", "crash", "timeout", "invalid", "none"]),
    runner_error=st.sampled_from(["", "boom"]),
)
triggers = st.one_of(
    finishes.map(lambda f: {"finish": f}),
    st.sampled_from(list(Fact)).map(lambda f: {"backend": f}),
    st.sampled_from([Clock.STARTUP, Clock.VERIFY, Clock.HEARTBEAT]).map(lambda c: {"deadline": c}),
    st.just({"server_lost": True}),
    st.just({"cancelled": True}),
)
any_facts = st.builds(
    lambda trigger, **rest: Facts(**trigger, **rest),
    triggers,
    independent=st.booleans(),
    harness_started=st.booleans(),
    stop_reason=st.sampled_from(["", "a person", *sorted(POLICY_STOPS)]),
    reward=st.sampled_from([None, 0.0, 1.0]),
    reward_wanted=st.booleans(),
    verifier_fails_on_gold=st.booleans(),
    calls=call_logs,
)


@given(any_facts)
def test_every_combination_has_one_answer_whose_kind_belongs_to_its_outcome(facts: Facts) -> None:
    verdict = classify(facts)
    o.check(verdict.outcome, verdict.kind)


AGENT_MADE = [
    dict(zip(("exit_code", "signal", "verifier"), made, strict=True))
    for made in itertools.product([None, 0, 1], [None, 9, 11], ["ok", "crash", "timeout", "invalid"])
]


@pytest.mark.parametrize("made", AGENT_MADE)
@pytest.mark.parametrize("last", [CallEnd.OK, CallEnd.CLIENT_GONE, CallEnd.REJECTED, None])
@pytest.mark.parametrize("reward", [None, 0.0])
def test_i5_an_agent_cannot_turn_its_bad_result_into_an_infra_failure(
    made: dict[str, object], last: CallEnd | None, reward: float | None
) -> None:
    """Its exit, its calls and what the verifier finds are all that an agent can make; it was answered."""
    calls = (*OK, CallFact(1, last, "", 400 if last is CallEnd.REJECTED else None))
    verdict = classify(ended(finish=Finish(**made), reward=reward, calls=calls))  # type: ignore[arg-type]
    assert verdict.outcome in (Outcome.POLICY_FAILURE, Outcome.COMPLETED)


@given(any_facts, st.booleans())
def test_i5_a_better_reward_never_changes_who_is_to_blame(facts: Facts, more: bool) -> None:
    import msgspec

    if facts.reward is None:
        return
    other = classify(msgspec.structs.replace(facts, reward=0.5 if more else -3.0))
    assert other == classify(facts)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (OK, None),
        ((), NotTrained.NO_CALL),
        ((CallFact(0, CallEnd.UPSTREAM_ERROR),), NotTrained.NO_CALL),
        ((*OK, CallFact(1, None)), NotTrained.CALL_IN_FLIGHT),
        ((*OK, CallFact(2, CallEnd.OK)), NotTrained.CALL_MISSING),
        ((CallFact(1, CallEnd.OK),), NotTrained.CALL_MISSING),
    ],
)
def test_i4_a_call_log_with_a_hole_is_not_trained(
    log: tuple[CallFact, ...], reason: NotTrained | None
) -> None:
    assert hole(log) == reason
