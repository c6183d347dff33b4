"""A pod as the API server tells of it, and what that means for its attempt. Pure.

A pod's phase is not an outcome: a preempted pod whose harness ends on SIGTERM is ``Succeeded``, and a pod past
its deadline has running containers. The runner's finish and the call log decide; what is here explains an
attempt whose runner had no last word (DESIGN §6, I5).
"""

from datetime import datetime
from typing import Any

import msgspec

from forge_server.domain.events import Fact
from forge_server.runner.main import DISMISSED


class _Part(msgspec.Struct, frozen=True, rename="camel"):
    """Only the fields that are read; others are skipped without being built."""


class Condition(_Part, frozen=True, rename="camel"):
    type: str
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None


class Waiting(_Part, frozen=True, rename="camel"):
    reason: str = ""
    message: str = ""


class Terminated(_Part, frozen=True, rename="camel"):
    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    message: str = ""
    started_at: datetime | None = None
    finished_at: datetime | None = None


class Running(_Part, frozen=True, rename="camel"):
    started_at: datetime | None = None


class ContainerState(_Part, frozen=True, rename="camel"):
    waiting: Waiting | None = None
    running: Running | None = None
    terminated: Terminated | None = None


class ContainerStatus(_Part, frozen=True, rename="camel"):
    name: str
    state: ContainerState = ContainerState()
    restart_count: int = 0


class Metadata(_Part, frozen=True, rename="camel"):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None


class Spec(_Part, frozen=True, rename="camel"):
    node_name: str = ""


class Status(_Part, frozen=True, rename="camel"):
    phase: str = ""
    reason: str = ""
    message: str = ""
    start_time: datetime | None = None
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(_Part, frozen=True, rename="camel"):
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


def find(pod: Pod, now: float, limits: Limits, *, ours: bool) -> Finding | None:
    """What ends the attempt of this pod, or None while it may still come right.

    ``ours``: we asked for its deletion, so that its end says nothing.
    """
    if ours:
        return None
    return _disrupted(pod) or _ended(pod) or _stuck(pod, now, limits)


def vanished(last: Pod | None) -> Finding:
    """The pod is no longer there and we did not delete it; ``last`` is how it was seen last."""
    if last is not None and (found := _disrupted(last)) is not None:
        return found
    evidence = {"pod": "deleted"} if last is None else {**evidence_of(last), "pod": "deleted"}
    return Finding(fact=Fact.POD_LOST, evidence=evidence, independent=True)


def timed(pod: Pod, now: float) -> bool:
    """Whether time alone may change what is found: the pod waits for something."""
    return pod.status.phase == "Pending" and _stuck(pod, now + 1e9, Limits()) is not None


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
        kept["deleted_at"] = pod.metadata.deletion_timestamp.isoformat()
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
    """Somebody other than us and the agent ends the pod, whatever its containers made of it."""
    for condition in pod.status.conditions:
        if condition.type == "DisruptionTarget" and condition.status == "True":
            return _finding(pod, _DISRUPTED.get(condition.reason, Fact.EVICTED))
    if pod.status.reason in _REASONS:
        return _finding(pod, _REASONS[pod.status.reason])
    if pod.status.reason.startswith("OutOf"):
        return _finding(pod, Fact.UNSCHEDULABLE)
    if pod.metadata.deletion_timestamp is None:
        return None
    ready = next((c for c in pod.status.conditions if c.type == "Ready"), None)
    alive = any(c.state.running is not None for c in pod.status.container_statuses)
    # the node's own kubelet would have told of its containers' end; a silent one leaves them running, not ready
    lost = alive and ready is not None and ready.status != "True"
    return _finding(pod, Fact.NODE_LOST if lost else Fact.POD_LOST)


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
    dismissed = any(end.exit_code == DISMISSED for end in ends)  # the agent cannot make the runner say that
    return _finding(pod, Fact.PROCESS_GONE, independent=dismissed)


def _stuck(pod: Pod, now: float, limits: Limits) -> Finding | None:
    if pod.status.phase != "Pending":
        return None
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            since = condition.last_transition_time or pod.metadata.creation_timestamp
            if since is not None and now - since.timestamp() > limits.unschedulable_s:
                return _finding(pod, Fact.UNSCHEDULABLE)
    waits = [
        status.state.waiting
        for status in (*pod.status.init_container_statuses, *pod.status.container_statuses)
        if status.state.waiting is not None
    ]
    began = pod.status.start_time or pod.metadata.creation_timestamp
    waited = now - began.timestamp() if began is not None else 0.0
    for wait in waits:
        if wait.reason in _IMAGE and (wait.reason in _HOPELESS or waited > limits.image_s):
            return _finding(pod, Fact.IMAGE_PULL)
        if wait.reason in _CONTAINER and waited > limits.image_s:
            return _finding(pod, Fact.LAUNCH_FAILED)
    return None
