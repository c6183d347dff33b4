"""Runs the default agent of the OpenHands SDK on one instruction: ``driver.py INSTRUCTION``.

FORGE_BASE_URL, FORGE_KEY and FORGE_MODEL say where the model is, FORGE_WINDOW and FORGE_OUTPUT how many tokens it
takes and gives. Exit status 0: the agent has finished; 1: it could not go on.
"""

import os
import sys

from openhands.sdk import LLM, Conversation
from openhands.sdk.conversation.state import ConversationExecutionStatus
from openhands.tools.preset.default import get_default_agent
from pydantic import SecretStr

ITERATIONS = 1000  # the run's budgets count


def main() -> int:
    env = os.environ
    window, output = int(env["FORGE_WINDOW"]), int(env["FORGE_OUTPUT"])
    llm = LLM(
        usage_id="agent",
        model=f"openai/{env['FORGE_MODEL']}",
        # the name of a model whose reasoning is sent back with the history
        model_canonical_name="moonshot/kimi-k2-thinking",
        base_url=f"{env['FORGE_BASE_URL']}/v1",
        api_key=SecretStr(env.pop("FORGE_KEY")),
        max_input_tokens=max(window - output, window // 2),
        max_output_tokens=output,
        timeout=3600,
    )
    conversation = Conversation(
        agent=get_default_agent(llm=llm, cli_mode=True),
        workspace=os.getcwd(),
        max_iteration_per_run=ITERATIONS,
    )
    conversation.send_message(sys.argv[1])
    conversation.run()
    status = conversation.state.execution_status
    conversation.close()
    return int(status == ConversationExecutionStatus.ERROR)


sys.exit(main())
