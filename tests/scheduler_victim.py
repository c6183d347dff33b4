"""A server to be killed: runs two endless attempts over the database in argv[1] and says when they are up."""

import asyncio
import sys
from pathlib import Path

from scheduler_rig import rig, script_spec


async def main() -> None:
    harness = script_spec("touch up; (setsid sleep 1000 &); sleep 1000", name="endless")
    async with rig(Path(sys.argv[1]), specs={"endless": harness}) as it:
        await it.group(n=2, harness="endless")
        await it.until(lambda: len(it.of("attempt_running")) == 2)
        print("up", flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
