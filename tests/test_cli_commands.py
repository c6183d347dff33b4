"""The command line: help everywhere, light imports, exit codes, one sentence per error, JSON of every list."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import click
import pytest
import sqlalchemy as sa
from api_rig import attached, line, rig, settings
from engine_fake import FakeEngine
from test_tasks_load import folder  # noqa: F401

from forge_server import cli as program
from forge_server.app import running
from forge_server.client.http import locate
from forge_server.client.schemas import RolloutCreate
from forge_server.domain.errors import ConfigError
from forge_server.store import tables as t

Forge = Callable[..., "Done"]


class Done:
    """How a command ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def failed(self, code: int, *words: str) -> str:
        """It said what is wrong in one sentence, on stderr only."""
        assert (self.code, self.out) == (code, ""), (self.code, self.out, self.err)
        assert self.err.startswith("forge-server: ") and self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err
        for word in words:
            assert word in self.err
        return self.err

    def fine(self) -> str:
        assert self.code == 0, self.err
        return self.out

    def items(self) -> Any:
        return json.loads(self.fine())


@pytest.fixture
def forge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Forge:
    """Runs a command of the command line in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("FORGE_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(program.sys, "argv", ["forge-server"])

    def run(*words: str) -> Done:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["forge-server", *words])
        code = 0
        try:
            program.main()
        except SystemExit as exit:
            code = int(exit.code or 0)
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return run


def all_commands(group: click.Group, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [words]
    for name, command in group.commands.items():
        path = (*words, name)
        found += all_commands(command, path) if isinstance(command, click.Group) else [path]
    return found


COMMANDS = all_commands(program.cli)


# --- help, imports, usage


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help(forge: Forge, words: tuple[str, ...]) -> None:
    command: click.Command = program.cli
    for word in words:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    assert command.help
    for flag in ("--help", "-h"):
        assert "Usage" in forge(*words, flag).fine()


HEAVY = ["sqlalchemy", "litestar", "kubernetes", "httpx", "numpy", "pyarrow", "uvicorn"]
HEAVY += ["alembic", "msgspec", "structlog", "yaml", "textual"]


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["run", "--help"], ["up", "--help"]], ids=" ".join
)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\nfrom forge_server.cli import main\nsys.argv[1:] = " + repr(words) + "\n"
        "try: main()\nexcept SystemExit: pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.rstrip().endswith("[]"), done.stdout


def test_every_list_has_json() -> None:
    for words in COMMANDS:
        if words[-1:] == ("list",) or words in (("rollout", "calls"), ("check",), ("drift",)):
            command: Any = program.cli
            for word in words:
                command = command.commands[word]
            assert any(parameter.name == "as_json" for parameter in command.params), words


@pytest.mark.parametrize(
    "words",
    [
        ["nope"],
        ["run", "nope"],
        ["run"],
        [],
        ["run", "show"],
        ["run", "list", "--nope"],
        ["rollout", "list", "--state", "done"],
        ["rollout", "list", "--limit", "x"],
        ["rollout", "list", "--limit", "0"],
        ["policy", "show", "x"],
        ["task", "import", "nowhere", "--taskset", "a"],
        ["task", "import", "."],
        ["run", "create", "nowhere.toml"],
        ["demo", "--versions", "0", "--folder", "/proc/none"],
        ["demo", "--versions", "1000000000000", "--folder", "/proc/none"],
    ],
    ids=" ".join,
)
def test_usage_errors(forge: Forge, words: list[str]) -> None:
    done = forge(*words)
    assert done.code == 2 and done.out + done.err and "Traceback" not in done.err


# --- without a server


def test_init_twice(forge: Forge, tmp_path: Path) -> None:
    assert "forge.toml" in forge("init").fine()
    before = (tmp_path / "forge.toml").read_bytes()
    forge("init").failed(1, "forge.toml", "exists already")
    assert (tmp_path / "forge.toml").read_bytes() == before
    forge("init", "deeper/folder").fine()
    assert (tmp_path / "deeper/folder/forge.toml").read_bytes() == before
    (tmp_path / "file").write_text("")
    forge("init", "file/below").failed(2, "file/below")


def test_no_server_and_no_database(forge: Forge, tmp_path: Path) -> None:
    forge("run", "list").failed(1, "no forge-server answers", "forge-server up")
    forge("run", "pause", "x").failed(1, "no forge-server answers")
    (tmp_path / "forge.toml").write_text("[server]\ncontrol_port = 1\n")
    forge("run", "list").failed(1, "http://127.0.0.1:1")
    assert os.listdir(tmp_path) == ["forge.toml"]  # looking makes nothing


@pytest.mark.parametrize("words", [["run", "list"], ["up"], ["check"], ["db", "current"]], ids=" ".join)
def test_a_mistake_in_the_settings(forge: Forge, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "forge.toml").write_text("[server\n")
    forge(*words).failed(2, "forge.toml")
    assert os.listdir(tmp_path) == ["forge.toml"]


def test_an_unknown_key_names_the_nearest(forge: Forge, tmp_path: Path) -> None:
    (tmp_path / "forge.toml").write_text("[server]\nprot = 1\n")
    for words in (["up"], ["check"], ["harness", "list"], ["db", "upgrade"]):
        forge(*words).failed(2, "did you mean 'port'?")
    forge("up", "-c", "none.toml").failed(2, "none.toml", "no such file", "forge-server init")


def test_urls_and_keys_that_are_none(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    forge("run", "list", "--url", "http://127.0.0.1:1").failed(1, "http://127.0.0.1:1")
    forge("run", "list", "--url", "nonsense").failed(1, "nonsense")
    forge("run", "list", "--url", "http://x:y").failed(2, "not a URL")
    forge("run", "list", "--key", "a b").failed(2, "key")
    monkeypatch.setenv("FORGE_URL", "http://127.0.0.1:2")
    forge("run", "list").failed(1, "http://127.0.0.1:2")


def test_harnesses(forge: Forge, tmp_path: Path) -> None:
    assert {"react", "mini-swe-agent"} <= {
        spec["name"] for spec in forge("harness", "list", "--json").items()
    }
    assert "react" in forge("harness", "list").fine()
    assert "name: react" in forge("harness", "show", "react").fine()
    forge("harness", "show", "reac").failed(1, "react")
    (tmp_path / "forge.toml").write_text('[harness]\npaths = ["nowhere"]\n')
    forge("harness", "list").failed(1, "nowhere", "[harness] paths")


@pytest.mark.sandbox
def test_validation_goes_on_after_a_task_that_cannot_be_run(forge: Forge, tmp_path: Path) -> None:
    verify = {"answer_file": "answer.txt", "equals": "plum"}
    given = [
        {"name": name, "instruction": "Write plum.", "verify": verify, "workdir": workdir}
        for name, workdir in (("a[/b]", "/usr/games/x"), ("b", "/usr/src/app"))
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in given))
    done = forge("task", "validate", "tasks.jsonl", "--json")
    assert done.code == 2 and "1 of 2 tasks were not found fit for use: a[/b]" in done.err, done.err
    first, second = json.loads(done.out)
    assert (first["name"], first["gold_reward"], second) == (
        "a[/b]",
        None,
        {"name": "b", "gold_reward": 1.0, "idle_reward": 0.0, "faults": []},
    )
    (fault,) = first["faults"]
    assert "/usr/games/x cannot be made in the local sandbox, where /usr is read-only" in fault
    shown = forge("task", "validate", "tasks.jsonl").out.splitlines()
    assert [line.split()[:2] for line in shown] == [["FAIL", "a[/b]"], ["ok", "b"]], shown


def test_environments(forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    assert forge("env", "list", "--json").items() == []
    forge("env", "remove", "none").failed(1, "none")
    forge("env", "remove", "../x").failed(1, "../x")
    forge("env", "create", "none").failed(1, "engine, trainer", "react")
    assert "nothing to install" in forge("env", "create", "react").fine()


def test_the_database_schema(forge: Forge, tmp_path: Path) -> None:
    assert "no schema yet" in forge("db", "current").fine()
    assert not os.listdir(tmp_path)
    forge("db", "downgrade", "base").failed(1, "no schema")
    forge("run", "list").failed(1, "no forge-server answers", "no database")
    head = forge("db", "upgrade").fine().split()[-1]
    assert forge("db", "current").fine().strip() == head
    forge("db", "upgrade").fine()
    assert forge("run", "list", "--json").items() == []
    assert "no runs yet" in forge("run", "list").fine()
    forge("db", "downgrade", "nonsense").failed(1, "nonsense")
    assert forge("db", "current").fine().strip() == head
    assert "nothing" in forge("db", "downgrade", "base").fine()
    forge("run", "list").failed(1, "empty")
    if os.geteuid() == 0:
        assert (tmp_path / "forge-data").stat().st_mode & 0o777 == 0o711


def test_a_database_that_is_none(forge: Forge, tmp_path: Path) -> None:
    (tmp_path / "forge.toml").write_text('[store]\nurl = "mysql://x"\n')
    for words in (["db", "current"], ["db", "upgrade"]):
        forge(*words).failed(1, "[store] url", "mysql")
    (tmp_path / "data.txt").write_text("no database " * 200)
    (tmp_path / "forge.toml").write_text(f'[store]\nurl = "sqlite:///{tmp_path}/data.txt"\n')
    forge("db", "current").failed(1, "not a database")
    forge("run", "list").failed(1, "not a database")


# --- check


def checked(forge: Forge, code: int = 1) -> dict[str, dict[str, Any]]:
    done = forge("check", "--json")
    assert done.code == code, done.err
    return {found["name"]: found for found in json.loads(done.out)}


def test_check_names_what_fails_and_the_mend(forge: Forge, tmp_path: Path) -> None:
    found = checked(forge)
    assert [name for name, check in found.items() if not check["ok"]] == ["engine"]
    assert "add [engine]" in found["engine"]["detail"]
    assert "made at the first start" in found["database"]["detail"]
    assert not os.listdir(tmp_path)  # nothing is changed

    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "forge.toml").write_text(
            f"""
            [server]
            port = {port}
            control_port = 0
            data_dir = "forge.toml/below"
            [store]
            url = "sqlite:///{tmp_path}/old.db"
            [engine]
            kind = "attach"
            url = "http://127.0.0.1:1"
            model = "no-model"
            [[run]]
            name = "r"
            taskset = "t"
            harness = "reac"
            """
        )
        found = checked(forge)
        assert "cannot be used" in found["data folder"]["detail"]
        text = (tmp_path / "forge.toml").read_text().replace("forge.toml/below", "data")
        (tmp_path / "forge.toml").write_text(text)
        found = checked(forge)
    failed = {name for name, check in found.items() if not check["ok"]}
    assert {"port", "model", "harness reac", "engine reachable"} <= failed
    assert "in use" in found["port"]["detail"] and found["control_port"]["ok"]
    assert "no-model" in found["model"]["detail"] and "react" in found["harness reac"]["detail"]
    done = forge("check")
    assert done.code == 1 and "FAIL" in done.out
    assert "not ready" in done.err and "harness reac" in done.err


def test_check_of_an_old_database(forge: Forge, tmp_path: Path) -> None:
    forge("db", "upgrade").fine()
    assert checked(forge)["database"]["ok"]
    import sqlite3

    with sqlite3.connect(tmp_path / "forge-data" / "forge.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0000'")
    assert "0000" in checked(forge)["database"]["detail"]
    forge("run", "list").failed(1, "0000")


async def test_check_probes_an_engine_that_runs(forge: Forge, tmp_path: Path) -> None:
    async with FakeEngine().serving() as engine:
        (tmp_path / "forge.toml").write_text(f'[engine]\nkind = "attach"\nurl = "{engine.url}"\n')
        done = await asyncio.to_thread(forge, "check", "--json")
        found = {check["name"]: check for check in json.loads(done.out)}
        assert found["engine reachable"]["ok"]
        assert any(entry.startswith("POST /v1/chat/completions") for entry in engine.log)


# --- beside a server, and after it


@pytest.fixture
async def recorded(tmp_path: Path) -> AsyncIterator[str]:
    """A server of the folder, with a run, a task, and a rollout that made one call; yields the rollout's id."""
    async with FakeEngine().serving() as engine, rig(tmp_path, **attached(engine.url)) as api:
        await api.ready()
        await api.http.post("/api/v1/tasks", json={"taskset": "s", "tasks": [line("a"), line("b")]})
        await api.create_run("mine", harness="external")
        registration = await api.server.external.register(RolloutCreate(run="mine", task="a"))
        import httpx

        async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
            answer = await http.post(
                f"{registration.base_url}/v1/chat/completions",
                json={"model": "forge", "messages": [{"role": "user", "content": "hi"}]},
                headers={"authorization": f"Bearer {registration.agent_key}"},
            )
            assert answer.status_code == 200, answer.text
        seen = sa.select(t.calls.c.delivered)
        async with asyncio.timeout(120):  # that it was delivered is known, and written, a moment later
            while await api.server.store.read(lambda c: c.execute(seen).scalar_one()) != "yes":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        yield registration.rollout_id


LOOKS = [
    ["run", "list", "--json"],
    ["run", "show", "mine", "--json"],
    ["task", "list", "--json"],
    ["task", "list", "--taskset", "s", "--limit", "1", "--json"],
    ["rollout", "list", "--json"],
    ["rollout", "list", "--run", "mine", "--state", "active", "--json"],
    ["rollout", "show", "ROLLOUT", "--json"],
    ["rollout", "calls", "ROLLOUT", "--json"],
    ["rollout", "logs", "ROLLOUT"],
    ["policy", "list", "--json"],
    ["eval", "mine", "--k", "2", "--json"],
    ["eval", "mine", "--by", "task", "--mode", "record", "--json"],
]


async def test_looking_without_a_server_shows_what_the_server_showed(
    forge: Forge, tmp_path: Path, recorded: str
) -> None:
    words = [[word.replace("ROLLOUT", recorded) for word in each] for each in LOOKS]
    beside = [(await asyncio.to_thread(forge, *each)).fine() for each in words]
    assert json.loads(beside[0])[0]["name"] == "mine"
    assert len(json.loads(beside[2])) == 2 and len(json.loads(beside[3])) == 1
    assert json.loads(beside[6])["calls"][0]["response"]["content"] == "hi"
    for each in words:  # and for people
        await asyncio.to_thread(lambda each=each: forge(*[w for w in each if w != "--json"]).fine())
    wrong = [
        ["run", "show", "x"],
        ["rollout", "show", "x"],
        ["rollout", "logs", "x"],
        ["policy", "show", "9"],
    ]
    told = [(await asyncio.to_thread(forge, *each)).failed(1, "there is no") for each in wrong]

    # the same from the database: the address is there, nobody answers
    data = tmp_path / "forge-data"
    (data / "control.url").write_text("http://127.0.0.1:1\n")
    after = [(await asyncio.to_thread(forge, *each)).fine() for each in words]
    assert after == beside
    assert [(await asyncio.to_thread(forge, *each)).failed(1, "there is no") for each in wrong] == told
    (await asyncio.to_thread(forge, "rollout", "cancel", recorded)).failed(1, "no forge-server answers")


async def test_acts_beside_a_server(forge: Forge, tmp_path: Path, recorded: str, folder: Path) -> None:  # noqa: F811
    async def run(*words: str) -> Done:
        return await asyncio.to_thread(forge, *words)

    assert "paused" in (await run("run", "pause", "mine")).fine()
    assert (await run("run", "set", "mine", "--in-flight", "3")).fine().startswith("3 attempts in flight")
    (await run("run", "set", "mine")).failed(2, "nothing is to be changed", "--harness NAME=WEIGHT")
    (await run("run", "set", "mine", "--harness", "react=0")).failed(2, "must be above 0")
    (await run("run", "set", "mine", "--harness", "react=1")).failed(1, "join by themselves")
    (await run("run", "evaluate", "mine")).failed(1, "resume it first")
    assert "active" in (await run("run", "resume", "mine")).fine()
    (await run("run", "evaluate", "mine")).failed(1, "the run has no evaluation")
    (await run("run", "checkpoint", "mine")).failed(1, "only a training run has a trainer")
    assert "cancelled" in (await run("rollout", "cancel", recorded)).fine()
    (await run("rollout", "retry", recorded)).failed(1, "refused")
    assert "cancelled" in (await run("run", "cancel", "mine")).fine()
    (await run("run", "resume", "mine")).failed(1, "ended")
    (await run("run", "pause", "x/y?z")).failed(1, "there is no")
    (await run("policy", "activate", "7")).failed(1, "no version 7")

    lines = tmp_path / "tasks.jsonl"
    lines.write_text(json.dumps(line("c")) + "\n")
    assert "1 registered" in (await run("task", "import", str(lines), "--taskset", "s")).fine()
    assert "1 unchanged\n" in (await run("task", "import", str(lines), "--taskset", "s")).fine()
    assert "1 registered" in (await run("task", "import", str(folder), "--taskset", "s")).fine()
    shutil.move(folder, tmp_path / "moved" / "hello")
    told = (await run("task", "import", str(tmp_path / "moved" / "hello"), "--taskset", "s")).fine()
    assert "1 unchanged, 1 of them elsewhere" in told
    lines.write_text(json.dumps(line("c", instruction="Other.")) + "\n")
    (await run("task", "import", str(lines), "--taskset", "s")).failed(2, "other content")
    lines.write_text("{}\n")
    (await run("task", "import", str(lines), "--taskset", "s")).failed(2, "tasks.jsonl")

    runs = tmp_path / "runs.toml"
    one = '[[run]]\nname = "one"\nkind = "record"\ntaskset = "s"\nharness = "external"\n'
    runs.write_text(one + one.replace("one", "two") + "nn = 1\n")
    (await run("run", "create", str(runs))).failed(2, "did you mean 'n'?")
    assert "one" not in (await run("run", "list")).fine()  # nothing half done
    runs.write_text(one)
    assert "one" in (await run("run", "create", str(runs))).fine()
    runs.write_text(one + "seed = 3\n")
    (await run("run", "create", str(runs))).failed(1, "'seed'")

    for words in (["run", "list"], ["run", "pause", "mine"], ["rollout", "show", recorded]):
        (await run(*words, "--key", "wrong")).failed(1, "does not accept this key", "FORGE_KEY")


async def test_what_answers_may_be_no_forge_server(forge: Forge) -> None:
    async with FakeEngine().serving() as engine:
        done = await asyncio.to_thread(forge, "run", "list", "--url", engine.url)
        done.failed(1, "no forge-server")


async def test_where_the_client_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("FORGE_"):
            monkeypatch.delenv(name)
    assert locate() == ("http://127.0.0.1:8401", "")
    (tmp_path / "forge.toml").write_text('[server]\ncontrol_port = 5\n[security]\nadmin_key = "k"\n')
    assert locate() == ("http://127.0.0.1:5", "k")
    monkeypatch.setenv("FORGE_SERVER__CONTROL_PORT", "6")
    assert locate()[0] == "http://127.0.0.1:6"
    async with running(settings(tmp_path)) as server:
        assert locate() == (server.listening.control_url, "k")
        (tmp_path / "forge.toml").write_text("")
        assert locate() == (server.listening.control_url, server.admin_key)
    assert locate("http://u", "v") == ("http://u", "v")
    (tmp_path / "forge.toml").write_text("[x")
    with pytest.raises(ConfigError):
        locate()
