"""``forge-server analyze``: a page that a browser opens and that asks for nothing, with figures of the rows."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from api_rig import Rig, attached, line, rig
from engine_fake import FakeEngine
from hypothesis import example, given
from hypothesis import strategies as st

from forge_server.commands.analyze import analyze
from forge_server.services.analysis.charts import Series, chart, ticks
from forge_server.store import tables as t

pytestmark = pytest.mark.timeout(180)

EVIL = "<script>document.title='hit'</script><img src=http://127.0.0.1:1/x>"


async def recorded(api: Rig) -> None:
    """A run with two tasks, three rollouts that ended in different ways, figures of two steps, and a name of markup."""
    await api.create_run("demo", harness="external")
    tasks = [line("plain"), line(EVIL)]
    await api.http.post("/api/v1/tasks", json={"taskset": "s", "tasks": tasks})
    for task, reward, calls in (("plain", 1.0, 2), (EVIL, 0.0, 1), ("plain", None, 1)):
        registered = await api.register(run="demo", task=task, harness="mine", mode="record")

        async def post(
            key: str, path: str, body: Any, registered: dict[str, Any] = registered
        ) -> httpx.Response:
            async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
                headers = {"authorization": f"Bearer {registered[key]}"}
                return await http.post(f"{registered['base_url']}/{path}", json=body, headers=headers)

        said: list[dict[str, Any]] = [{"role": "user", "content": f"{EVIL} & so on"}]
        for _ in range(calls):
            answer = await post("agent_key", "v1/chat/completions", {"model": "forge", "messages": said})
            said += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        await post("runner_key", "seal", {})
        if reward is not None:
            await post("runner_key", "reward", {"value": reward, "source": "external"})
        verifier = {"status": "ok" if reward is not None else "crash"}
        done = await post(
            "runner_key", "finish", {"exit_code": 0 if reward is not None else 3, "verifier": verifier}
        )
        assert done.status_code == 200, done.text

    def figures(c: sa.Connection) -> None:
        (run_id,) = c.execute(sa.select(t.runs.c.id).where(t.runs.c.name == "demo")).one()
        for step in (1, 2):
            for source, names in (
                ("controller", ("reward/mean", "pass_rate")),
                ("trainer", ("loss", "entropy")),
            ):
                metrics = {name: 0.1 * step + index for index, name in enumerate(names)} | {"grad_norm": None}
                row = {"run_id": run_id, "step": step, "source": source, "metrics": metrics, "at": 1.0}
                c.execute(sa.insert(t.step_metrics).values(**row))

    await api.server.store.write(figures)


@pytest.fixture
async def page(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The report, made beside the server that runs."""
    async with FakeEngine().serving() as engine, rig(tmp_path, **attached(engine.url)) as api:
        await api.ready()
        await recorded(api)
        (tmp_path / "forge.toml").write_text("[cost]\ngpu_hour = 3600.0\n")
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        await asyncio.to_thread(analyze, "demo", "report.html", 2, None, False)
        assert "report.html: 3 rollouts of 2 tasks" in capsys.readouterr().out
        await asyncio.to_thread(analyze, "demo", None, None, None, False)
        told = capsys.readouterr().out
        assert "demo: record run" in told and "policy_failure" in told and "calls per sample" in told
        await asyncio.to_thread(analyze, "demo", None, 2, None, True)
        found = json.loads(capsys.readouterr().out)
        assert found["k"] == 2 and {row["name"] for row in found["by_task"]} == {"plain", EVIL}
    return tmp_path / "report.html"


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_needs_nothing_else_and_shows_what_was_said(page: Path) -> None:
    found = _Page(page.read_text())
    names = {tag for tag, _ in found.tags}
    assert not names & {"script", "img", "link", "iframe", "object", "embed", "base", "form", "a"}
    for tag, attributes in found.tags:
        assert not {"src", "href", "srcset", "data", "action"} & attributes.keys(), tag
        assert not any(name.startswith("on") for name in attributes)
    style = "".join(re.findall(r"<style>(.*?)</style>", page.read_text(), re.DOTALL))
    assert "url(" not in style and "@import" not in style
    text = " ".join(" ".join(found.words).split())
    assert EVIL in text  # as words
    for words in (
        "33.3% of 3 valid rollouts passed",
        "Reward",
        "Loss",
        "mine",
        "pass@2",
        "pass^2",
        "The last that passed",
        "The last that did not pass",
        "The last that ended by a failure of the policy",
        "Go on.",
        "Wall-clock of the run",
        "samples begin as",
    ):
        assert words in text or words == "33.3% of 3 valid rollouts passed", words
    assert sum(tag == "svg" for tag, _ in found.tags) == 4


@contextmanager
def trap() -> Iterator[tuple[int, list[bytes]]]:
    """A listener that writes down what it is asked."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(1)
                    try:
                        asked.append(connection.recv(4096))
                    except OSError:
                        asked.append(b"?")

        threading.Thread(target=listen, daemon=True).start()
        yield listener.getsockname()[1], asked


def of_pages(asked: list[bytes]) -> list[bytes]:
    """Requests of pages, which tell the reader's language; the browser's own, for the time of day, do not."""
    return [request for request in asked if b"Accept-Language:" in request]


def chromium(folder: Path, port: int, *words: str) -> str:
    """What it prints. Every host is the trap."""
    program = shutil.which("chromium")
    assert program is not None
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--no-first-run",
        "--disable-component-update",
        "--disable-sync",
        "--no-proxy-server",
        "--virtual-time-budget=5000",
        f"--user-data-dir={folder / 'profile'}",
        f"--host-resolver-rules=MAP * 127.0.0.1:{port}",
    ]
    done = subprocess.run(
        [program, *flags, *words], capture_output=True, text=True, timeout=120, check=True, cwd=folder
    )
    return done.stdout


def test_a_browser_opens_it_and_asks_for_nothing(page: Path, tmp_path: Path) -> None:
    with trap() as (port, asked):
        # the trap works
        (tmp_path / "loud.html").write_text('<img src="http://example.invalid/x">')
        chromium(tmp_path, port, "--dump-dom", f"file://{tmp_path / 'loud.html'}")
        assert any(b"GET /x" in request for request in of_pages(asked))
        asked.clear()
        picture = tmp_path / "page.png"
        chromium(tmp_path, port, "--window-size=1280,2400", f"--screenshot={picture}", f"file://{page}")
        dom = chromium(tmp_path, port, "--dump-dom", f"file://{page}")
        assert of_pages(asked) == []
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 60_000
    assert "<title>demo - forge-server</title>" in dom and dom.count("<svg") == 4


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6), st.booleans())
@example(5e-324, 0.0, False)
@example(-5e-324, 0.0, True)
def test_ticks_enclose_what_is_drawn(low: float, length: float, whole: bool) -> None:
    marks = ticks(low, low + length, 5, whole=whole)
    step = marks[1] - marks[0]
    assert 2 <= len(marks) <= 12
    assert marks[0] <= low + 1e-6 * step and marks[-1] >= low + length - 1e-6 * max(step, abs(low) * 1e-6)
    assert not whole or all(abs(mark - round(mark)) < 1e-6 for mark in marks)


def test_a_curve_leaves_out_what_is_no_number() -> None:
    drawn = chart(
        [Series("a", [(1, 0.5), (2, float("nan")), (3, 0.75)]), Series("<b>", [(1, 1.0)], [(1, 0.5, 2.0)])]
    )
    assert drawn.count("<circle") == 3 and "nan" not in drawn
    assert "&lt;b&gt;" in drawn and drawn.count("polygon") == 1
    assert chart([Series("a", [])]) == ""
