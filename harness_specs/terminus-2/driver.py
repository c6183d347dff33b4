"""Runs Harbor's Terminus 2 here instead of in a container of Harbor's: ``driver.py INSTRUCTION``.

FORGE_BASE_URL, FORGE_KEY and FORGE_MODEL say where the model is, FORGE_WINDOW and FORGE_OUTPUT how many tokens it
takes and gives.
"""

import asyncio
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext

LOGS = Path.home() / "logs"


class Here:
    """As much of a Harbor environment as Terminus 2 uses: the machine that it runs on."""

    default_user = None
    session_id = "forge"
    os = None
    trial_paths = SimpleNamespace(agent_dir=LOGS)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: float | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        process = await asyncio.create_subprocess_exec(
            "/bin/bash",
            "-c",
            command,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        except TimeoutError:
            process.kill()
            out, err = await process.communicate()
        assert process.returncode is not None
        return ExecResult(
            stdout=out.decode("utf-8", "replace"),
            stderr=err.decode("utf-8", "replace"),
            return_code=process.returncode,
        )

    async def is_dir(self, path: str, user: str | int | None = None) -> bool:
        return Path(path).is_dir()  # noqa: ASYNC240 - as the rest of this environment: one agent, nobody else waits

    async def upload_file(self, source_path: str | Path, target_path: str) -> None:
        shutil.copy(source_path, target_path)

    async def download_file(self, source_path: str, target_path: str | Path) -> None:
        shutil.copy(source_path, target_path)


async def main() -> None:
    if shutil.which("tmux") is None:
        sys.exit("terminus-2 needs tmux in the sandbox: install it on the machine, or into the task's image")
    window, output = int(os.environ["FORGE_WINDOW"]), int(os.environ["FORGE_OUTPUT"])
    LOGS.mkdir()
    room = max(window - output, window // 2)
    agent = Terminus2(
        logs_dir=LOGS,
        model_name=f"openai/{os.environ['FORGE_MODEL']}",
        api_base=f"{os.environ['FORGE_BASE_URL']}/v1",
        llm_kwargs={"api_key": os.environ.pop("FORGE_KEY")},
        model_info={
            "max_input_tokens": room,
            "max_output_tokens": output,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
        },
        proactive_summarization_threshold=min(8000, room // 4),
        interleaved_thinking=True,
        record_terminal_session=False,
    )
    here = Here()
    await agent.setup(here)
    context = AgentContext()
    await agent.run(sys.argv[1], here, context)
    print(context.metadata)


asyncio.run(main())
