"""The runner's routes: whose key opens what, and that everything may be said twice (I10)."""

import contextlib
import io
import tarfile

import pytest
import sqlalchemy as sa
from litestar import Litestar
from litestar.testing import AsyncTestClient
from scheduler_rig import Receipts, Tasks, rig

from forge_server import assets
from forge_server.api.pod import pod_routes
from forge_server.api.problem import HANDLERS
from forge_server.domain import events as e
from forge_server.domain.errors import TaskError, TaskUnreadable
from forge_server.domain.outcome import Kind
from forge_server.harness.load import load_all
from forge_server.scheduler.plans import PlanOptions, Plans
from forge_server.store import keys
from forge_server.store import tables as t

NONCE = "0123456789abcdef"


@contextlib.asynccontextmanager
async def attempt(tmp_path, tasks=None):
    """A launched attempt and a client of its routes."""
    async with rig(tmp_path, start=False) as it:
        await it.group()
        query = sa.select(t.rollouts.c.id)
        it.rollout = await it.store.read(lambda c: c.execute(query).scalar_one())
        await it.lifecycle.apply(e.AttemptQueued(attempt_id="at-1", rollout_id=it.rollout, backend="local"))
        await it.lifecycle.apply(e.AttemptLaunching(attempt_id="at-1", startup_s=60))
        specs = load_all([assets.folder("harness_specs")])
        plans = Plans(it.store, specs, tasks or Tasks(), PlanOptions(model="forge", window=32768))
        it.receipts = Receipts()
        routes = pod_routes(it.lifecycle, it.receipts, plans, it.store, it.secret)
        app = Litestar(routes, exception_handlers=HANDLERS)
        async with AsyncTestClient(app) as client:
            it.client, it.plans = client, plans
            it.runner = keys.attempt_key(it.secret, "at-1", "runner")
            yield it


async def say(it, route, body=None, key=None, attempt_id="at-1"):
    headers = {"authorization": f"Bearer {it.runner if key is None else key}"}
    return await it.client.post(f"/a/{attempt_id}/{route}", json=body or {}, headers=headers)


async def start(it, nonce=NONCE, token=None):
    token = token or keys.attempt_key(it.secret, "at-1", "join")
    return await it.client.post("/a/at-1/start", json={"token": token, "nonce": nonce})


async def test_an_attempt_from_start_to_finish(tmp_path):
    async with attempt(tmp_path) as it:
        started = (await start(it)).json()
        assert started["runner_key"] == it.runner and started["agent_key"].startswith("fk-agent-at-1-")
        plan = started["plan"]
        assert plan["instruction"] == "Copy the word." and plan["agent_s"] == 1800.0
        assert (await say(it, "events", {"events": [{"kind": "harness_started"}]})).status_code == 200
        told = (await say(it, "heartbeat", {"phase": "running"})).json()
        assert told["action"] == "continue" and 1700 < told["left_s"] <= 1800
        await it.record("at-1")
        log = {"kind": "log", "stream": "harness", "tail": "x" * 100_000 + "end"}
        await say(it, "events", {"events": [log]})
        assert (await it.log("harness")).endswith("xend") and len(await it.log("harness")) == 65536
        assert (await say(it, "seal")).status_code == 200
        got = await it.client.get("/a/at-1/verifier", headers={"authorization": f"Bearer {it.runner}"})
        assert got.headers["content-type"] == "application/x-tar"
        with tarfile.open(fileobj=io.BytesIO(got.content)) as archive:
            assert "test.sh" in archive.getnames()
        assert (await say(it, "heartbeat", {"phase": "verifying"})).json()["action"] == "continue"
        assert (await say(it, "reward", {"value": 1.0, "source": "verifier"})).status_code == 200
        report = {"exit_code": 0, "verifier": {"status": "ok", "exit_code": 0}}
        assert (await say(it, "finish", report)).status_code == 200
        (ended,) = await it.ended()
        assert (ended.data["outcome"], ended.data["reward"]) == ("completed", 1.0)
        assert (await say(it, "finish", report)).status_code == 200  # again
        assert (await say(it, "heartbeat", {"phase": "verifying"})).status_code == 409


async def test_everything_may_be_said_twice(tmp_path):
    async with attempt(tmp_path) as it:
        first, second = await start(it), await start(it)
        assert first.json() == second.json()
        for route, body in (
            ("events", {"events": [{"kind": "harness_started"}, {"kind": "oom"}]}),
            ("seal", {"reason": "x"}),
            ("reward", {"value": 0.5, "source": "external"}),
        ):
            assert [(await say(it, route, body)).status_code for _ in range(2)] == [200, 200]


async def test_what_the_harness_read_is_handed_to_the_proxy(tmp_path):
    async with attempt(tmp_path) as it:
        await start(it)
        event = {"kind": "receipts", "read": [1, 2], "lost": [3]}
        assert (await say(it, "events", {"events": [event]})).status_code == 200
        assert it.receipts.heard == [("at-1", (1, 2), (3,))]


async def test_keys_open_only_what_is_theirs(tmp_path):
    async with attempt(tmp_path) as it:
        await start(it)
        wrong = {
            "none": "",
            "agent": keys.attempt_key(it.secret, "at-1", "agent"),
            "join": keys.attempt_key(it.secret, "at-1", "join"),
            "another's": keys.attempt_key(it.secret, "at-2", "runner"),
            "forged": it.runner[:-1] + ("0" if it.runner[-1] != "0" else "1"),
            "another server's": keys.attempt_key(b"x" * 32, "at-1", "runner"),
        }
        bodies = {
            "heartbeat": {"phase": "running"},
            "events": {"events": []},
            "seal": {},
            "reward": {"value": 1, "source": "external"},
            "finish": {},
        }
        for name, key in wrong.items():
            for route, body in bodies.items():
                assert (await say(it, route, body, key)).status_code == 401, (name, route)
            got = await it.client.get("/a/at-1/verifier", headers={"authorization": f"Bearer {key}"})
            assert got.status_code == 401
        assert not it.of("attempt_sealed") and not it.of("attempt_ended")


async def test_the_join_token_opens_once(tmp_path):
    async with attempt(tmp_path) as it:
        assert (await start(it, token=it.runner)).status_code == 401
        assert (await start(it)).status_code == 200
        assert (await start(it, nonce="f" * 32)).status_code == 409
        assert (await start(it, nonce="short")).status_code == 400
        await it.lifecycle.apply(e.RolloutCancelled(rollout_id=it.rollout))
        assert (await start(it)).status_code == 409


async def test_verifier_files_leave_only_after_the_seal(tmp_path):
    async with attempt(tmp_path) as it:
        await start(it)
        await say(it, "events", {"events": [{"kind": "harness_started"}]})
        headers = {"authorization": f"Bearer {it.runner}"}
        assert (await it.client.get("/a/at-1/verifier", headers=headers)).status_code == 409
        assert (await say(it, "reward", {"value": 1, "source": "verifier"})).status_code == 409
        await say(it, "seal")
        assert (await it.client.get("/a/at-1/verifier", headers=headers)).status_code == 200
        assert (await it.client.get("/a/at-1/verifier", headers=headers)).status_code == 200


async def test_the_stop_reaches_the_harness_but_not_the_verifier(tmp_path):
    async with attempt(tmp_path) as it:
        await start(it)
        await say(it, "events", {"events": [{"kind": "harness_started"}]})
        await it.lifecycle.apply(e.BudgetExceeded(attempt_id="at-1", kind=Kind.BUDGET_CALLS))
        told = (await say(it, "heartbeat", {"phase": "running"})).json()
        assert (told["action"], told["reason"]) == ("stop", "budget_calls")
        await say(it, "seal")
        assert (await say(it, "heartbeat", {"phase": "verifying"})).json()["action"] == "continue"


@pytest.mark.parametrize(
    "body", [{"value": "NaN", "source": "verifier"}, {"value": 1e9, "source": "verifier"}, {"value": 1}, {}]
)
async def test_a_senseless_reward_is_refused(tmp_path, body):
    async with attempt(tmp_path) as it:
        await start(it)
        await say(it, "seal")
        assert (await say(it, "reward", body)).status_code == 400
        count = sa.select(sa.func.count()).select_from(t.rewards)
        assert await it.store.read(lambda c: c.execute(count).scalar()) == 0


async def test_what_is_not_understood_is_refused(tmp_path):
    async with attempt(tmp_path) as it:
        await start(it)
        assert (await say(it, "heartbeat", {"phase": "resting"})).status_code == 400
        assert (await say(it, "finish", {"exit": 0})).status_code == 400
        assert (await say(it, "events", {"events": [{"kind": "party"}]})).status_code == 400


async def test_a_task_that_is_gone_for_now_is_no_fault_of_it(tmp_path):
    class NoTasks(Tasks):
        async def input(self, task_id):
            raise TaskUnreadable("its folder is gone", where=task_id)

    async with attempt(tmp_path, NoTasks()) as it:
        got = await start(it)
        assert got.status_code == 409 and "folder is gone" in got.json()["detail"]
        (ended,) = it.of("attempt_ended")
        assert (ended.data["outcome"], ended.data["kind"]) == ("infra_failure", "runner_lost")
        assert not it.of("rollout_ended") and not it.of("task_failed")


@pytest.mark.parametrize("late", ["harness_started", "verifier"])
async def test_a_task_that_went_while_the_attempt_ran_is_no_fault_of_it(tmp_path, late):
    """A server that was started anew reads it again."""
    tasks = Tasks()

    async def gone(task_id):
        raise TaskUnreadable("its folder is gone", where=task_id)

    async with attempt(tmp_path, tasks) as it:
        await start(it)
        if late == "verifier":
            await say(it, "events", {"events": [{"kind": "harness_started"}]})
            await say(it, "seal")
            tasks.verifier = gone
            headers = {"authorization": f"Bearer {it.runner}"}
            got = await it.client.get("/a/at-1/verifier", headers=headers)
        else:
            it.plans._kept.clear()
            tasks.input = gone
            got = await say(it, "events", {"events": [{"kind": "harness_started"}]})
        assert got.status_code == 409 and "folder is gone" in got.json()["detail"]
        (ended,) = it.of("attempt_ended")
        assert (ended.data["outcome"], ended.data["kind"]) == ("infra_failure", "runner_lost")


async def test_a_task_that_has_changed_fails(tmp_path):
    class NoTasks(Tasks):
        async def input(self, task_id):
            raise TaskError("it has changed", where=task_id)

    async with attempt(tmp_path, NoTasks()) as it:
        got = await start(it)
        assert got.status_code == 409 and "has changed" in got.json()["detail"]
        (ended,) = await it.ended()
        assert (ended.data["outcome"], ended.data["kind"]) == ("task_failure", "bad_spec")
