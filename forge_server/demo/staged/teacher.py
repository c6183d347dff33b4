"""The scripted teacher: what to answer, decided from the messages and the call's seed. Standard library
only.

It knows how to look a number up, but in a share of all conversations it is hasty and hands in a guess
without looking. That share is the demo's difficulty: a policy that imitates the teacher is hasty too, and
reinforcement learning has to teach it to look before it answers.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

_PATH = re.compile(r"in (\S+)\?")


def reply(messages: Sequence[Mapping[str, Any]], seed: int, hasty_share: float) -> dict[str, Any]:
    """The assistant's next message: one tool call, ``shell`` or ``finish``. Raises ValueError for a
    conversation that is not about a number in a file.
    """
    last = messages[-1]
    if last["role"] == "tool":
        return _call("finish", "answer", str(last["content"]).strip())
    rng = random.Random(seed)
    if rng.random() < hasty_share:
        return _call("finish", "answer", f"{rng.randrange(1000):03d}")
    path = _PATH.search(str(last["content"]))
    if path is None:
        raise ValueError(f"the teacher does not know what to do about {last['content']!r}")
    return _call("shell", "command", f"cat {path[1]}")


def _call(tool: str, argument: str, value: str) -> dict[str, Any]:
    function = {"name": tool, "arguments": json.dumps({argument: value}, ensure_ascii=False)}
    call = {"id": f"call-{tool}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}
