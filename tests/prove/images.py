"""Images through a whole server and a real vLLM with a tiny Qwen2-VL: recorded by hash, told apart, exported, and not
trained.

    python -m tests.prove.images

It is no part of the tests since the engine's environment has no torchvision, which Qwen2-VL wants: the one that fits
lacks the operators that go with the processor's build of torch. Here it is put beside the environment, with those
operators declared.
"""

import asyncio
import base64
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import httpx

from forge_server import environments
from forge_server.app import Server, running
from forge_server.client.http import ApiError, ForgeClient
from forge_server.client.rollout import rollout
from forge_server.domain.call import Call
from forge_server.domain.run import EXTERNAL
from forge_server.export import reports
from forge_server.export.records import find_run
from forge_server.export.write import export_run
from forge_server.settings import EngineSettings, ServerSettings, Settings
from forge_server.store.recordings import call_rows
from forge_server.trajectory.codec import decode_attempt

START_S = 400.0
WINDOW = 4096
TORCHVISION = "torchvision==0.28.0"
DECLARE = """\
import importlib.abc, sys

class _Before(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch
            self.library = torch.library.Library("torchvision", "DEF")
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys._torchvision_operators = self.library
        return None

sys.meta_path.insert(0, _Before())
"""


def png(width: int, height: int, colour: tuple[int, int, int]) -> str:
    """A plain picture as a data URL."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = b"".join(b"\0" + bytes(colour) * width for _ in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    file = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(file).decode()


RED, BLUE, WIDE = png(112, 84, (200, 30, 30)), png(112, 84, (30, 30, 200)), png(224, 84, (30, 200, 30))


def prepare(folder: Path) -> tuple[Path, Path]:
    """The model's folder, and one for PYTHONPATH that makes torchvision importable."""
    python = environments.ensure("engine") / "bin" / "python"
    beside = folder / "beside"
    beside.mkdir()
    (beside / "sitecustomize.py").write_text(DECLARE)
    wanted = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--target", str(beside), TORCHVISION]
    subprocess.run(wanted, check=True)
    script = Path(__file__).resolve().parents[1] / "tiny_vision.py"
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(beside), "OMP_NUM_THREADS": "1"}
    subprocess.run([str(python), str(script), str(folder / "model")], check=True, env=environ)
    return folder / "model", beside


def say(*parts: str) -> dict[str, Any]:
    """A message of the user; data URLs are images."""
    content = [
        {"type": "image_url", "image_url": {"url": part}}
        if part.startswith("data:")
        else {"type": "text", "text": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


def talk(client: ForgeClient) -> str:
    """Two conversations that differ in an image alone; the first goes on with others. The attempt's id."""
    with rollout(client) as made:
        base, key = made.registration.base_url, made.registration.agent_key
        with httpx.Client(base_url=base, headers={"authorization": f"Bearer {key}"}, timeout=120) as http:

            def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
                body = {"model": "m", "messages": messages, "max_tokens": 8}
                answer = http.post(f"{base}/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                message: dict[str, Any] = answer.json()["choices"][0]["message"]
                return message

            first = [say(RED, "what is this?")]
            said = ask(first)
            ask([*first, said, say("and this?", WIDE, RED)])
            ask([say(BLUE, "what is this?")])
            ask([say("nothing to see")])
            elsewhere = http.post(
                f"{base}/v1/chat/completions",
                json={"model": "m", "messages": [say(RED), say("data:image/png;base64,AAAA", "hm")]},
            )
            assert elsewhere.status_code == 400, elsewhere.text  # the engine cannot read it
        made.reward(1.0)
        made.finish()
        return made.registration.attempt_id


def judge(server: Server, client: ForgeClient, attempt: str, folder: Path) -> list[str]:
    """What is not as it should be."""
    calls: list[Call] = server.store.read_now(lambda c: decode_attempt(call_rows(c, attempt)))
    wrong = []

    def check(name: str, holds: object) -> None:
        print(f"{'ok   ' if holds else 'WRONG'} {name}", flush=True)
        if not holds:
            wrong.append(name)

    for call in calls:
        print(
            f"call {call.seq}: {call.prompt.size} + {call.completion.size} tokens, {call.untrainable}, {call.media}"
        )
    check("four calls have tokens", len(calls) == 4)
    red, more, blue, _ = calls
    check("images are where they were counted", [len(c.media) for c in calls] == [1, 3, 1, 0])
    check("a wider picture has more placeholders", more.media[1].length > more.media[0].length)
    check("another picture of the same size gives the same ids", red.prompt.tolist() == blue.prompt.tolist())
    check("and is another one", red.media != blue.media)
    check("equal pictures have equal names", more.media[0].sha256 == more.media[2].sha256)
    check("every call may be trained where pixels are", {c.untrainable for c in calls} == {None})
    found = find_run(server.store, EXTERNAL, WINDOW)
    check("nothing violates I1 to I4", reports.check(server.store, found).violations == [])
    report = export_run(server.store, found, "parquet", folder / "rows.parquet")
    print(f"exported: {report.rows} rows, {report.images} images")
    # what a random model says may be tokenised otherwise when it comes back: then the second call is a row of its own
    check("rows are exported with their images", report.rows in (3, 4) and report.images == 3)
    try:
        client.create_run({"name": "blind", "kind": "train", "taskset": "x", "harness": "react", "n": 2})
        check("training is refused", False)
    except ApiError as error:
        check(f"training is refused: {error}", "multimodal" in str(error))
    return wrong


async def prove(folder: Path) -> list[str]:
    model, beside = prepare(folder)
    staged = folder / "data" / "staged" / "engine"
    settings = Settings(
        server=ServerSettings(port=0, control_port=0, data_dir="data"),
        engine=EngineSettings(
            kind="managed",
            model=str(model),
            dtype="float32",
            max_model_len=WINDOW,
            max_num_seqs=4,
            tool_call_parser="",
            env={"PYTHONPATH": f"{staged}:{beside}", "OMP_NUM_THREADS": "1"},
            start_timeout_s=START_S,
        ),
        folder=str(folder),
    )
    began = time.monotonic()
    async with running(settings) as server:
        while not server.engine.ready:
            if time.monotonic() - began > START_S:
                return [f"the engine does not start: {server.engine.reason}"]
            await asyncio.sleep(0.5)
        print(f"engine ready after {time.monotonic() - began:.0f} s", flush=True)
        client = ForgeClient(server.listening.control_url, server.admin_key)
        attempt = await asyncio.to_thread(talk, client)
        return await asyncio.to_thread(judge, server, client, attempt, folder)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="forge-images-") as folder:
        wrong = asyncio.run(prove(Path(folder)))
    print("all as it should be" if not wrong else f"wrong: {'; '.join(wrong)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
