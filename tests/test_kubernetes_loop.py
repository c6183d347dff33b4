"""The whole loop on a real cluster: attempts are pods, half of them with a harness from npm, the trainer is a Job, the
server is a process outside it, and the engine is on loopback, where no pod can reach it."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kube.cluster import Cluster
from kube_loop import NPM, ClusterLab, hostusr, npm_image
from kube_rig import namespace
from whole_loop import metrics, report, run_settings

from forge_server.client.schemas import TaskCreate

pytestmark = [pytest.mark.kubernetes, pytest.mark.vllm, pytest.mark.verl, pytest.mark.timeout(1500)]

FLOAT32_LIMIT = 1e-3
VERIFIER = """n=$(od -An -N4 -tu4 /dev/urandom)  # never the same twice: no group is without a signal
echo "0.$(printf %010d $((n)))" > /logs/verifier/reward.txt
"""

ENDS = """SELECT harness, backend, a.outcome, a.kind, exit_code, COUNT(*) AS n
    FROM attempts a JOIN rollouts r ON r.id = rollout_id GROUP BY 1, 2, 3, 4, 5"""
PROMPTS = """SELECT harness, MIN(prompt_len) AS shortest
    FROM calls JOIN rollouts ON final_attempt_id = attempt_id GROUP BY 1"""
TRAINED = """SELECT harness, SUM(trained) AS tokens
    FROM batches b, json_each(rollout_ids) JOIN rollouts r ON r.id = value JOIN samples s ON s.rollout_id = r.id
    GROUP BY 1"""


@pytest.fixture
def lab(cluster: Cluster, tiny_model, trainer_env: Path, tmp_path: Path) -> Iterator[ClusterLab]:
    base = Path(tempfile.mkdtemp(prefix="forge-kube-loop-"))  # seen by pods under the same path
    for make in (hostusr, npm_image):
        archive = make(tmp_path)
        cluster.load(archive)
        archive.unlink()
    folder = base / "lab"
    folder.mkdir()
    model = base / "model"
    shutil.copytree(tiny_model.initial, model)
    try:
        with namespace(cluster, jobs=True) as name:
            made = ClusterLab(folder, model, cluster, name, trainer_env)
            try:
                yield made
            finally:
                made.down()
    finally:
        shutil.rmtree(base, ignore_errors=True)


def test_pods_are_trained_on_by_a_job_and_a_killed_server_finds_both_again(lab: ClusterLab) -> None:
    lab.up()
    lines = [
        {"name": f"task-{i}", "instruction": f"Write {i} to answer.txt", "verify": {"script": VERIFIER}}
        for i in range(4)
    ]
    with lab.client() as client:
        client.create_tasks(TaskCreate(taskset="loop", tasks=lines))
        client.create_run(run_settings("cluster", harness="", harnesses={"react": 1, NPM: 1}))

    def under_way() -> bool:
        view = lab.run("cluster")
        assert view.state == "active", f"{view.reason}\n{lab.log()}"
        return view.step >= 1 and view.rollouts.get("active", 0) >= 1

    lab.wait("step 2 is under way", under_way, 600.0)
    (job,) = lab.objects("jobs")
    key = next(e for e in job["spec"]["template"]["spec"]["containers"][0]["env"] if "valueFrom" in e)
    assert key["valueFrom"]["secretKeyRef"]["name"] == job["metadata"]["name"]
    lab.kill()
    lab.up()
    lab.finish("cluster", 600.0)

    assert "taking it over" in (lab.folder / "server.log").read_text()
    assert report(lab, "cluster")["samples"] > 0
    found = metrics(lab, "cluster")
    for step in (1, 2):
        assert found[step, "trainer"]["logprob_gap_max"] <= FLOAT32_LIMIT
        assert found[step, "trainer"]["tokens_trained"] > 0
    ends = lab.query(ENDS)
    print([tuple(row) for row in ends])
    assert {row.backend for row in ends} == {"kubernetes"}
    assert {row.outcome for row in ends} <= {"completed", "policy_failure"}  # the restart cost no attempt
    assert {row.exit_code for row in ends if row.outcome == "completed"} == {0}
    of = {name: [row for row in ends if row.harness == name] for name in ("react", NPM)}
    assert all(sum(row.n for row in rows) >= 6 for rows in of.values()), (
        "each harness has a group in each step"
    )
    assert any(row.outcome == "completed" for row in of[NPM])
    prompts = {row.harness: row.shortest for row in lab.query(PROMPTS)}
    assert prompts[NPM] > 1000 > prompts["react"], "the one from npm has brought its own"
    trained = {row.harness: row.tokens for row in lab.query(TRAINED)}
    assert set(trained) == {"react", NPM} and all(tokens > 0 for tokens in trained.values()), trained

    def left() -> list[str]:
        found = [each for kind in ("pods", "jobs", "secrets") for each in lab.objects(kind)]
        names = [each["metadata"]["name"] for each in found]
        return [name for name in names if name.startswith(("at-", "trainer-"))]

    lab.wait("nothing is left", lambda: not left(), 60.0)
