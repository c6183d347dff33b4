"""The token forest: finds, for every call, the earlier call that its prompt continues.

*Structure.* A path-compressed radix tree over token ids. A node is a run of tokens, held as a window into a
growable int32 buffer; a conversation that only grows is one node that grows in place, and a fork splits a
node by moving window borders, without copying a token. Each node remembers which calls' prompts and
completions end inside it.

*By construction.* Every recorded sequence is a path from the root, so the deepest call that ends on the
path of a prompt is the longest earlier call that is an exact prefix of it. Nothing is hashed and nothing is
compared as text: two sequences share a path exactly where their ids are equal (invariants I2, I3).

*Images.* Different images leave the same placeholder ids. A placeholder therefore goes into the tree as a negative
key that stands for (image, id) in this forest, so that two prompts part where their images do. Without images
nothing is copied and ids are their own keys.

*Delivery.* Only a call that is known to be delivered may be a parent. A call whose delivery is unknown
becomes delivered when a later prompt contains its completion and nothing else explains those tokens:
neither a prompt seen before the call, nor the completion of another delivered call.

One forest serves one ``forest_key`` (model, tokenizer, template) of one attempt. It is not thread-safe.
"""

from bisect import bisect_left, insort
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

from forge_server.domain.call import Ids
from forge_server.domain.media import Media
from forge_server.domain.states import Delivery

_CHUNK = 1 << 15  # tokens per comparison: 128 KiB a side, so that the boolean temporary stays in the cache
_RECENT = 3  # prompts remembered as shortcuts into a deep tree
_DEEP = 3  # nodes on a path from which the shortcuts pay


class PlacementKind(StrEnum):
    """How a prompt relates to what came before it."""

    FIRST = "first"  # the forest was empty
    EXTEND = "extend"  # continues a call that nothing else continues
    FORK = "fork"  # continues a call that another call already continues
    RETRY = "retry"  # the very prompt of an earlier call
    BREAK = "break"  # continues no call, but shares half of its prompt or more
    ROOT = "root"  # continues no call and shares less than half


class Placement(msgspec.Struct, frozen=True):
    """Where a call was placed.

    ``parent``: the longest earlier delivered call whose prompt + completion is an exact prefix of the
    prompt (the latest of equals). ``storage_parent``: an earlier call whose prompt + completion shares the
    prompt's first ``shared`` tokens, and no earlier call shares more; None when ``shared`` is 0. ``twin``:
    the latest earlier call with identical prompt and completion. ``confirmed``: calls that this prompt
    showed to have been delivered.
    """

    parent: int | None
    storage_parent: int | None
    shared: int
    kind: PlacementKind
    twin: int | None
    confirmed: tuple[int, ...]


def common_prefix(a: Ids, b: Ids) -> int:
    """Number of leading tokens that ``a`` and ``b`` share."""
    n = min(a.size, b.size)
    for begin in range(0, n, _CHUNK):
        end = min(begin + _CHUNK, n)
        differs: npt.NDArray[np.bool_] = a[begin:end] != b[begin:end]
        first = int(differs.argmax())
        if differs[first]:
            return begin + first
    return n


class _Buffer:
    """An append-only int32 array with amortised growth. Views outlive growth: they hold the old array."""

    __slots__ = ("array", "used")

    def __init__(self, tokens: Ids) -> None:
        self.array = np.empty(max(256, tokens.size + tokens.size // 2), np.int32)
        self.array[: tokens.size] = tokens
        self.used = tokens.size

    def append(self, tokens: Ids) -> None:
        need = self.used + tokens.size
        if need > self.array.size:
            grown = np.empty(max(need, 2 * self.array.size), np.int32)
            grown[: self.used] = self.array[: self.used]
            self.array = grown
        self.array[self.used : need] = tokens
        self.used = need


class _Node:
    """Tokens ``(start, end]`` of every path through it; ``offset`` is where they begin in ``buffer``.

    ``ends`` and ``prompts``: (position, call) of the completions and prompts that end in it, sorted.
    ``latest``: the latest call that reaches ``end``. ``reach``: how far into the node any prompt goes.
    """

    __slots__ = ("buffer", "end", "ends", "kids", "latest", "offset", "parent", "prompts", "reach", "start")

    def __init__(self, buffer: _Buffer, offset: int, start: int, end: int, parent: "_Node | None") -> None:
        self.buffer, self.offset, self.start, self.end, self.parent = buffer, offset, start, end, parent
        self.kids: dict[int, _Node] = {}
        self.ends: list[tuple[int, int]] = []
        self.prompts: list[tuple[int, int]] = []
        self.latest = -1
        self.reach = start

    def tokens(self, begin: int, end: int) -> Ids:
        """A view of the tokens at positions ``[begin, end)``."""
        shift = self.offset - self.start
        return self.buffer.array[begin + shift : end + shift]


class _Entry:
    """A call in the forest, in order of arrival. The nodes are where it ends, or were before a split."""

    __slots__ = ("continued", "delivered", "id", "node", "prompt_len", "prompt_node", "total_len")

    def __init__(self, id: int, prompt_len: int, total_len: int, delivered: Delivery) -> None:
        self.id, self.prompt_len, self.total_len, self.delivered = id, prompt_len, total_len, delivered
        self.continued = False
        self.node: _Node
        self.prompt_node: _Node


class Forest:
    """Places calls one by one; see the module's docstring. Arrays passed in must not change afterwards."""

    def __init__(self) -> None:
        # the root holds no token; start -1 makes position 0 lie in it like any other position in its node
        self._root = _Node(_Buffer(np.empty(0, np.int32)), 0, -1, 0, None)
        self._calls: list[_Entry] = []
        self._order: dict[int, int] = {}
        self._pending: dict[int, _Entry] = {}  # delivery unknown, and a later prompt could show it
        self._recent: list[tuple[Ids, _Entry]] = []
        self._depth = 0
        self._keys: dict[tuple[str, int], int] = {}  # (image, placeholder id) -> -1, -2, …

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, id: int) -> bool:
        return id in self._order

    def add(self, id: int, prompt: Ids, completion: Ids, delivered: Delivery, media: Media = ()) -> Placement:
        """Place call ``id`` (int32 prompt [P], completion [C]): compares O(P), copies the new. ``media``: the
        images of the prompt."""
        if id in self._order:
            raise ValueError(f"call {id} is in the forest already")
        if media:
            prompt = self._keyed(prompt, media)
        order = len(self._calls)
        node, pos = self._walk(*self._start(prompt), prompt)
        shared = pos
        storage_parent = self._calls[self._through(node, pos)].id if shared else None
        confirmed = self._confirm(node, pos) if self._pending else ()
        parent = self._deepest_delivered(node, pos)
        kind = self._kind(node, pos, prompt.size, parent)

        entry = _Entry(id, prompt.size, prompt.size + completion.size, delivered)
        node, pos = self._append(node, pos, prompt[pos:])
        entry.prompt_node = node
        insort(node.prompts, (pos, order))
        self._cover(node, pos)
        node, pos = self._walk(node, pos, completion, base=prompt.size)
        twin = self._twin(node, pos, entry) if pos == entry.total_len else None
        in_a_prompt = pos == entry.total_len and node.reach >= pos
        node, pos = self._append(node, pos, completion[pos - prompt.size :])
        entry.node = node
        if completion.size:  # an empty answer continues nothing and cannot be continued
            insort(node.ends, (pos, order))
            if delivered is Delivery.UNKNOWN and not in_a_prompt:
                self._pending[order] = entry
        self._passed(node, pos, order)

        if parent is not None:
            parent.continued = True
        self._calls.append(entry)
        self._order[id] = order
        self._recent.insert(0, (prompt, entry))
        del self._recent[_RECENT:]
        return Placement(
            parent=parent.id if parent else None,
            storage_parent=storage_parent,
            shared=shared,
            kind=kind,
            twin=twin,
            confirmed=confirmed,
        )

    def confirm_delivery(self, id: int) -> None:
        """The harness is now known to have got the answer of call ``id``."""
        order = self._order[id]
        self._calls[order].delivered = Delivery.YES
        self._pending.pop(order, None)

    def deny_delivery(self, id: int) -> Delivery:
        """The answer of call ``id`` did not reach the harness, unless a prompt has shown that it did.

        Returns the delivery in force.
        """
        order = self._order[id]
        entry = self._calls[order]
        if entry.delivered is Delivery.UNKNOWN:
            entry.delivered = Delivery.NO
            self._pending.pop(order, None)
        return entry.delivered

    def delivery(self, id: int) -> Delivery:
        """What is known about the delivery of call ``id``."""
        return self._calls[self._order[id]].delivered

    def tokens(self, id: int) -> Ids:
        """Prompt + completion of call ``id``, rebuilt from the tree (a copy)."""
        entry = self._calls[self._order[id]]
        out = np.empty(entry.total_len, np.int32)
        node, pos = _home(entry.node, entry.total_len), entry.total_len
        while node.parent is not None:
            out[node.start : pos] = node.tokens(node.start, pos)
            node, pos = node.parent, node.start
        if self._keys:
            ids = np.array([id for _, id in self._keys], np.int32)
            keyed = out < 0
            out[keyed] = ids[-1 - out[keyed]]
        return out

    def _keyed(self, prompt: Ids, media: Media) -> Ids:
        """The prompt with a key of its own for each image in place of the image's placeholders."""
        keyed = prompt.copy()
        for span in media:
            run = keyed[span.offset : span.end]
            for id in np.unique(run).tolist():
                run[prompt[span.offset : span.end] == id] = self._keys.setdefault(
                    (span.sha256, id), -1 - len(self._keys)
                )
        return keyed

    # ---- the tree ----------------------------------------------------------------------------------------

    def _start(self, prompt: Ids) -> tuple[_Node, int]:
        """Where to begin the walk: the end of a recent prompt that is a prefix of this one, else the root.

        In a deep tree this replaces a comparison per node by a single one.
        """
        if self._depth > _DEEP:
            for recent, entry in self._recent:
                n = recent.size
                if not 0 < n <= prompt.size or prompt[n - 1] != recent[n - 1]:
                    continue
                if common_prefix(recent, prompt) == n:
                    return _home(entry.prompt_node, n), n
        return self._root, 0

    def _walk(self, node: _Node, pos: int, tokens: Ids, base: int = 0) -> tuple[_Node, int]:
        """Follow ``tokens`` (the first is at position ``base``) from ``pos`` as far as the tree agrees."""
        last = base + tokens.size
        if pos < node.end and pos < last:
            pos += common_prefix(node.tokens(pos, node.end), tokens[pos - base :])
        depth = 1
        while pos == node.end and pos < last:
            kid = node.kids.get(int(tokens[pos - base]))
            if kid is None:
                break
            node = kid
            depth += 1
            pos += common_prefix(node.tokens(pos, node.end), tokens[pos - base :])
        if base == 0:
            self._depth = max(depth, self._depth)
        return node, pos

    def _append(self, node: _Node, pos: int, tokens: Ids) -> tuple[_Node, int]:
        """Attach tokens on which the tree does not agree at ``pos``; returns where they end."""
        if tokens.size == 0:
            return node, pos
        if pos < node.end:
            node = self._split(node, pos)
        end = pos + tokens.size
        if not node.kids and node is not self._root and node.offset + pos - node.start == node.buffer.used:
            node.buffer.append(tokens)
            node.end = end
            return node, end
        kid = _Node(_Buffer(tokens), 0, pos, end, node)
        node.kids[int(tokens[0])] = kid
        return kid, end

    def _split(self, node: _Node, pos: int) -> _Node:
        """Cut ``node`` at ``pos``; returns the new upper part. The node itself stays the lower part."""
        assert node.parent is not None
        upper = _Node(node.buffer, node.offset, node.start, pos, node.parent)
        upper.latest = self._through(node, pos)
        node.parent.kids[int(node.buffer.array[node.offset])] = upper
        node.offset += pos - node.start
        node.start = pos
        node.parent = upper
        upper.kids[int(node.buffer.array[node.offset])] = node
        cut = bisect_left(node.ends, (pos + 1,))
        upper.ends, node.ends = node.ends[:cut], node.ends[cut:]
        cut = bisect_left(node.prompts, (pos + 1,))
        upper.prompts, node.prompts = node.prompts[:cut], node.prompts[cut:]
        upper.reach, node.reach = min(node.reach, pos), max(node.reach, pos)
        return upper

    def _cover(self, node: _Node, pos: int) -> None:
        """Note that a prompt goes to ``pos``. Above a node that is covered to its end, everything is."""
        at: _Node | None = node
        while at is not None and at.reach < pos:
            at.reach, pos, at = pos, at.start, at.parent

    def _passed(self, node: _Node, pos: int, order: int) -> None:
        """Note that call ``order`` ends at ``pos``: it reaches the end of every node above."""
        if pos == node.end:
            node.latest = order
        above = node.parent
        while above is not None:
            above.latest = order
            above = above.parent

    def _through(self, node: _Node, pos: int) -> int:
        """The latest call whose path reaches ``pos`` in ``node``."""
        ending = node.ends[bisect_left(node.ends, (pos,)) :] if pos < node.end else ()
        return max(node.latest, max((order for _, order in ending), default=-1))

    # ---- what a location says ----------------------------------------------------------------------------

    def _kind(self, node: _Node, pos: int, size: int, parent: _Entry | None) -> PlacementKind:
        if not self._calls:
            return PlacementKind.FIRST
        if pos == size and bisect_left(node.prompts, (pos,)) < bisect_left(node.prompts, (pos + 1,)):
            return PlacementKind.RETRY
        if parent is not None:
            return PlacementKind.FORK if parent.continued else PlacementKind.EXTEND
        return PlacementKind.BREAK if 2 * pos >= size else PlacementKind.ROOT

    def _deepest_delivered(self, node: _Node, pos: int) -> _Entry | None:
        at: _Node | None = node
        while at is not None:
            ends = at.ends if pos >= at.end else at.ends[: bisect_left(at.ends, (pos + 1,))]
            for _, order in reversed(ends):
                if self._calls[order].delivered is Delivery.YES:
                    return self._calls[order]
            at = at.parent
        return None

    def _twin(self, node: _Node, pos: int, entry: _Entry) -> int | None:
        for place, order in reversed(node.ends):
            if place < pos:
                break
            other = self._calls[order]
            if place == pos and other.prompt_len == entry.prompt_len:
                return other.id
        return None

    def _confirm(self, node: _Node, pos: int) -> tuple[int, ...]:
        """Settle the calls of unknown delivery that a prompt matching up to ``pos`` shows to have been
        delivered.

        From the longest to the shortest: a call is shown unless the completion of another delivered call on
        the path covers its completion, and so explains the tokens by itself.
        """
        path: list[_Node] = []
        at: _Node | None = node
        while at is not None:
            path.append(at)
            at = at.parent
        on_path = set(map(id, path))
        candidates = {
            order: entry
            for order, entry in self._pending.items()
            if entry.total_len <= pos and id(_home(entry.node, entry.total_len)) in on_path
        }
        if not candidates:
            return ()
        shortest = min(entry.total_len for entry in candidates.values())
        relevant: list[tuple[int, bool, int]] = []  # sorts longest first, known before unknown, latest first
        for held in path:
            for place, order in reversed(held.ends):
                if place < shortest:
                    break
                known = self._calls[order].delivered is Delivery.YES
                if place <= pos and (known or order in candidates):
                    relevant.append((-place, not known, -order))
        confirmed = []
        floor = pos + 1  # the least prompt length among the delivered calls seen so far
        for _, unknown, negative in sorted(relevant):
            entry = self._calls[-negative]
            if unknown and entry.prompt_len < floor:
                self.confirm_delivery(entry.id)
                confirmed.append(entry.id)
            if not unknown or entry.delivered is Delivery.YES:
                floor = min(floor, entry.prompt_len)
        return tuple(reversed(confirmed))


def _home(node: _Node, pos: int) -> _Node:
    """The node that holds ``pos`` now: splits since then may have moved the position into a node above."""
    while pos <= node.start:
        assert node.parent is not None
        node = node.parent
    return node
