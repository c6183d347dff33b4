"""Images through the whole proxy: carried to the engine, recorded by hash, told apart, exported; or refused."""

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from proxy_rig import PLACEHOLDER, Rig, follow, rig
from pyarrow import ipc

from forge_server.domain.media import MediaSpan
from forge_server.domain.states import Untrainable
from forge_server.export import reports
from forge_server.export.records import Run
from forge_server.export.whole import ExportError
from forge_server.export.write import Format, export_run
from forge_server.proxy.dialects import images
from forge_server.proxy.dialects.base import Refusal
from forge_server.store import media, messages
from forge_server.store import tables as t
from forge_server.store.recordings import call_rows
from forge_server.trajectory.attempt import Cut, cut

WINDOW = 4096
RED, BLUE = b"\x89PNG red", b"\x89PNG blue"


def sha(file: bytes) -> str:
    return hashlib.sha256(file).hexdigest()


def b64(file: bytes) -> str:
    return base64.b64encode(file).decode()


def url(file: bytes) -> str:
    return f"data:image/png;base64,{b64(file)}"


def shown(file: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(file), **more}}


def look(*files: bytes, text: str = "see") -> dict[str, Any]:
    """A chat request that shows these."""
    content = [{"type": "text", "text": text}, *map(shown, files)]
    return {"model": "m", "messages": [{"role": "user", "content": content}]}


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[Rig]:
    async with rig(database_url, mode="record") as made:
        yield made


async def stored(proxy: Rig) -> dict[str, bytes]:
    rows = await proxy.store.read(lambda c: c.execute(sa.select(t.media)).all())
    assert all(row.media_type == "image/png" and row.size == len(row.data) for row in rows)
    return {bytes(row.sha256).hex(): bytes(row.data) for row in rows}


async def cut_now(proxy: Rig) -> Cut:
    await proxy.seal()
    return cut(await proxy.store.read(lambda c: call_rows(c, proxy.attempt)), WINDOW)


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("v1/chat/completions", look(RED)),
    "responses": (
        "v1/responses",
        {
            "model": "m",
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "see"},
                        {"type": "input_image", "image_url": url(RED), "detail": "auto"},
                    ],
                }
            ],
        },
    ),
    "messages": (
        "v1/messages",
        {
            "model": "m",
            "max_tokens": 9,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "see"},
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": b64(RED)},
                        },
                    ],
                }
            ],
        },
    ),
    "gemini": (
        "v1beta/models/m:generateContent",
        {
            "contents": [
                {"parts": [{"text": "see"}, {"inlineData": {"mimeType": "image/png", "data": b64(RED)}}]}
            ]
        },
    ),
}


@pytest.mark.parametrize("dialect", REQUESTS)
async def test_images_reach_the_engine_and_are_recorded_by_hash(proxy: Rig, dialect: str) -> None:
    route, body = REQUESTS[dialect]
    async with proxy.client() as client:
        assert (await client.post(f"/a/{proxy.attempt}/{route}", json=body)).status_code == 200
    (asked,) = proxy.engine.asked
    (message,) = [msgspec.json.decode(m) for m in asked["messages"]]
    assert message["content"] == [{"type": "text", "text": "see"}, shown(RED)]
    (row,) = await proxy.rows()
    assert row.dialect == dialect and row.flags["images"] == 1 and row.untrainable is None
    assert await stored(proxy) == {sha(RED): RED}
    request = await proxy.store.read(lambda c: messages.request_of(c, row.id))
    message["content"][1]["image_url"]["url"] = f"sha256:{sha(RED)}"
    assert request == ([], [message])
    found = await cut_now(proxy)
    assert [c.media for c in found.calls] == [(MediaSpan(sha(RED), 5, 3),)]
    assert found.calls[0].prompt[5:8].tolist() == [PLACEHOLDER] * 3


async def test_a_growing_conversation_with_images_is_one_sample_and_stores_each_once(proxy: Rig) -> None:
    first = look(RED)
    async with proxy.client() as client:
        second = follow(first, (await proxy.ask(client, first)).json())
        second["messages"][-1]["content"] = [shown(BLUE), shown(RED)]
        third = follow(second, (await proxy.ask(client, second)).json())
        await proxy.ask(client, third)
        await proxy.ask(client, look(RED, text="and"))
    assert await stored(proxy) == {sha(RED): RED, sha(BLUE): BLUE}
    rows = await proxy.rows()
    assert [row.parent_id for row in rows[:3]] == [None, rows[0].id, rows[1].id]
    assert [row.flags["images"] for row in rows] == [1, 3, 3, 1]
    found = await cut_now(proxy)
    assert [[m.sha256 for m in sample.media] for sample in found.samples] == [
        [sha(RED), sha(BLUE), sha(RED)],
        [sha(RED)],
    ]


async def test_case_23_another_screenshot_in_the_same_place_is_another_conversation(proxy: Rig) -> None:
    first = look(RED)
    async with proxy.client() as client:
        answer = (await proxy.ask(client, first)).json()
        await proxy.ask(client, follow(look(BLUE), answer))
        await proxy.ask(client, follow(look(RED), answer))
    rows = await proxy.rows()
    assert [row.parent_id for row in rows] == [None, None, rows[0].id]
    assert rows[1].prefix_len < rows[2].prefix_len


async def test_the_same_request_with_another_image_is_no_retry(proxy: Rig) -> None:
    gate = proxy.engine.blocked()
    async with proxy.client() as client:
        both = [asyncio.create_task(proxy.ask(client, look(file))) for file in (RED, BLUE)]
        await proxy.engine.arrived()
        await proxy.engine.arrived()
        gate.set()
        await asyncio.gather(*both)
    assert [row.retry_of for row in await proxy.rows()] == [None, None]


async def test_after_a_restart_images_still_tell_prompts_apart(proxy: Rig) -> None:
    async with proxy.client() as client:
        answer = (await proxy.ask(client, look(RED))).json()
    await proxy.sessions.close()
    async with proxy.serving(), proxy.client() as client:
        await proxy.ask(client, follow(look(BLUE), answer))
        await proxy.ask(client, follow(look(RED), answer))
    rows = await proxy.rows()
    assert [row.parent_id for row in rows] == [None, None, rows[0].id]
    assert await stored(proxy) == {sha(RED): RED, sha(BLUE): BLUE}


@pytest.mark.parametrize(
    ("mode", "placeholder", "reason"),
    [
        ("train", PLACEHOLDER, "media"),
        ("train", None, "media"),
        ("record", None, "media_unknown"),
        ("record", 999, "media_unknown"),
    ],
)
async def test_what_cannot_be_trained_with_images_says_why(
    database_url: str, mode: str, placeholder: int | None, reason: str
) -> None:
    async with rig(database_url, mode=mode) as proxy:
        proxy.calls._placeholder = placeholder
        async with proxy.client() as client:
            first = {"model": "m", "messages": [{"role": "user", "content": "blind"}]}
            second = follow(first, (await proxy.ask(client, first)).json())
            second["messages"][-1]["content"] = [shown(RED)]
            third = follow(second, (await proxy.ask(client, second)).json())
            await proxy.ask(client, third)
        assert [row.untrainable for row in await proxy.rows()] == [None, reason, reason]
        assert await stored(proxy) == {sha(RED): RED}
        found = await cut_now(proxy)
        (sample,) = found.samples
        assert sample.media == () and [span.owned for span in sample.spans] == [True]
        assert set(found.untrained.values()) == {Untrainable(reason)}


# --- what is refused ---


def chat(part: Any) -> tuple[str, dict[str, Any]]:
    return "v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": [part]}]}


def responses(image: Any) -> tuple[str, dict[str, Any]]:
    part = {"type": "input_image", "image_url": image}
    return "v1/responses", {"model": "m", "input": [{"role": "user", "content": [part]}]}


def claude(source: Any) -> tuple[str, dict[str, Any]]:
    part = {"type": "image", "source": source}
    return "v1/messages", {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": [part]}],
    }


def google(part: Any) -> tuple[str, dict[str, Any]]:
    return "v1beta/models/m:generateContent", {"contents": [{"parts": [part]}]}


def base64_source(media_type: str, data: str) -> dict[str, Any]:
    return {"type": "base64", "media_type": media_type, "data": data}


ELSEWHERE = "https://example.com/cat.png"
BAD: list[tuple[tuple[str, dict[str, Any]], str]] = [
    (chat({"type": "image_url", "image_url": {"url": ELSEWHERE}}), "send the image itself"),
    (chat({"type": "image_url", "image_url": ELSEWHERE}), "send the image itself"),
    (chat({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}), "send the image itself"),
    (chat({"type": "image_url"}), "not a string"),
    (chat({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}), "base64"),
    (chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,a*b="}}), "base64"),
    (chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}), "empty"),
    (chat({"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,YQ=="}}), "svg"),
    (chat({"type": "video_url", "video_url": {"url": ELSEWHERE}}), "video_url"),
    (chat({"type": "input_audio", "input_audio": {}}), "input_audio"),
    (chat({"image_url": ELSEWHERE}), "type"),
    (responses(ELSEWHERE), "send the image itself"),
    (responses("data:image/png;base64,####"), "base64"),
    (claude({"type": "url", "url": ELSEWHERE}), "send the image itself"),
    (claude(base64_source("application/pdf", "YQ==")), "application/pdf"),
    (claude(base64_source("image/png", "a")), "base64"),
    (claude(base64_source("image/png", "é")), "base64"),
    (google({"fileData": {"fileUri": ELSEWHERE, "mimeType": "image/png"}}), "fileData"),
    (google({"inlineData": {"mimeType": "image/tiff", "data": "YQ=="}}), "image/tiff"),
    (google({"inlineData": {"mimeType": "image/png", "data": "%%"}}), "base64"),
]


async def test_images_that_cannot_be_recorded_are_refused(proxy: Rig) -> None:
    """In the shape of the dialect, and without a trace."""
    async with proxy.client() as client:
        for (route, body), told in BAD:
            answer = await client.post(f"/a/{proxy.attempt}/{route}", json=body)
            assert answer.status_code == 400, (route, body)
            error = answer.json()["error"]
            assert told in error["message"], (route, body)
            assert ("status" if route.startswith("v1beta") else "type") in error
    assert await proxy.rows() == [] and await stored(proxy) == {}


async def test_an_image_that_is_too_large_is_refused(proxy: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_BYTES", 3000)
    async with proxy.client() as client:
        assert (await proxy.ask(client, look(b"x" * 3000))).status_code == 200
        answer = await proxy.ask(client, look(b"x" * 3010))
    assert answer.status_code == 400 and "larger than" in answer.json()["error"]["message"]


@given(st.binary(min_size=1, max_size=60), st.integers(1, 20), st.booleans())
def test_base64_in_lines_and_without_padding_is_the_same_image(file: bytes, width: int, padded: bool) -> None:
    clean = b64(file)
    given = clean if padded else clean.rstrip("=")
    wrapped = "\n".join(given[i : i + width] for i in range(0, len(given), width))
    assert images.of_base64("Image/JPG", wrapped, "x") == f"data:image/jpeg;base64,{clean}"
    assert images.of_url(f"DATA:image/png;base64,{clean}", "x") == f"data:image/png;base64,{clean}"


@given(st.text(max_size=40))
def test_no_url_makes_the_proxy_fail(text: str) -> None:
    for given_url in (text, f"data:{text}", f"data:image/png;base64,{text}"):
        try:
            made = images.of_url(given_url, "x")
        except Refusal as refusal:
            assert refusal.status == 400
        else:
            assert made.startswith("data:image/")


def test_texts_that_look_like_images_are_left_alone() -> None:
    text = json.dumps({"image_url": {"url": "data:image/png;base64,xx"}}, separators=(",", ":"))
    message = msgspec.Raw(msgspec.json.encode({"role": "user", "content": text}))
    assert media.by_hash(message) == (message, ())


# --- what is made of it ---


async def recorded(proxy: Rig) -> Run:
    """The attempt ended well, with one conversation over two images and one without any."""
    first = look(RED)
    async with proxy.client() as client:
        second = follow(first, (await proxy.ask(client, first)).json())
        second["messages"][-1]["content"] = [shown(BLUE)]
        third = follow(second, (await proxy.ask(client, second)).json())
        await proxy.ask(client, third)
    await proxy.seal()
    rollout = t.rollouts.c

    def finish(connection: sa.Connection) -> Run:
        found = connection.execute(sa.select(t.rollouts)).one()
        connection.execute(
            sa.update(t.attempts).values(state="ended", outcome="completed", kind="ok", not_trained="")
        )
        connection.execute(
            sa.update(t.rollouts)
            .where(rollout.id == found.id)
            .values(state="ended", outcome="completed", kind="ok", reward=1.0, final_attempt_id=proxy.attempt)
        )
        return Run(found.run_id, found.run_id, "default", WINDOW)

    return await proxy.store.write(finish)


def rows_in(path: Path, form: Format) -> list[dict[str, Any]]:
    if form == "parquet":
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    if form == "arrow":
        rows = ipc.open_file(path).read_all().to_pylist()
        return rows
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_exported_rows_name_images_that_lie_beside_them(proxy: Rig, tmp_path: Path) -> None:
    run = await recorded(proxy)
    forms: list[Format] = ["parquet", "arrow", "jsonl"]
    for form in forms:
        path = tmp_path / f"out.{form}"
        report = export_run(proxy.store, run, form, path)
        assert (report.rows, report.images) == (1, 2)
        (row,) = rows_in(path, form)
        assert [(m["sha256"], m["length"], m["modality"], m["kwargs_ref"]) for m in row["mm"]] == [
            (sha(RED), 3, "image", None),
            (sha(BLUE), 3, "image", None),
        ]
        for m in row["mm"]:
            assert row["tokens"][m["offset"] : m["offset"] + m["length"]] == [PLACEHOLDER] * m["length"]
            file = (tmp_path / "media" / m["sha256"]).read_bytes()
            assert sha(file) == m["sha256"]
    assert sorted(p.name for p in (tmp_path / "media").iterdir()) == sorted([sha(RED), sha(BLUE)])


async def test_what_is_blind_gets_no_samples_with_images(proxy: Rig, tmp_path: Path) -> None:
    report = export_run(proxy.store, await recorded(proxy), "sft", tmp_path / "out.parquet")
    assert report.rows == 0 and report.left_out == {"media": 1}
    assert not (tmp_path / "media").exists()


async def test_the_check_hashes_images_again(proxy: Rig, tmp_path: Path) -> None:
    run = await recorded(proxy)
    assert reports.check(proxy.store, run).violations == []
    change = sa.update(t.media).where(t.media.c.sha256 == bytes.fromhex(sha(BLUE)))
    await proxy.store.write(lambda c: c.execute(change.values(data=b"other")))
    found = reports.check(proxy.store, run).violations
    assert found and all(v.invariant == "I2" and sha(BLUE) in v.what for v in found)
    await proxy.store.write(lambda c: c.execute(sa.delete(t.media)))
    with pytest.raises(ExportError, match="not in the database"):
        export_run(proxy.store, run, "jsonl", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
