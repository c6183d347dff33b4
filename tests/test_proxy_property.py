"""Random sessions over real sockets: whatever a harness does, the log is whole and nothing is trained that it
did not get (I1, I3, I4).

The harness is played by the test, which therefore knows what it got. Steps: ask and read the answer; ask and
hang up before it is there; ask and let the answer be lost; ask twice at once; repeat the last request; go on
with the conversation; kill the server's memory (a restart on the same database).
"""

import asyncio
import tempfile
from typing import Any

import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy_rig import PATIENCE, Rig, eventually, follow, hello, result
from test_proxy_delivery import Wire, content

from forge_server.domain.classify import CallFact, hole
from forge_server.domain.engine import ChatResult
from forge_server.domain.states import CallEnd
from forge_server.store import tables as t
from forge_server.store.database import Store
from forge_server.trajectory import codec
from forge_server.trajectory.samples import cover

STEPS = ("ask", "go_on", "again", "hang_up", "lose", "twice", "restart")


class Harness:
    """Plays the steps and remembers the answers that it read."""

    def __init__(self, proxy: Rig) -> None:
        self.proxy = proxy
        self.wire = Wire(proxy)
        self.asked = 0
        self.last = hello("start")
        self.answer: dict[str, Any] | None = None
        self.read: set[str] = set()
        self.hang = False
        proxy.engine.script = self.script

    async def script(self, body: dict[str, Any]) -> ChatResult:
        if self.hang:
            await asyncio.Event().wait()
        self.asked += 1
        return result(body, f"answer {self.asked}")

    async def ask(self) -> None:
        self.last = hello(f"question {self.asked}")
        await self.again()

    async def go_on(self) -> None:
        if self.answer is not None:
            self.last = follow(self.last, self.answer, f"turn {self.asked}")
        await self.again()

    async def again(self) -> None:
        await self.wire.send(self.last)
        self.answer = await self.wire.read()
        self.read.add(content(self.answer))

    async def hang_up(self) -> None:
        self.hang = True
        await self.wire.send(hello("never answered"))
        await eventually(lambda: self.proxy.gate.running == 1)
        self.wire.close()
        await eventually(lambda: self.proxy.gate.running == 0)
        self.hang = False
        self.wire = Wire(self.proxy)

    async def lose(self) -> None:
        count = len(await self.proxy.rows())
        self.last = hello(f"lost {self.asked}")
        await self.wire.send(self.last)
        await self.proxy.until(lambda rows: len(rows) > count and rows[-1].end is not None)
        self.wire.reset()
        self.answer = None
        self.wire = Wire(self.proxy)

    async def twice(self) -> None:
        other = Wire(self.proxy)
        self.last = hello(f"twice {self.asked}")
        await asyncio.gather(self.wire.send(self.last), other.send(self.last))
        for answer in await asyncio.gather(self.wire.read(), other.read()):
            self.read.add(content(answer))
            self.answer = answer
        other.close()


async def play(url: str, steps: list[str]) -> None:
    store = Store.open(url, create=True)
    try:
        proxy = Rig(store)
        proxy.attempt = await proxy.new_attempt()
        harness, left = Harness(proxy), list(steps)
        while True:
            async with proxy.serving():
                harness.wire = Wire(proxy)
                async with asyncio.timeout(PATIENCE):
                    while left and (step := left.pop(0)) != "restart":
                        await getattr(harness, step)()
                if not left:
                    await proxy.seal()
                    break
            harness.wire.close()
            await proxy.lifecycle.recover()
        await check(proxy, harness)
    finally:
        store.close()


async def check(proxy: Rig, harness: Harness) -> None:
    rows = await proxy.rows()
    log = tuple(CallFact(row.seq, CallEnd(row.end) if row.end else None) for row in rows)
    fault = hole(log)
    assert fault is None or (
        fault == "no_call" and not harness.read
    )  # I1, I4: whole and numbered without a gap
    query = (
        sa.select(t.calls, t.call_tokens)
        .outerjoin(t.call_tokens, t.call_tokens.c.call_id == t.calls.c.id)
        .where(t.calls.c.attempt_id == proxy.attempt)
    )
    names = codec.CallRow.__struct_fields__
    stored = await proxy.store.read(
        lambda c: codec.decode_attempt(
            codec.CallRow(**{n: getattr(r, n) for n in names}) for r in c.execute(query)
        )
    )
    text = {call.id: "".join(map(chr, call.completion[:-1].tolist())) for call in stored}
    found = cover(stored, 1 << 20)
    trained = [text[span.call_id] for sample in found.samples for span in sample.spans if span.owned]
    assert len(trained) == len(set(trained)), "an answer is trained twice"
    assert set(trained) == harness.read, "I3: what was read is trained, what was not is not"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=9))
def test_i3_only_what_the_harness_got_is_trained_and_all_of_it(steps: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(f"sqlite:///{folder}/forge.db", steps))
