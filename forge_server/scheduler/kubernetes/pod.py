"""A pod as the API server tells of it, and what that means for its attempt. Pure.

A pod's phase is not an outcome: a preempted pod whose harness ends on SIGTERM is ``Succeeded``, and a pod past
its deadline has running containers. The runner's finish and the call log decide; what is here explains an
attempt whose runner had no last word (DESIGN §6, I5).

How long a pod has waited is measured by whoever watches it: the cluster's clock need not agree with ours.
"""

import re
from datetime import datetime
from typing import Any

import msgspec

from forge_server.domain.events import Fact
from forge_server.runner.main import DISMISSED


class _Part(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """Only the fields that are read; others are skipped without being built. Thousands are kept."""


class Condition(_Part, frozen=True, rename="camel", gc=False):
    type: str
    status: str = ""
    reason: str = ""
    message: str = ""


class Waiting(_Part, frozen=True, rename="camel", gc=False):
    reason: str = ""
    message: str = ""


class Terminated(_Part, frozen=True, rename="camel", gc=False):
    exit_code: int = 0
    reason: str = ""
    message: str = ""


class Running(_Part, frozen=True, rename="camel", gc=False):
    pass


class ContainerState(_Part, frozen=True, rename="camel", gc=False):
    waiting: Waiting | None = None
    running: Running | None = None
    terminated: Terminated | None = None


class ContainerStatus(_Part, frozen=True, rename="camel", gc=False):
    name: str
    state: ContainerState = ContainerState()


class Owner(msgspec.Struct, frozen=True, gc=False):
    """The label that tells whose a pod is."""

    instance: str = msgspec.field(default="", name="forge-server/instance")


class Metadata(_Part, frozen=True, rename="camel", gc=False):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: Owner = Owner()
    creation_timestamp: str | None = None  # null in bookmarks
    deletion_timestamp: str | None = None


class Spec(_Part, frozen=True, rename="camel", gc=False):
    node_name: str = ""


class Status(_Part, frozen=True, rename="camel", gc=False):
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(_Part, frozen=True, rename="camel", gc=False):
    metadata: Metadata = Metadata()
    spec: Spec = Spec()
    status: Status = Status()


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How long a pod may be in a state that may mend itself, in seconds."""

    unschedulable_s: float = 60.0
    image_s: float = 60.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A fact that ends the attempt. ``independent``: the agent cannot have caused it."""

    fact: Fact
    evidence: dict[str, Any]
    independent: bool = False


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod waits for that may never come, and what it means if it does not. ``hopeless``: it never will."""

    what: str
    fact: Fact
    hopeless: bool = False


_HOPELESS = frozenset({"ErrImageNeverPull", "InvalidImageName"})
_IMAGE = (
    frozenset({"ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable"}) | _HOPELESS
)
_CONTAINER = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})

_DISRUPTED = {
    "PreemptionByScheduler": Fact.EVICTED,
    "PreemptionByKubeScheduler": Fact.EVICTED,
    "EvictionByEvictionAPI": Fact.EVICTED,
    "TerminationByKubelet": Fact.EVICTED,
    "DeletionByTaintManager": Fact.NODE_LOST,
    "DeletionByPodGC": Fact.NODE_LOST,
}
"""Reasons of the condition ``DisruptionTarget`` (Kubernetes documentation, "Pod disruption conditions")."""

_REASONS = {
    "Evicted": Fact.EVICTED,
    "Preempting": Fact.EVICTED,
    "NodeLost": Fact.NODE_LOST,
    "NodeShutdown": Fact.NODE_LOST,
    "Shutdown": Fact.NODE_LOST,
    "Terminated": Fact.NODE_LOST,
    "NodeAffinity": Fact.UNSCHEDULABLE,
    "UnexpectedAdmissionError": Fact.UNSCHEDULABLE,
}


_OWN_EXCESS = re.compile(
    "ephemeral local storage usage exceeds|exceeded its local ephemeral storage limit|Usage of EmptyDir volume"
    r"|was using [^,]+, (?:which exceeds its request of|request is) (?!0\b)"
)
"""In the message of an eviction: the pod used more than it had asked for. Who has asked for nothing cannot be told
from a victim of others."""

_UNKNOWN_END = frozenset({"ContainerStatusUnknown", "Unknown"})
"""Reasons of an end that nobody saw: the node was started anew, or lost its containers."""


def judge(pod: Pod, waited: float, limits: Limits) -> Finding | None:
    """What ends the attempt of this pod, or None while it may still come right. ``waited``: seconds for which
    it has been seen waiting for the same thing (``waits_for``)."""
    return _disrupted(pod) or _ended(pod) or _stuck(pod, waited, limits)


def find(pod: Pod, now: float, limits: Limits, *, ours: bool) -> Finding | None:
    """``judge`` for those who look once: a pod has waited since it was made, if clocks agree.

    ``ours``: we asked for its deletion, so that its end says nothing.
    """
    if ours:
        return None
    made = pod.metadata.creation_timestamp
    return judge(pod, now - datetime.fromisoformat(made).timestamp() if made else 0.0, limits)


def silent(pod: Pod) -> Finding | None:
    """What explains that nothing is heard any more of a pod whose runner had joined: its node is not heard either.

    Of a runner that has joined the kubelet would have told by now. A container that runs is not ready only if the
    node's controller says so; the kubelet has a reason for it.
    """
    if pod.status.phase == "Pending":
        return _finding(pod, Fact.NODE_LOST)
    return _unready(pod)


def _unready(pod: Pod) -> Finding | None:
    ready = next((c for c in pod.status.conditions if c.type == "Ready"), None)
    alive = any(c.state.running is not None for c in pod.status.container_statuses)
    if alive and ready is not None and ready.status != "True" and ready.reason != "ContainersNotReady":
        return _finding(pod, Fact.NODE_LOST)
    return None


def vanished(last: Pod | None) -> Finding:
    """The pod is no longer there and we did not delete it; ``last`` is how it was seen last."""
    if last is not None and (found := _disrupted(last)) is not None:
        return found
    evidence = {"pod": "deleted"} if last is None else {**evidence_of(last), "pod": "deleted"}
    return Finding(fact=Fact.POD_LOST, evidence=evidence, independent=True)


def waits_for(pod: Pod) -> Wait | None:
    """What keeps the pod from starting, if that may last for ever."""
    if pod.status.phase != "Pending":
        return None
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            return Wait(what="a node", fact=Fact.UNSCHEDULABLE)
    for status in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        reason = status.state.waiting.reason if status.state.waiting is not None else ""
        if reason in _IMAGE:
            return Wait(what="an image", fact=Fact.IMAGE_PULL, hopeless=reason in _HOPELESS)
        if reason in _CONTAINER:
            return Wait(what="a container", fact=Fact.LAUNCH_FAILED)
    return None


def placed(pod: Pod) -> bool:
    """Whether it takes room on a node."""
    return bool(pod.spec.node_name) and pod.status.phase not in ("Succeeded", "Failed")


def evidence_of(pod: Pod) -> dict[str, Any]:
    """What is kept of a pod: small, and enough to see later why it ended."""
    kept: dict[str, Any] = {"phase": pod.status.phase}
    if pod.spec.node_name:
        kept["node"] = pod.spec.node_name
    if pod.status.reason:
        kept["reason"] = pod.status.reason
    if pod.status.message:
        kept["message"] = pod.status.message[:500]
    if pod.metadata.deletion_timestamp is not None:
        kept["deleted_at"] = pod.metadata.deletion_timestamp
    kept["conditions"] = [
        {k: v for k, v in (("type", c.type), ("reason", c.reason), ("message", c.message[:300])) if v}
        for c in pod.status.conditions
        if (c.status != "True") != (c.type == "DisruptionTarget")
    ]
    kept["containers"] = [
        {"name": status.name, **_state(status.state)}
        for status in (*pod.status.init_container_statuses, *pod.status.container_statuses)
    ]
    return kept


def last_words(pod: Pod, container: str) -> str:
    """What a container that has ended left at its ``terminationMessagePath``, 4 KiB at most; else empty."""
    ends = (c.state.terminated for c in pod.status.container_statuses if c.name == container)
    return next((end.message for end in ends if end is not None), "")


def _state(state: ContainerState) -> dict[str, Any]:
    if state.terminated is not None:
        end = state.terminated
        found = {"exit": end.exit_code, "reason": end.reason, "message": end.message[-500:]}
        return {k: v for k, v in found.items() if v != ""}
    if state.waiting is not None:
        return {"waiting": state.waiting.reason, "message": state.waiting.message[:300]}
    return {"running": True}


def _finding(pod: Pod, fact: Fact, *, independent: bool = True) -> Finding:
    return Finding(fact=fact, evidence=evidence_of(pod), independent=independent)


def _disrupted(pod: Pod) -> Finding | None:
    """Somebody other than us and the agent ends the pod, whatever its containers made of it.

    A pod that is evicted because it used more than it had asked for is the agent's doing.
    """
    if _OWN_EXCESS.search(pod.status.message):
        return _finding(pod, Fact.PROCESS_GONE, independent=False)
    for condition in pod.status.conditions:
        if condition.type == "DisruptionTarget" and condition.status == "True":
            return _finding(pod, _DISRUPTED.get(condition.reason, Fact.EVICTED))
    if pod.status.reason in _REASONS:
        return _finding(pod, _REASONS[pod.status.reason])
    if pod.status.reason.startswith("OutOf"):
        return _finding(pod, Fact.UNSCHEDULABLE)
    if pod.metadata.deletion_timestamp is None:
        return None
    return _unready(pod) or _finding(pod, Fact.POD_LOST)


def _ended(pod: Pod) -> Finding | None:
    if pod.status.phase not in ("Succeeded", "Failed"):
        return None
    ends = [c.state.terminated for c in pod.status.container_statuses if c.state.terminated is not None]
    begins = [
        c.state.terminated for c in pod.status.init_container_statuses if c.state.terminated is not None
    ]
    if not ends and any(end.exit_code for end in begins):
        return _finding(pod, Fact.LAUNCH_FAILED)
    if any(end.reason == "OOMKilled" for end in ends):
        return _finding(pod, Fact.OOM_AGENT, independent=False)
    if any(end.reason in ("StartError", "ContainerCannotRun") for end in ends):
        return _finding(pod, Fact.LAUNCH_FAILED)
    if any(end.reason in _UNKNOWN_END for end in ends):
        return _finding(pod, Fact.NODE_LOST)
    # The agent can neither make the runner say that it was dismissed nor hold off our own clocks, which come
    # long before that of the pod.
    independent = pod.status.reason == "DeadlineExceeded" or any(end.exit_code == DISMISSED for end in ends)
    return _finding(pod, Fact.PROCESS_GONE, independent=independent)


def _stuck(pod: Pod, waited: float, limits: Limits) -> Finding | None:
    wait = waits_for(pod)
    if wait is None:
        return None
    limit = limits.unschedulable_s if wait.fact is Fact.UNSCHEDULABLE else limits.image_s
    return _finding(pod, wait.fact) if wait.hopeless or waited > limit else None
