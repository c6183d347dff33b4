"""Runs a smolagents agent on one instruction: ``driver.py INSTRUCTION``.

FORGE_BASE_URL, FORGE_KEY and FORGE_MODEL say where the model is, SMOLAGENTS_AGENT is ``code`` or ``tools``. What the
agent gives as its final answer becomes ``answer.txt`` in the work folder, unless that exists.
"""

import os
import subprocess
import sys
from pathlib import Path

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

ANSWER = Path("answer.txt")
STEPS = 1000  # the run's budgets count
OUTPUT_CHARS = 20_000


@tool
def bash(command: str, timeout: int = 120) -> str:
    """Runs a shell command in the work folder and returns what it prints.

    Args:
        command: The command, for /bin/bash.
        timeout: Seconds after which it is stopped.
    """
    try:
        done = subprocess.run(
            ["/bin/bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )
        output, status = done.stdout, f"[status {done.returncode}]" if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        output, status = late.stdout or b"", f"[stopped after {timeout} s]"
    text = output.decode("utf-8", "replace")
    if len(text) > OUTPUT_CHARS:
        half = OUTPUT_CHARS // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters cut]\n{text[-half:]}"
    return f"{text}\n{status}".strip() if status else text


def main() -> None:
    env = os.environ
    model = OpenAIModel(
        model_id=env["FORGE_MODEL"], api_base=f"{env['FORGE_BASE_URL']}/v1", api_key=env.pop("FORGE_KEY")
    )
    kinds = {"code": CodeAgent, "tools": ToolCallingAgent}
    more = {"additional_authorized_imports": ["*"]} if env["SMOLAGENTS_AGENT"] == "code" else {}
    agent = kinds[env["SMOLAGENTS_AGENT"]](tools=[bash], model=model, max_steps=STEPS, **more)
    answer = agent.run(sys.argv[1])
    if answer is not None and not ANSWER.exists():
        ANSWER.write_text(str(answer))


main()
