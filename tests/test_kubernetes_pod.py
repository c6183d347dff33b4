"""What a pod means for its attempt: one line per state that the API server tells, as it tells it."""

from typing import Any

import msgspec
import pytest

from forge_server.domain.events import Fact
from forge_server.scheduler.kubernetes import client
from forge_server.scheduler.kubernetes.pod import (
    Limits,
    Pod,
    evidence_of,
    find,
    judge,
    silent,
    vanished,
    waits_for,
)

LIMITS = Limits(unschedulable_s=60.0, image_s=60.0)
LONG, SHORT = 61.0, 1.0
GONE = {"deletionTimestamp": "2026-11-29T10:01:00Z", "deletionGracePeriodSeconds": 30}
READY = {"type": "Ready", "status": "True"}
NODE_SILENT = {"type": "Ready", "status": "False"}
STOPPED = {"type": "Ready", "status": "False", "reason": "ContainersNotReady", "message": "unready: [runner]"}
OVER = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": None}}
RUNNING = {"running": {"startedAt": "2026-11-29T10:00:05Z"}}


def test_a_bookmark_is_read() -> None:
    """As an API server of version 1.20 sends it: a pod with a version and nothing else, nulls included."""
    line = (
        b'{"type":"BOOKMARK","object":{"kind":"Pod","apiVersion":"v1","metadata":{"resourceVersion":"12746",'
        b'"creationTimestamp":null},"spec":{"containers":null},"status":{}}}'
    )
    seen = client._seen(line)
    assert (seen.type, seen.pod.metadata.resource_version) == ("BOOKMARK", "12746")


def pod(
    phase: str,
    state: dict[str, Any] | None = None,
    *,
    init: dict[str, Any] | None = None,
    conditions: tuple[dict[str, Any], ...] = (),
    reason: str = "",
    message: str = "",
    metadata: dict[str, Any] | None = None,
    node: str = "node1",
) -> Pod:
    status: dict[str, Any] = {
        "phase": phase,
        "conditions": list(conditions),
        "qosClass": "Burstable",
        "startTime": "2026-11-29T10:00:01Z",
    }
    if reason:
        status |= {"reason": reason}
    if message:
        status |= {"message": message}
    for key, name, found in (
        ("containerStatuses", "runner", state),
        ("initContainerStatuses", "forge", init),
    ):
        if found is not None:
            status[key] = [
                {
                    "name": name,
                    "state": found,
                    "lastState": {},
                    "ready": "running" in found,
                    "restartCount": 0,
                    "image": "localhost/busybox:1",
                    "imageID": "",
                }
            ]
    about = {
        "name": "at-1",
        "namespace": "n",
        "uid": "c1c5a8a2-6a3e-4c7c-9a57-3b9d3f7c1b11",
        "resourceVersion": "392",
        "creationTimestamp": "2026-11-29T10:00:00Z",
        "labels": {"app.kubernetes.io/managed-by": "forge-server", "forge-server/instance": "in-1"},
        "managedFields": [{"manager": "kubelet", "operation": "Update"}],
    }
    document = {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": about | (metadata or {}),
        "spec": {"nodeName": node, "containers": [], "tolerations": None} if node else {"containers": []},
        "status": status,
    }
    return msgspec.json.decode(msgspec.json.encode(document), type=Pod)


def ended(code: int, reason: str, message: str = "") -> dict[str, Any]:
    times = {"startedAt": "2026-11-29T10:00:05Z", "finishedAt": "2026-11-29T10:00:09Z"}
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, **times}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def disrupted(reason: str) -> tuple[dict[str, Any], ...]:
    return ({"type": "DisruptionTarget", "status": "True", "reason": reason}, READY)


UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/2 nodes are available: 2 Insufficient memory.",
}

LOW = "The node was low on resource: ephemeral-storage. "
TABLE: list[tuple[str, Pod, float, Fact | None, bool]] = [
    # what, the pod, how long it was seen waiting, the fact, whether the agent cannot have caused it
    ("just made", pod("Pending", node=""), 0.0, None, False),
    ("being made", pod("Pending", waiting("PodInitializing"), init=RUNNING), LONG, None, False),
    ("at work", pod("Running", RUNNING, conditions=(READY,)), 0.0, None, False),
    ("no node yet", pod("Pending", conditions=(UNSCHEDULABLE,), node=""), SHORT, None, False),
    ("no node", pod("Pending", conditions=(UNSCHEDULABLE,), node=""), LONG, Fact.UNSCHEDULABLE, True),
    ("image late", pod("Pending", waiting("ErrImagePull", "not found")), SHORT, None, False),
    ("no image", pod("Pending", waiting("ErrImagePull", "not found")), LONG, Fact.IMAGE_PULL, True),
    ("no image, again", pod("Pending", waiting("ImagePullBackOff")), LONG, Fact.IMAGE_PULL, True),
    ("never an image", pod("Pending", waiting("ErrImageNeverPull")), 0.0, Fact.IMAGE_PULL, True),
    ("no image of that name", pod("Pending", waiting("InvalidImageName")), 0.0, Fact.IMAGE_PULL, True),
    (
        "no tree",
        pod("Pending", waiting("PodInitializing"), init=waiting("ErrImagePull")),
        LONG,
        Fact.IMAGE_PULL,
        True,
    ),
    ("no container yet", pod("Pending", waiting("CreateContainerError", "x")), SHORT, None, False),
    ("no container", pod("Pending", waiting("CreateContainerError", "x")), LONG, Fact.LAUNCH_FAILED, True),
    ("bad config", pod("Pending", waiting("CreateContainerConfigError")), LONG, Fact.LAUNCH_FAILED, True),
    (
        "no such program",
        pod("Failed", ended(128, "StartError", "exec: no such file")),
        0.0,
        Fact.LAUNCH_FAILED,
        True,
    ),
    (
        "init failed",
        pod("Failed", waiting("PodInitializing"), init=ended(1, "Error")),
        0.0,
        Fact.LAUNCH_FAILED,
        True,
    ),
    ("done", pod("Succeeded", OVER), 0.0, Fact.PROCESS_GONE, False),
    ("stumbled", pod("Failed", ended(1, "Error", "Traceback …")), 0.0, Fact.PROCESS_GONE, False),
    ("killed", pod("Failed", ended(137, "Error")), 0.0, Fact.PROCESS_GONE, False),
    ("dismissed", pod("Failed", ended(3, "Error")), 0.0, Fact.PROCESS_GONE, True),
    ("out of memory", pod("Failed", ended(137, "OOMKilled")), 0.0, Fact.OOM_AGENT, False),
    ("past its deadline", pod("Failed", RUNNING, reason="DeadlineExceeded"), 0.0, Fact.PROCESS_GONE, True),
    ("node started anew", pod("Failed", ended(255, "Unknown")), 0, Fact.NODE_LOST, True),
    ("node lost it", pod("Failed", ended(137, "ContainerStatusUnknown")), 0, Fact.NODE_LOST, True),
    ("deleted", pod("Running", RUNNING, conditions=(READY,), metadata=GONE), 0, Fact.POD_LOST, True),
    ("deleted before it began", pod("Pending", metadata=GONE, node=""), 0, Fact.POD_LOST, True),
    (
        "deleted, stopping",
        pod("Running", OVER, conditions=(STOPPED,), metadata=GONE),
        0.0,
        Fact.POD_LOST,
        True,
    ),
    # the harness ended on SIGTERM
    ("preempted", pod("Succeeded", OVER, metadata=GONE), 0, Fact.POD_LOST, True),
    (
        "deleted on a silent node",
        pod("Running", RUNNING, conditions=(NODE_SILENT,), metadata=GONE),
        0.0,
        Fact.NODE_LOST,
        True,
    ),
    ("on a silent node", pod("Running", RUNNING, conditions=(NODE_SILENT,)), 0.0, None, False),
    (
        "evicted",
        pod("Failed", reason="Evicted", message="low on resource: memory"),
        0.0,
        Fact.EVICTED,
        True,
    ),
    ("node shut down", pod("Failed", ended(137, "Error"), reason="NodeShutdown"), 0, Fact.NODE_LOST, True),
    ("node lost", pod("Running", RUNNING, reason="NodeLost"), 0, Fact.NODE_LOST, True),
    ("refused by the node", pod("Failed", reason="OutOfmemory"), 0.0, Fact.UNSCHEDULABLE, True),
    ("admission", pod("Failed", reason="UnexpectedAdmissionError"), 0.0, Fact.UNSCHEDULABLE, True),
    (
        "api eviction",
        pod("Running", RUNNING, conditions=disrupted("EvictionByEvictionAPI")),
        0.0,
        Fact.EVICTED,
        True,
    ),
    (
        "preemption",
        pod("Succeeded", OVER, conditions=disrupted("PreemptionByScheduler")),
        0.0,
        Fact.EVICTED,
        True,
    ),
    (
        "taint",
        pod("Running", RUNNING, conditions=disrupted("DeletionByTaintManager")),
        0.0,
        Fact.NODE_LOST,
        True,
    ),
    ("pod gc", pod("Failed", RUNNING, conditions=disrupted("DeletionByPodGC")), 0, Fact.NODE_LOST, True),
    (
        "a reason to come",
        pod("Running", RUNNING, conditions=disrupted("DeletionByAliens")),
        0.0,
        Fact.EVICTED,
        True,
    ),
]


@pytest.mark.parametrize(
    ("what", "seen", "waited", "fact", "independent"), TABLE, ids=[line[0] for line in TABLE]
)
def test_what_a_pod_means(what: str, seen: Pod, waited: float, fact: Fact | None, independent: bool) -> None:
    found = judge(seen, waited, LIMITS)
    assert (found.fact if found else None) is fact
    if found is not None:
        assert found.independent is independent
        assert found.evidence == evidence_of(seen)


@pytest.mark.parametrize(
    ("message", "agents"),
    [
        ("Pod ephemeral local storage usage exceeds the total limit of containers 10Gi. ", True),
        ('Container runner exceeded its local ephemeral storage limit "10Gi". ', True),
        ('Usage of EmptyDir volume "x" exceeds the limit "1Gi". ', True),
        (LOW + "Container runner was using 9Gi, which exceeds its request of 1Gi. ", True),
        (
            LOW + "Container runner was using 9Gi, request is 1Gi, has larger consumption of it. ",
            True,
        ),
        (LOW + "Container runner was using 9Ki, which exceeds its request of 0. ", False),
        (
            LOW + "Container runner was using 9Ki, request is 0, has larger consumption of it. ",
            False,
        ),
        ("The node was low on resource: memory. ", False),
    ],
)
def test_who_is_evicted_for_his_own_excess_is_no_victim(message: str, agents: bool) -> None:
    """I5: filling the disk is no way to have a bad attempt forgotten; being on a full node is no fault."""
    found = judge(pod("Failed", reason="Evicted", message=message), 0.0, LIMITS)
    assert found is not None and found.independent is not agents
    assert found.fact is (Fact.PROCESS_GONE if agents else Fact.EVICTED)


def test_a_silent_node_explains_a_silent_runner() -> None:
    untold = silent(
        pod("Pending", waiting("PodInitializing"), conditions=(STOPPED,))
    )  # though its runner has joined
    assert untold is not None and untold.fact is Fact.NODE_LOST and untold.independent
    found = silent(pod("Running", RUNNING, conditions=(NODE_SILENT,)))
    assert found is not None and found.fact is Fact.NODE_LOST and found.independent
    assert silent(pod("Running", RUNNING, conditions=(READY,))) is None
    assert silent(pod("Running", RUNNING, conditions=(STOPPED,))) is None
    assert silent(pod("Failed", ended(1, "Error"), conditions=(STOPPED,))) is None


def test_a_pod_that_vanished_is_remembered_as_it_was_last() -> None:
    assert vanished(None).fact is Fact.POD_LOST
    last = vanished(pod("Running", RUNNING, conditions=(READY,)))
    assert last.fact is Fact.POD_LOST and last.evidence["node"] == "node1"
    assert (
        vanished(pod("Running", RUNNING, conditions=disrupted("DeletionByTaintManager"))).fact
        is Fact.NODE_LOST
    )


def test_what_is_waited_for_is_told_apart() -> None:
    found = [
        waits_for(p)
        for p in (pod("Pending", conditions=(UNSCHEDULABLE,)), pod("Pending", waiting("ErrImagePull")))
    ]
    assert [w.what for w in found if w] == ["a node", "an image"]
    assert waits_for(pod("Running", RUNNING)) is None


def test_those_who_look_once_go_by_the_pods_own_age() -> None:
    stuck = pod("Pending", waiting("ErrImagePull"))
    made = 1795946400.0
    assert find(stuck, made + SHORT, LIMITS, ours=False) is None
    assert find(stuck, made + LONG, LIMITS, ours=False) is not None
    assert find(stuck, made + LONG, LIMITS, ours=True) is None


def test_evidence_is_small_and_tells_why() -> None:
    seen = pod(
        "Failed", ended(1, "Error", "x" * 5000), conditions=(STOPPED, UNSCHEDULABLE | {"message": "y" * 5000})
    )
    found = evidence_of(seen)
    assert found["containers"] == [{"name": "runner", "exit": 1, "reason": "Error", "message": "x" * 500}]
    assert len(msgspec.json.encode(found)) < 2000
    assert {"type": "Ready", "reason": "ContainersNotReady", "message": "unready: [runner]"} in found[
        "conditions"
    ]
