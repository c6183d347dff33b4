"""The token forest against a naive O(n^2) oracle, on tiny alphabets where everything collides."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_server.domain.call import Ids
from forge_server.domain.states import Delivery
from forge_server.trajectory.forest import Forest, PlacementKind, common_prefix

Spec = tuple[list[int], list[int], Delivery]  # prompt, completion, delivery
DELIVERIES = st.sampled_from([Delivery.YES, Delivery.YES, Delivery.UNKNOWN, Delivery.NO])


def ids(tokens: Sequence[int]) -> Ids:
    return np.array(tokens, np.int32)


@st.composite
def conversations(draw: st.DrawFn, most: int = 14) -> list[Spec]:
    """Calls over three tokens; new prompts are built from earlier sequences, so that prefixes collide."""
    token = st.integers(0, 2)
    calls: list[Spec] = []
    for _ in range(draw(st.integers(1, most))):
        how = (
            draw(st.sampled_from(["new", "extend", "extend", "cut", "mutate", "again", "twin"]))
            if calls
            else "new"
        )
        if how == "new":
            prompt = draw(st.lists(token, min_size=1, max_size=6))
        else:
            before, answer, _ = calls[draw(st.integers(0, len(calls) - 1))]
            whole = before + answer
            if how == "extend":
                prompt = whole + draw(st.lists(token, max_size=4))
            elif how == "cut":
                prompt = whole[: draw(st.integers(1, len(whole)))] + draw(st.lists(token, max_size=3))
            elif how == "mutate":
                at = draw(st.integers(0, len(whole) - 1))
                prompt = [*whole[:at], (whole[at] + 1) % 3, *whole[at + 1 :]]
            else:
                prompt = before
        completion = answer if how == "twin" else draw(st.lists(token, max_size=5))
        calls.append((prompt, completion, draw(DELIVERIES)))
    return calls


class Oracle:
    """The same rules, said directly: compare everything with everything."""

    def __init__(self) -> None:
        self.calls: list[Spec] = []
        self.delivered: list[Delivery] = []

    def add(self, prompt: list[int], completion: list[int], delivered: Delivery) -> dict[str, object]:
        def starts(whole: list[int], head: list[int]) -> bool:
            return whole[: len(head)] == head

        def lcp(a: list[int], b: list[int]) -> int:
            n = 0
            while n < min(len(a), len(b)) and a[n] == b[n]:
                n += 1
            return n

        wholes = [p + c for p, c, _ in self.calls]
        contained = [i for i, w in enumerate(wholes) if starts(prompt, w) and self.calls[i][1]]
        shown = [
            i
            for i in contained
            if self.delivered[i] is Delivery.UNKNOWN
            and not any(starts(p, wholes[i]) for p, _, _ in self.calls[:i])
        ]
        ranked = sorted(
            [i for i in contained if self.delivered[i] is Delivery.YES or i in shown],
            key=lambda i: (-len(wholes[i]), self.delivered[i] is not Delivery.YES, -i),
        )
        accepted: list[int] = []
        confirmed = []
        for i in ranked:
            explained = any(len(self.calls[k][0]) <= len(self.calls[i][0]) for k in accepted)
            if self.delivered[i] is Delivery.YES:
                accepted.append(i)
            elif not explained:
                accepted.append(i)
                confirmed.append(i)
        for i in confirmed:
            self.delivered[i] = Delivery.YES
        parents = [i for i in contained if self.delivered[i] is Delivery.YES]
        parent = max(parents, key=lambda i: (len(wholes[i]), i), default=None)
        shared = max((lcp(w, prompt) for w in wholes), default=0)
        twins = [i for i, (p, c, _) in enumerate(self.calls) if (p, c) == (prompt, completion) and c]
        self.calls.append((prompt, completion, delivered))
        self.delivered.append(delivered)
        return {
            "parent": parent,
            "shared": shared,
            "confirmed": set(confirmed),
            "twin": twins[-1] if twins else None,
        }


@settings(max_examples=300, deadline=None)
@given(conversations())
def test_forest_places_every_call_where_the_oracle_does(calls: list[Spec]) -> None:
    forest, oracle = Forest(), Oracle()
    for i, (prompt, completion, delivered) in enumerate(calls):
        placed = forest.add(i, ids(prompt), ids(completion), delivered)
        expected = oracle.add(prompt, completion, delivered)
        assert placed.parent == expected["parent"]
        assert placed.shared == expected["shared"]
        assert set(placed.confirmed) == expected["confirmed"]
        assert placed.twin == expected["twin"]
        assert [forest.delivery(k) for k in range(i + 1)] == oracle.delivered
        if placed.storage_parent is None:
            assert placed.shared == 0
        else:
            p, c, _ = calls[placed.storage_parent]
            assert (p + c)[: placed.shared] == prompt[: placed.shared]
        if placed.kind is PlacementKind.RETRY:
            assert any(prompt == p for p, _, _ in calls[:i])
        else:
            assert all(prompt != p for p, _, _ in calls[:i])
    for i, (prompt, completion, _) in enumerate(calls):
        assert forest.tokens(i).tolist() == prompt + completion


@settings(max_examples=300, deadline=None)
@given(conversations(most=40))
def test_shortcuts_into_a_deep_tree_change_nothing(calls: list[Spec]) -> None:
    plain, deep = Forest(), Forest()
    deep._depth = 100  # shortcuts from the first call on
    plain._depth = -(10**9)  # never
    for i, (prompt, completion, delivered) in enumerate(calls):
        plain._depth = -(10**9)
        assert plain.add(i, ids(prompt), ids(completion), delivered) == deep.add(
            i, ids(prompt), ids(completion), delivered
        )


def test_case_37_a_thousand_turns_are_one_node() -> None:
    forest, rng = Forest(), np.random.default_rng(0)
    prompt = rng.integers(0, 1000, 10, dtype=np.int32)
    for i in range(1000):
        completion = rng.integers(0, 1000, 5, dtype=np.int32)
        placed = forest.add(i, prompt, completion, Delivery.YES)
        assert placed.parent == (i - 1 if i else None)
        prompt = np.concatenate((prompt, completion, rng.integers(0, 1000, 5, dtype=np.int32)))
    nodes, todo = 0, list(forest._root.kids.values())
    while todo:
        nodes += 1
        todo += todo.pop().kids.values()
    assert nodes == 1


def test_case_38_many_branches_share_their_prefix_in_memory() -> None:
    forest, rng = Forest(), np.random.default_rng(0)
    prefix = rng.integers(0, 1000, 90_000, dtype=np.int32)
    for i in range(50):
        tail = np.concatenate((ids([2000 + i]), rng.integers(0, 1000, 99, dtype=np.int32)))
        placed = forest.add(i, np.concatenate((prefix, tail)), ids([1, 2, 3]), Delivery.YES)
        assert placed.shared == (90_000 if i else 0)
    stored, todo = 0, list(forest._root.kids.values())
    while todo:
        node = todo.pop()
        stored += node.end - node.start
        todo += node.kids.values()
    assert stored == 90_000 + 50 * 103


def test_case_16_an_empty_answer_is_no_parent_of_its_retry() -> None:
    forest = Forest()
    forest.add(1, ids([1, 2]), ids([]), Delivery.YES)
    placed = forest.add(2, ids([1, 2]), ids([3]), Delivery.YES)
    assert (placed.parent, placed.kind) == (None, PlacementKind.RETRY)


def test_case_11_a_call_that_was_not_delivered_is_no_parent() -> None:
    forest = Forest()
    forest.add(1, ids([1, 2]), ids([3]), Delivery.NO)
    forest.add(2, ids([1, 2]), ids([3]), Delivery.YES)
    assert forest.add(3, ids([1, 2, 3, 4]), ids([5]), Delivery.YES).parent == 2


def test_case_14_of_identical_twins_the_latest_delivered_is_the_parent() -> None:
    forest = Forest()
    forest.add(1, ids([1, 2]), ids([3]), Delivery.YES)
    assert forest.add(2, ids([1, 2]), ids([3]), Delivery.YES).twin == 1
    assert forest.add(3, ids([1, 2, 3, 4]), ids([5]), Delivery.YES).parent == 2


def test_a_later_prompt_shows_that_an_answer_was_delivered() -> None:
    forest = Forest()
    forest.add(1, ids([1, 2]), ids([3, 4]), Delivery.UNKNOWN)
    placed = forest.add(2, ids([1, 2, 3, 4, 5]), ids([6]), Delivery.UNKNOWN)
    assert (placed.parent, placed.confirmed) == (1, (1,))
    assert (forest.delivery(1), forest.delivery(2)) == (Delivery.YES, Delivery.UNKNOWN)
    assert forest.deny_delivery(1) is Delivery.YES  # the prompt knows better than the socket
    assert forest.deny_delivery(2) is Delivery.NO


def test_tokens_that_something_else_explains_show_no_delivery() -> None:
    forest = Forest()
    forest.add(1, ids([1, 2]), ids([3]), Delivery.YES)
    forest.add(2, ids([1, 2]), ids([3]), Delivery.UNKNOWN)  # its twin explains the next prompt
    assert forest.add(3, ids([1, 2, 3, 4]), ids([5]), Delivery.YES).confirmed == ()
    forest.add(
        4, ids([1, 2]), ids([3, 4]), Delivery.UNKNOWN
    )  # a prompt held these tokens before the call did
    assert forest.add(5, ids([1, 2, 3, 4, 6]), ids([7]), Delivery.YES).confirmed == ()


def test_a_call_is_placed_once() -> None:
    forest = Forest()
    forest.add(1, ids([1]), ids([2]), Delivery.YES)
    with pytest.raises(ValueError, match="call 1"):
        forest.add(1, ids([1]), ids([2]), Delivery.YES)


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(ids(a), ids(b))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_common_prefix_beyond_one_chunk() -> None:
    a = np.zeros(100_000, np.int32)
    b = a.copy()
    assert common_prefix(a, b) == 100_000
    b[99_999] = 1
    assert common_prefix(a, b) == 99_999
