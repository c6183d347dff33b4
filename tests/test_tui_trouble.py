"""What the dashboard does when the server cannot be watched: it says why, and goes on by itself when it can."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from api_rig import eventually, settings
from forge_tui.app import ForgeApp
from forge_tui.trouble import TroubleScreen
from ports import free_port
from textual.pilot import Pilot
from tui_world import NOW, dashboard, press, settled, shown, world

from forge_server.api import overview
from forge_server.app import Server, running
from forge_server.client.http import ForgeClient
from forge_server.client.schemas import RolloutCreate
from forge_server.settings import SecuritySettings, ServerSettings

SIZE = (100, 30)
KEY = "fk-admin-0123456789"


@contextlib.asynccontextmanager
async def server_on(folder: Path, port: int) -> AsyncIterator[Server]:
    made = settings(
        folder,
        server=ServerSettings(port=0, control_port=port),
        security=SecuritySettings(admin_key=KEY),
    )
    async with running(made) as server:
        yield server


async def until(app: ForgeApp, pilot: Pilot[None], text: str) -> None:
    """The screen shows ``text``; it is asked as often as a person would wait."""
    async with asyncio.timeout(240.0):
        while text not in shown(app):
            app.action_again()
            await asyncio.sleep(0.05)
            await pilot.pause()


async def test_a_server_that_goes_and_comes_back(tmp_path: Path) -> None:
    port = free_port()
    async with server_on(tmp_path, port) as server:
        url = server.listening.control_url
    with ForgeClient(url, KEY) as client:
        app = ForgeApp(client, clock=lambda: NOW)
        async with app.run_test(size=SIZE) as pilot:
            await until(app, pilot, "The server does not answer")
            assert url in shown(app) and "forge-server up" in shown(app)
            async with server_on(tmp_path, port):
                await until(app, pilot, "Nothing has run yet")
                await eventually(lambda: app.feed.state == "live")
                first = await app.ask(lambda: client.register(RolloutCreate()))
                await until(app, pilot, "external")
                await press(app, pilot, "2")
                assert first.rollout_id[-8:] in shown(app)
                last = app.feed.last
            await until(app, pilot, "The server does not answer")
            assert "last seen" in shown(app)
            async with server_on(tmp_path, port):
                await until(app, pilot, first.rollout_id[-8:])  # the screen that was open
                await eventually(lambda: app.feed.state == "live")
                assert app.feed.last is not None and last is not None and app.feed.last >= last
                second = await app.ask(lambda: client.register(RolloutCreate()))
                await until(app, pilot, second.rollout_id[-8:])
                assert app.feed.lost == 0


async def test_a_database_that_was_exchanged_is_read_anew(tmp_path: Path) -> None:
    port = free_port()
    async with server_on(tmp_path / "a", port) as server:
        url = server.listening.control_url
    with ForgeClient(url, KEY) as client:
        app = ForgeApp(client, clock=lambda: NOW)
        async with app.run_test(size=SIZE) as pilot:
            async with server_on(tmp_path / "a", port):
                for _ in range(4):
                    await asyncio.to_thread(client.register, RolloutCreate())
                await until(app, pilot, "external")
                await press(app, pilot, "2")
                assert "4 rollouts" in shown(app)
            await until(app, pilot, "The server does not answer")
            async with server_on(tmp_path / "b", port):
                await until(app, pilot, "no rollouts yet")
                await eventually(lambda: app.feed.lost == 1 and app.feed.state == "live")
                await press(app, pilot, "1")
                assert "Nothing has run yet" in shown(app)


async def test_a_wrong_key(tmp_path: Path) -> None:
    async with server_on(tmp_path, 0) as server:
        with ForgeClient(server.listening.control_url, "wrong") as client:
            app = ForgeApp(client, clock=lambda: NOW)
            async with app.run_test(size=SIZE) as pilot:
                await until(app, pilot, "does not accept this key")
                assert "admin.key" in shown(app)
                await pilot.press("q")
                await eventually(lambda: not app.is_running)
            assert not app.is_running


async def test_what_answers_is_something_else(tmp_path: Path) -> None:
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\nconnection: close\r\n\r\n<html/>")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(page, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with ForgeClient(f"http://127.0.0.1:{port}", KEY) as client:
            app = ForgeApp(client, clock=lambda: NOW)
            async with app.run_test(size=SIZE) as pilot:
                await until(app, pilot, "no forge-server that the dashboard understands")


async def test_a_server_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(tmp_path, monkeypatch) as api, dashboard(api) as app:
        monkeypatch.setattr(overview, "__version__", "0.9.3")
        async with app.run_test(size=SIZE) as pilot:
            await until(app, pilot, "different versions")
            assert "The server is 0.9.3" in shown(app)
            assert isinstance(app.screen, TroubleScreen)
            await press(app, pilot, "c")
            await settled(app, pilot)
            assert "Reward" in shown(app)
            app._overview_at = float("-inf")
            await settled(app, pilot)
            assert "Reward" in shown(app)


async def test_a_server_without_what_the_dashboard_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(tmp_path, monkeypatch) as api, dashboard(api) as app:
        app.client.overview = lambda run=None: app.client.call("GET", "/api/v1/absent", dict)  # type: ignore
        async with app.run_test(size=SIZE) as pilot:
            await until(app, pilot, "no forge-server that the dashboard understands")
            assert "/api/v1/absent" in shown(app)
