"""Codex and Claude Code on a machine of their own, as the documentation shows it: nothing of them is launched by us."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from api_rig import client, rig
from node_harness import spec_of
from scripted_engine import Asked, Say, ScriptedEngine
from test_external import environment, examples

from forge_server import environments
from forge_server.settings import EngineSettings

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("harness", "which", "dialect"), [("codex", 1, "responses"), ("claude-code", 2, "messages")]
)
async def test_the_documented_command(harness: str, which: int, dialect: str, tmp_path: Path) -> None:
    script = examples("sh")[which]
    spec = spec_of(harness)
    assert spec.install is not None and spec.argv[0] in script
    folder = await asyncio.to_thread(environments.ensure_harness, harness, spec.install)

    def answer(asked: Asked) -> Say:
        return Say("It is a plum." if "Which fruit" in asked.last_user else "ok")

    with ScriptedEngine(answer).serving() as engine:
        attached = EngineSettings(kind="attach", url=engine.url, max_model_len=engine.window)
        async with rig(tmp_path / "server", engine=attached) as api, client(api.server) as http:
            await api.ready()
            registered = await api.register(harness=harness)
            work = tmp_path / "work"
            work.mkdir()
            env = {
                **environment(api),
                "HOME": str(tmp_path),
                "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
                "BASE": registered["base_url"],
                "AGENT": registered["agent_key"],
                "INSTRUCTION": "Which fruit is in word.txt?",
            }
            assert shutil.which(spec.argv[0], path=env["PATH"])
            done = await asyncio.to_thread(
                lambda: subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", script],
                    cwd=work,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=120,
                    check=False,
                )
            )
            assert done.returncode == 0 and "It is a plum." in done.stdout, done.stdout + done.stderr
            path = f"/api/v1/rollouts/{registered['rollout_id']}"
            calls = (await http.get(f"{path}/calls")).json()
            assert calls and {(call["dialect"], call["end"]) for call in calls} == {(dialect, "ok")}
