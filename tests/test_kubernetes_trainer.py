"""Trainers as Jobs of a real cluster: started, found again, ended with everything of theirs, and why they died.

The program in them is a shell script; what a real trainer does there is told by the whole loop.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kube.cluster import Cluster
from kube_rig import BUSYBOX, namespace

from forge_server.controller.kubernetes_trainer import REFUSED_S, URL, KubernetesLauncher
from forge_server.controller.launcher import TrainerJob
from forge_server.domain.errors import ConfigError
from forge_server.scheduler.kubernetes.client import Pods
from forge_server.scheduler.kubernetes.jobs import Jobs
from forge_server.scheduler.kubernetes.pod import Limits

pytestmark = pytest.mark.kubernetes

RUN = "ru-1"
NAME = f"trainer-{RUN}"


def job(folder: Path, url: str = "http://server/1") -> TrainerJob:
    return TrainerJob(run_id=RUN, url=url, key="fk-secret", folder=folder / "run")


def manifests(job: TrainerJob, name: str, script: str, image: str = BUSYBOX) -> list[dict[str, Any]]:
    key = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": name, "key": "key"}}}
    container = {
        "name": "trainer",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", script],
        "env": [key],
    }
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
    return [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {"key": job.key}},
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "annotations": {URL: job.url}},
            "spec": {"backoffLimit": 0, "template": {"spec": pod}},
        },
    ]


class World:
    def __init__(self, cluster: Cluster, namespace: str, pods: Pods, folder: Path) -> None:
        self.cluster, self.namespace, self.pods, self.folder = cluster, namespace, pods, folder

    def launcher(self, script: str, image: str = BUSYBOX, refused_s: float = REFUSED_S) -> KubernetesLauncher:
        return KubernetesLauncher(
            Jobs(self.pods, Limits(image_s=0.5)),
            lambda job, name: manifests(job, name, script, image),
            self.folder / "staged",
            refused_s=refused_s,
        )

    def uids(self, kind: str) -> set[str]:
        root = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
        items = self.cluster.get(f"{root}/namespaces/{self.namespace}/{kind}")["items"]
        return {
            item["metadata"]["uid"]
            for item in items
            if item.get("type") != "kubernetes.io/service-account-token"
        }


@contextlib.asynccontextmanager
async def world(cluster: Cluster, folder: Path, *, jobs: bool = True) -> AsyncIterator[World]:
    with namespace(cluster, jobs=jobs) as name:
        pods = await Pods.connect(str(cluster.user), "", name)
        try:
            yield World(cluster, name, pods, folder)
        finally:
            await pods.close()


async def test_a_trainer_is_found_again_by_its_run_and_url(cluster: Cluster, tmp_path: Path) -> None:
    async with world(cluster, tmp_path) as it:
        await it.launcher("sleep 600").launch(job(tmp_path))
        first = it.uids("jobs")
        assert len(first) == 1 and len(it.uids("secrets")) == 1
        again = it.launcher("sleep 600")  # of a server that was started anew
        await again.launch(job(tmp_path))
        assert it.uids("jobs") == first
        await again.launch(
            job(tmp_path, "http://server/2")
        )  # what serves at the old URL is not ours any more
        second = it.uids("jobs")
        assert len(second) == 1 and second != first
        await again.sweep(RUN)
        assert (it.uids("jobs"), it.uids("pods"), it.uids("secrets")) == (set(), set(), set())
        await again.sweep(RUN)  # nothing left is no error
        assert (tmp_path / "staged" / "forge_server" / "trainer" / "worker.py").exists()


async def test_why_a_trainer_died_is_told_and_its_log_is_kept(cluster: Cluster, tmp_path: Path) -> None:
    async with world(cluster, tmp_path) as it:
        script = 'test "$KEY" = fk-secret && echo "Error: the GPU fell off" >&2; exit 3'
        trainer = await it.launcher(script).launch(job(tmp_path))
        reason = await asyncio.wait_for(trainer.wait(), 150)
        assert "BackoffLimitExceeded" in reason and '"exit":3' in reason
        assert reason.endswith("its last words: Error: the GPU fell off")
        assert "fell off" in (tmp_path / "run" / "trainer.log").read_text()
        await trainer.stop()
        assert it.uids("pods") == set()


async def test_a_job_that_cannot_begin_or_is_taken_away_ends_the_wait(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with world(cluster, tmp_path) as it:
        trainer = await it.launcher("true", "localhost/nowhere:1").launch(job(tmp_path))
        assert "image_pull" in await asyncio.wait_for(trainer.wait(), 150)
        trainer = await it.launcher("sleep 600").launch(job(tmp_path))
        path = f"/apis/batch/v1/namespaces/{it.namespace}/jobs/{NAME}"
        await asyncio.to_thread(cluster.call, "DELETE", path, {"propagationPolicy": "Background"})
        assert await asyncio.wait_for(trainer.wait(), 150) == "its Job was deleted"


async def test_an_api_server_that_is_away_delays_a_trainer_and_ends_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with world(cluster, tmp_path) as it:
        running = await it.launcher("sleep 600").launch(job(tmp_path))
        waiting = asyncio.create_task(running.wait())
        cluster.kill("apiserver", hold=True)
        try:
            launching = asyncio.create_task(it.launcher("sleep 600").launch(job(tmp_path, "http://server/2")))
            done, _ = await asyncio.wait({launching, waiting}, timeout=5)
            assert done == set()
        finally:
            cluster.release("apiserver")
        await asyncio.wait_for(launching, 200)
        assert len(it.uids("jobs")) == 1
        await it.launcher("true").sweep(RUN)
        assert await asyncio.wait_for(waiting, 150) == "its Job was deleted"


async def test_a_missing_right_is_told(cluster: Cluster, tmp_path: Path) -> None:
    async with world(cluster, tmp_path, jobs=False) as it:
        with pytest.raises(ConfigError, match="forbidden") as caught:
            await it.launcher("true", refused_s=0.0).launch(job(tmp_path))
        assert "forge-server check" in caught.value.mend
