"""Policy versions: their states, their numbers, and what the engine should serve.

The ``policies`` rows are the authority: a row is written before the act that it announces, and after a
restart the rows alone say what has to be done. A version number is never reused, not even for a
checkpoint of the same step that a replayed trainer reports again with other bytes.

    exported -> loading -> live -> retired -> loading   (activated again)
        |          |
        v          v
     rejected   rejected; or back to where it came from, when the engine and not the checkpoint failed
"""

from collections.abc import Collection, Iterable, Sequence

import msgspec

from forge_server.domain.errors import Conflict
from forge_server.domain.states import PolicyState

POLICY_BUSY = "policy_busy"
"""Why a run is paused that waits for an older one to have done with the policy; it is resumed by itself."""

POLICY_STEPS: dict[PolicyState, frozenset[PolicyState]] = {
    PolicyState.EXPORTED: frozenset({PolicyState.LOADING, PolicyState.REJECTED}),
    PolicyState.LOADING: frozenset(
        {PolicyState.LIVE, PolicyState.REJECTED, PolicyState.EXPORTED, PolicyState.RETIRED}
    ),
    PolicyState.LIVE: frozenset({PolicyState.RETIRED}),
    PolicyState.RETIRED: frozenset({PolicyState.LOADING}),
    PolicyState.REJECTED: frozenset(),
}


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One row of ``policies``: weights that are, were or will be live. Initial weights have no ``step``."""

    name: str
    version: int
    state: PolicyState
    path: str
    manifest_sha256: str = ""
    run_id: str | None = None
    step: int | None = None
    parent_version: int | None = None
    reason: str = ""
    created_at: float = 0.0
    live_at: float | None = None

    @property
    def served(self) -> bool:
        """Whether it is or was live, so that older exports may be pruned."""
        return self.state in (PolicyState.LIVE, PolicyState.RETIRED)


def check_step(version: Version, to: PolicyState) -> None:
    """Raise Conflict unless ``version`` may go to state ``to``."""
    if to not in POLICY_STEPS[version.state]:
        raise Conflict(
            f"policy {version.name} version {version.version} is {version.state} and cannot become {to}",
            mend="`forge-server policy list` shows the versions",
        )


def next_version(versions: Iterable[int]) -> int:
    """The number of the next version: 0 for the first, never one that was given before."""
    return max(versions, default=-1) + 1


def live(versions: Sequence[Version]) -> Version | None:
    """The version that is live behind the proxy; at most one is."""
    return next((v for v in versions if v.state is PolicyState.LIVE), None)


def head(versions: Sequence[Version], run_id: str, base: int | None) -> Version | None:
    """The version that the run goes on from: its newest that was not rejected, else the one it started
    from.

    "Newest" is by step and then by number, so that a replay of an older step never takes its place,
    while a replay of the newest step, which has a higher number, does.
    """
    usable = [v for v in versions if v.state is not PolicyState.REJECTED]
    own = [v for v in usable if v.run_id == run_id and v.step is not None]
    if own:
        return max(own, key=lambda v: (v.step or 0, v.version))
    return next((v for v in usable if v.version == base), None)


def acknowledged_step(versions: Sequence[Version], run_id: str, needed: Collection[int] = ()) -> int:
    """The newest step of the run whose weights the engine took, and not above that of a version that is ``needed``:
    older exports may be pruned. 0: none."""
    own = [v for v in versions if v.run_id == run_id]
    served = max((v.step or 0 for v in own if v.served), default=0)
    return min([served, *(v.step or 0 for v in own if v.version in needed)])


def resume_step(versions: Sequence[Version], run_id: str, at_most: int) -> int:
    """The newest step, ``at_most`` that, from which the run's trainer may go on. 0: the weights the run started from.

    What follows a rejected checkpoint, with none after it that was not, was made of rejected weights: also a step
    without a checkpoint of its own. Of the checkpoints of one step, the last replay is the one the trainer has.
    """
    ours = sorted((v for v in versions if v.run_id == run_id), key=lambda v: v.version)
    own = {v.step: v.state for v in ours if v.step is not None}
    sound = max((step for step, state in own.items() if state is not PolicyState.REJECTED), default=0)
    return min([at_most, *(step - 1 for step in own if step > sound)])


def usable(versions: Sequence[Version], run_id: str, base: int | None, step: int) -> frozenset[int]:
    """The versions whose tokens the run may train: its own of ``step`` or later, and ``base``, which it started from,
    as long as ``step`` is not above 0.

    What is in flight goes on while its run is paused, whatever is put live meanwhile: weights of other runs are none
    of these, not even those with a higher number.
    """
    own = {v.version for v in versions if v.run_id == run_id and v.step is not None and v.step >= step}
    return frozenset(own | ({base} if base is not None and step <= 0 else set()))


def interrupted(versions: Sequence[Version]) -> Version | None:
    """The version whose swap a restart interrupted: it is done again.

    Whatever the engine says: only the end of the swap, which writes ``live``, tells that the probe has
    passed.
    """
    return next((v for v in versions if v.state is PolicyState.LOADING), None)
