"""A proxy in a process of its own, to be killed: ``proxy_child.py DATABASE``. Prints ``URL ATTEMPT`` and serves.

The engine answers at once, except that a prompt which says "forever" is never answered.
"""

import asyncio
import sys
from typing import Any

from proxy_rig import prompt_of, rig, words

from forge_server.domain.engine import ChatResult


async def main() -> None:
    async with rig(sys.argv[1]) as proxy:
        answer = proxy.engine.answer
        forever = words("forever")

        async def script(body: dict[str, Any]) -> ChatResult:
            if any(prompt_of(body)[i : i + len(forever)] == forever for i in range(len(prompt_of(body)))):
                await asyncio.Event().wait()
            return await answer(body)

        proxy.engine.script = script
        print(proxy.url, proxy.attempt, flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
