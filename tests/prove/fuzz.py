"""Thousands of requests that nobody should send, over sockets, to the whole proxy: each is answered or refused in its
dialect, none takes long, and every call that was made has its end.

    python -m tests.prove.fuzz [--examples 20000] [--seed 0]

Prints how many of each dialect were answered, streamed and refused. The first that breaks the rule is made as small as
it goes and shown; exit status 1.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzzing import Case, cases, judge
from proxy_rig import Rig, rig

LIMIT_S = 30.0
"""No request may take longer."""


class Proxy:
    """A proxy on a loop and in a thread of its own; ``ask`` is called from any other."""

    def __init__(self, folder: Path, engine: "EngineOf", policy: dict[str, Any]) -> None:
        self._folder, self._engine = folder, engine
        self._policy = {"max_calls": 1 << 40, "max_tokens": 1 << 40, **policy}
        self._loop = asyncio.new_event_loop()
        self._up, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self.rig: Rig

    async def _serve(self) -> None:
        url = f"sqlite:///{self._folder / 'forge.db'}"
        try:
            async with self._engine() as engine, rig(url, engine=engine, **self._policy) as self.rig:
                self._up.set()
                await self._stop.wait()
        finally:
            self._up.set()

    def __enter__(self) -> "Proxy":
        self._thread.start()
        self._up.wait(LIMIT_S)
        headers = {"Authorization": f"Bearer {self.rig.key}", "Content-Type": "application/json"}
        base = f"{self.rig.url}/a/{self.rig.attempt}/"
        self._client = httpx.Client(base_url=base, headers=headers, timeout=LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LIMIT_S)

    def ask(self, case: Case) -> str:
        """Send a request and judge what comes back."""
        dialect, path, body = case
        answer = self._client.post(path, content=body)
        return judge(dialect, path, answer.status_code, answer.headers["content-type"], answer.content)

    def rows(self) -> list[Any]:
        """The calls that were made."""
        return asyncio.run_coroutine_threadsafe(self.rig.rows(), self._loop).result(LIMIT_S)


EngineOf = Callable[[], contextlib.AbstractAsyncContextManager[Any]]
"""Opens an engine on the proxy's own loop; None stands for a scripted one."""


@contextlib.contextmanager
def proxy(engine: EngineOf = contextlib.nullcontext, **policy: Any) -> Iterator[Proxy]:
    with tempfile.TemporaryDirectory() as folder, Proxy(Path(folder), engine, policy) as made:
        yield made


def fuzz(under_test: Proxy, examples: int, number: int) -> Counter[tuple[str, str]]:
    """Send ``examples`` requests; (dialect, what came of it) counted. Raises what the judge found, made small."""
    seen: Counter[tuple[str, str]] = Counter()

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(cases())
    def one(case: Case) -> None:
        seen[case[0], under_test.ask(case)] += 1

    one()
    rows = under_test.rows()
    assert rows and all(row.end in ("ok", "rejected") for row in rows)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()
    with proxy() as under_test:
        seen = fuzz(under_test, given.examples, given.seed)
    for (dialect, what), count in sorted(seen.items()):
        print(f"{dialect:12} {what:9} {count:7}")
    print(f"{seen.total()} requests in {time.monotonic() - began:.0f} s, seed {given.seed}: no fault")


if __name__ == "__main__":
    main()
