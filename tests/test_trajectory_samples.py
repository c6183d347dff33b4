"""Invariants I2, I3 and I11 of the cut, against a naive oracle."""

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_server.domain.call import Call, VersionSpan
from forge_server.domain.sample import Sample
from forge_server.domain.states import Delivery, Untrainable
from forge_server.trajectory.samples import Cover, cover

NO_LIMIT = 1 << 30
SYSTEM = list(range(100, 140))
DELIVERIES = st.sampled_from([Delivery.YES, Delivery.YES, Delivery.UNKNOWN, Delivery.NO])
HOW = ["new", "extend", "extend", "cut", "mutate", "again", "twin"]  # how a prompt is made from earlier ones
REASONS = st.sampled_from([None, None, None, Untrainable.CONSTRAINED, Untrainable.SIDE_CALL])


def call(
    seq: int,
    prompt: list[int],
    completion: list[int],
    *,
    delivered: Delivery = Delivery.YES,
    untrainable: Untrainable | None = None,
    versions: list[tuple[int, int, int]] | None = None,
    temperature: float = 1.0,
    forest_key: str = "",
    logprobs: list[float] | None = None,
    finish_reason: str = "stop",
) -> Call:
    """A call whose logprobs and version identify it and each of its tokens."""
    if logprobs is None:
        logprobs = [-(seq + 1) - i / 1000 for i in range(len(completion))]
    if versions is None:
        versions = [(seq, 0, len(completion))]
    return Call(
        id=1000 + seq,
        seq=seq,
        prompt=np.array(prompt, np.int32),
        completion=np.array(completion, np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=tuple(VersionSpan(*v) for v in versions),
        delivered=delivered,
        untrainable=untrainable,
        temperature=temperature,
        finish_reason=finish_reason,
        forest_key=forest_key,
    )


def grow(turns: int, start: list[int], base: int = 1000) -> list[tuple[list[int], list[int]]]:
    """An append-only conversation: (prompt, completion) of each turn."""
    out, prompt = [], list(start)
    for t in range(turns):
        answer = list(range(base + 100 * t, base + 100 * t + 20))
        out.append((prompt, answer))
        prompt = prompt + answer + list(range(base + 100 * t + 50, base + 100 * t + 60))
    return out


@st.composite
def attempts(draw: st.DrawFn, most: int = 12) -> list[Call]:
    token = st.integers(0, 2)
    calls: list[Call] = []
    for seq in range(draw(st.integers(1, most))):
        how = draw(st.sampled_from(HOW)) if calls else "new"
        if how == "new":
            prompt = draw(st.lists(token, min_size=1, max_size=6))
        else:
            base = calls[draw(st.integers(0, len(calls) - 1))]
            whole = [*base.prompt.tolist(), *base.completion.tolist()]
            if how == "extend":
                prompt = whole + draw(st.lists(token, max_size=4))
            elif how == "cut":
                prompt = whole[: draw(st.integers(1, len(whole)))] + draw(st.lists(token, max_size=3))
            elif how == "mutate":
                at = draw(st.integers(0, len(whole) - 1))
                prompt = [*whole[:at], (whole[at] + 1) % 3, *whole[at + 1 :]]
            else:
                prompt = base.prompt.tolist()
        answer = base.completion.tolist() if how == "twin" else draw(st.lists(token, max_size=5))
        cut = draw(st.integers(0, len(answer)))
        calls.append(
            call(
                seq,
                prompt,
                answer,
                delivered=draw(DELIVERIES),
                untrainable=draw(REASONS),
                versions=[(seq, 0, cut), (seq + 50, cut, len(answer))],
                temperature=draw(st.sampled_from([1.0, 1.0, 1.0, 0.7])),
                forest_key=draw(st.sampled_from(["", "", "", "other"])),
            )
        )
    return calls


def oracle_delivered(calls: list[Call]) -> set[int]:
    """Calls known to be delivered at the end, by comparing everything with everything."""
    state = {c.id: c.delivered for c in calls}
    lists = {c.id: (c.prompt.tolist(), c.prompt.tolist() + c.completion.tolist()) for c in calls}
    part = [
        c
        for c in calls
        if c.completion.size and c.delivered is not Delivery.NO and c.untrainable is not Untrainable.SIDE_CALL
    ]
    for j, later in enumerate(part):
        prompt = lists[later.id][0]
        earlier = [c for c in part[:j] if c.forest_key == later.forest_key]
        inside = [c for c in earlier if prompt[: len(lists[c.id][1])] == lists[c.id][1]]
        accepted: list[Call] = []
        inside.sort(key=lambda c: (-len(lists[c.id][1]), state[c.id] is not Delivery.YES, -c.seq))
        for c in inside:
            whole = lists[c.id][1]
            if state[c.id] is not Delivery.YES:
                seen = any(e.seq < c.seq and lists[e.id][0][: len(whole)] == whole for e in earlier)
                if seen or any(k.prompt.size <= c.prompt.size for k in accepted):
                    continue
                state[c.id] = Delivery.YES
            accepted.append(c)
    return {id for id, known in state.items() if known is Delivery.YES}


def oracle_trained(calls: list[Call]) -> set[int]:
    """Calls that must be trained: delivered, trainable, not empty, and of identical twins the latest."""
    delivered = oracle_delivered(calls)
    latest: dict[tuple[object, ...], int] = {}
    for c in calls:
        if c.id in delivered and c.untrainable is None and c.completion.size:
            latest[(c.forest_key, tuple(c.prompt.tolist()), tuple(c.completion.tolist()))] = c.id
    return set(latest.values())


def owners(result: Cover) -> dict[int, list[Sample]]:
    out: dict[int, list[Sample]] = {}
    for sample in result.samples:
        for span in sample.spans:
            if span.owned:
                out.setdefault(span.call_id, []).append(sample)
    return out


@settings(max_examples=300, deadline=None)
@given(attempts())
def test_i3_every_delivered_trainable_token_is_trained_in_exactly_one_sample(calls: list[Call]) -> None:
    result = cover(calls, NO_LIMIT)
    trained = oracle_trained(calls)
    owned = owners(result)
    assert set(owned) == trained
    assert all(len(samples) == 1 for samples in owned.values())
    assert set(result.untrained) == {c.id for c in calls} - trained
    assert sum(int(s.loss_mask.sum()) for s in result.samples) == sum(
        c.completion.size for c in calls if c.id in trained
    )


@settings(max_examples=300, deadline=None)
@given(attempts())
def test_i3_a_sample_holds_exactly_what_the_engine_saw(calls: list[Call]) -> None:
    by_id = {c.id: c for c in calls}
    result = cover(calls, NO_LIMIT)
    for index, sample in enumerate(result.samples):
        assert sample.index == index
        context = np.ones(sample.tokens.size, bool)
        for span in sample.spans:
            c = by_id[span.call_id]
            assert span.prompt_end == c.prompt.size
            assert span.end == c.prompt.size + c.completion.size
            assert np.array_equal(sample.tokens[: span.prompt_end], c.prompt)
            assert np.array_equal(sample.tokens[span.prompt_end : span.end], c.completion)
            if span.owned:
                here = slice(span.prompt_end, span.end)
                context[here] = False
                assert sample.loss_mask[here].all()
                assert np.array_equal(sample.logprobs[here], c.logprobs)
                cut = c.versions[0].end
                assert (sample.versions[here][:cut] == c.seq).all()
                assert (sample.versions[here][cut:] == c.seq + 50).all()
        assert not sample.loss_mask[context].any()
        assert (sample.logprobs[context] == 0).all() and (sample.versions[context] == -1).all()
        assert sample.loss_mask[-1] == 1  # nothing is carried that trains nothing
        assert sample.prompt_len == int(sample.loss_mask.argmax())
        assert len({span.temperature for span in sample.spans if span.owned}) == 1


@settings(max_examples=300, deadline=None)
@given(attempts(), st.integers(1, 20))
def test_i3_a_length_limit_removes_a_suffix_and_nothing_else(calls: list[Call], limit: int) -> None:
    whole, short = cover(calls, NO_LIMIT), cover(calls, limit)
    assert whole.untrained == short.untrained
    lost = {s.spans[-1].call_id: s for s in whole.samples}
    for sample in short.samples:
        assert 0 < sample.tokens.size <= limit
        owned = {span.call_id for span in sample.spans if span.owned}
        (full,) = [s for s in lost.values() if owned <= {x.call_id for x in s.spans if x.owned}]
        n = sample.tokens.size
        assert np.array_equal(sample.tokens, full.tokens[:n])
        assert np.array_equal(sample.loss_mask, full.loss_mask[:n])
        assert np.array_equal(sample.logprobs, full.logprobs[:n])
        assert np.array_equal(sample.versions, full.versions[:n])
        assert sample.truncated == bool(full.loss_mask[n:].any())
        assert sample.loss_mask.any()
    kept = sum(int(s.loss_mask.sum()) for s in short.samples)
    assert kept + sum(short.clipped.values()) == sum(int(s.loss_mask.sum()) for s in whole.samples)


@settings(max_examples=300, deadline=None)
@given(attempts())
def test_i11_how_a_rollout_is_cut_changes_no_token_mean_gradient(calls: list[Call]) -> None:
    """A bigram softmax policy: the samples' summed policy gradient is that of the calls taken one by one."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((3, 3))
    chances = np.exp(weights) / np.exp(weights).sum(1, keepdims=True)

    def gradient(tokens: list[int], mask: list[int]) -> np.ndarray:
        out = np.zeros((3, 3))
        for i in range(1, len(tokens)):
            if mask[i]:
                out[tokens[i - 1]] -= chances[tokens[i - 1]]
                out[tokens[i - 1], tokens[i]] += 1
        return out

    result = cover(calls, NO_LIMIT)
    merged, apart = np.zeros((3, 3)), np.zeros((3, 3))
    for s in result.samples:
        merged += gradient(s.tokens.tolist(), s.loss_mask.tolist())
    for c in calls:
        if c.id not in result.untrained:
            p, a = c.prompt.tolist(), c.completion.tolist()
            apart += gradient(p + a, [0] * len(p) + [1] * len(a))
    assert np.allclose(merged, apart)


def same(a: Sample, b: Sample) -> bool:
    return msgspec.json.encode(a.spans) == msgspec.json.encode(b.spans) and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("tokens", "loss_mask", "logprobs", "versions")
    )


@settings(max_examples=300, deadline=None)
@given(attempts(), attempts(most=3), st.data())
def test_i3_side_calls_and_undelivered_calls_change_no_sample(
    calls: list[Call], extra: list[Call], data: st.DataObject
) -> None:
    before = cover(calls, NO_LIMIT)
    mixed = list(calls)
    for i, c in enumerate(extra):
        aside = data.draw(st.booleans())
        mixed.insert(
            data.draw(st.integers(0, len(mixed))),
            msgspec.structs.replace(
                c,
                id=5000 + i,
                untrainable=Untrainable.SIDE_CALL if aside else None,
                delivered=c.delivered if aside else Delivery.NO,
            ),
        )
    after = cover([msgspec.structs.replace(c, seq=i) for i, c in enumerate(mixed)], NO_LIMIT)
    assert len(before.samples) == len(after.samples)
    assert all(same(a, b) for a, b in zip(before.samples, after.samples, strict=True))


@settings(max_examples=300, deadline=None)
@given(attempts(), st.randoms())
def test_the_order_in_which_rows_are_read_does_not_matter(calls: list[Call], random: object) -> None:
    shuffled = list(calls)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    before, after = cover(calls, NO_LIMIT), cover(shuffled, NO_LIMIT)
    assert before.untrained == after.untrained
    assert all(same(a, b) for a, b in zip(before.samples, after.samples, strict=True))
