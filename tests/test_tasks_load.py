"""Tasks from Harbor folders and JSONL lines: what they become, and what each kind of mistake is told."""

import base64
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forge_server.domain.errors import TaskError
from forge_server.tasks import harbor, lines, load
from forge_server.tasks.task import Task

TOML = """\
version = "1.0"
[metadata]
author_name = "somebody"
difficulty = "easy"
created = 2026-01-02
split = "test"
[agent]
timeout_sec = 300.0
[verifier]
timeout_sec = 60
env = {}
[environment]
build_timeout_sec = 600.0
cpus = 1
memory = "2G"
docker_image = "localhost/hello:1"
workdir = ""
env = {}
mcp_servers = []
healthcheck = {}
os = "Linux"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole Harbor task."""
    root = tmp_path / "hello"
    for path, text in {
        "instruction.md": "Write hello to out.txt.\n",
        "task.toml": TOML,
        "environment/Dockerfile": "FROM debian\nWORKDIR /app\nCOPY . .\n",
        "environment/data/seed.txt": "7\n",
        "environment/__pycache__/x.pyc": "junk",
        "tests/test.sh": "grep -q hello out.txt && echo 1 > /logs/verifier/reward.txt\n",
        "tests/helper.py": "pass\n",
        "solution/solve.sh": "echo hello > out.txt\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "tests/test.sh").chmod(0o755)
    return root


def line(**changes: Any) -> dict[str, Any]:
    whole = {
        "name": "copy-7",
        "instruction": "Copy the word in word.txt to answer.txt.",
        "files": {"word.txt": "plum\n", "bin/tool": {"text": "#!/bin/sh\n", "executable": True}},
        "verify": {"answer_file": "answer.txt", "equals": "plum"},
    }
    return {key: value for key, value in {**whole, **changes}.items() if value is not ...}


def one(**changes: Any) -> Task:
    (task,) = load.from_lines([line(**changes)])
    return task


def test_a_harbor_folder_becomes_a_task(folder: Path) -> None:
    (task,) = load.load(folder)
    assert (task.name, task.instruction) == ("hello", "Write hello to out.txt.\n")
    assert [f.path for f in task.files] == ["data/seed.txt"]
    assert [(f.path, f.mode) for f in task.tests] == [("helper.py", 0o644), ("test.sh", 0o755)]
    assert [f.path for f in task.gold] == ["solve.sh"]
    assert (task.agent_s, task.verify_s, task.memory_mb, task.workdir) == (300.0, 60.0, 2048, "/app")
    assert (task.split, task.path) == ("test", str(folder))
    assert task.input.files == task.files and task.input.agent_s == 300.0
    assert task.input.image == task.image == "localhost/hello:1"


def test_a_stated_work_folder_goes_before_the_image_s(folder: Path) -> None:
    (before,) = load.load(folder)
    (folder / "task.toml").write_text(TOML.replace('workdir = ""', 'workdir = "/srv"'))
    (task,) = load.load(folder)
    assert (before.workdir, task.workdir) == ("/app", "/srv") and before.digest != task.digest


@pytest.mark.parametrize("limit", ['memory = "0.5K"', "memory_mb = 0.5"])
def test_a_small_limit_of_memory_is_not_none_at_all(folder: Path, limit: str) -> None:
    (folder / "task.toml").write_text(f"[environment]\n{limit}\n")
    assert load.load(folder)[0].memory_mb == 1


def test_a_folder_of_folders_is_read_in_order(folder: Path) -> None:
    other = folder.parent / "again"
    other.mkdir()
    for name in ("instruction.md", "tests"):
        (other / name).symlink_to(folder / name)
    (folder.parent / "notes").mkdir()
    assert [task.name for task in load.load(folder.parent)] == ["again", "hello"]


def spoil(path: str, text: str | None) -> Callable[[Path], None]:
    def act(root: Path) -> None:
        (root / path).unlink() if text is None else (root / path).write_text(text)

    return act


MISTAKES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "no tests": (spoil("tests/test.sh", None), "no tests/test.sh", "reward.txt"),
    "no instruction": (spoil("instruction.md", None), "instruction is empty", "say what"),
    "no solve.sh": (lambda p: (p / "solution/solve.sh").rename(p / "solution/x"), "no solve.sh", "add it"),
    "bad toml": (spoil("task.toml", "[agent\n"), "not TOML", "syntax"),
    "bad limit": (spoil("task.toml", "[agent]\ntimeout_sec = -1\n"), "agent.timeout_sec is -1", "above 0"),
    "no table": (spoil("task.toml", "agent = 3\n"), "agent is not a table", "[agent]"),
    "bad memory": (spoil("task.toml", '[environment]\nmemory = "much"\n'), "'much'", "memory_mb"),
    "bad image": (spoil("task.toml", "[environment]\ndocker_image = 3\n"), "docker_image is 3", "a name"),
    "root": (spoil("task.toml", '[agent]\nuser = "root"\n'), "agent.user is root", "every user"),
    "root verifier": (spoil("task.toml", "[verifier]\nuser = 0\n"), "verifier.user is root", "every user"),
    "steps": (spoil("task.toml", '[[steps]]\nname = "a"\n'), "several steps", "of its own"),
    "secrets": (spoil("task.toml", '[verifier]\nenv = { KEY = "x" }\n'), "environment variables", "test.sh"),
    "own container": (
        spoil("task.toml", '[verifier]\nenvironment_mode = "separate"\n'),
        "container of its own",
        "work folder",
    ),
    "relative workdir": (
        spoil("task.toml", '[environment]\nworkdir = "app"\n'),
        "workdir is 'app'",
        "absolute",
    ),
    "bad workdir": (spoil("task.toml", "[environment]\nworkdir = 3\n"), "workdir is 3", "absolute"),
    "variables": (spoil("task.toml", '[environment]\nenv = { A = "1" }\n'), "environment.env", "a file"),
    "mcp": (spoil("task.toml", '[[environment.mcp_servers]]\nname = "x"\n'), "mcp_servers", "its spec"),
    "health": (
        spoil("task.toml", '[environment.healthcheck]\ncommand = "x"\n'),
        "healthcheck",
        "leave it out",
    ),
    "windows": (spoil("task.toml", '[environment]\nos = "windows"\n'), "os is 'windows'", "Linux only"),
    "compose": (spoil("environment/docker-compose.yaml", "services: {}"), "docker-compose.yaml", "one image"),
    "compose yml": (
        spoil("environment/docker-compose.yml", "services: {}"),
        "docker-compose.yml",
        "one image",
    ),
    "endless": (spoil("task.toml", "[verifier]\ntimeout_sec = inf\n"), "timeout_sec is inf", "1,000,000,000"),
    "no time": (spoil("task.toml", "[agent]\ntimeout_sec = nan\n"), "timeout_sec is nan", "above 0"),
    "all memory": (spoil("task.toml", "[environment]\nmemory_mb = inf\n"), "memory_mb is inf", "above 0"),
    "more memory": (
        spoil("task.toml", f'[environment]\nmemory = "{"9" * 400}G"\n'),
        "memory_mb is inf",
        "1,000,000,000",
    ),
    "huge": (spoil("task.toml", f"[agent]\ntimeout_sec = {'9' * 400}\n"), "timeout_sec is 999", "at most"),
    "no minimum": (spoil("task.toml", "[metadata]\nmin_reward = nan\n"), "min_reward is nan", "a number"),
    "low minimum": (spoil("task.toml", "[metadata]\nmin_reward = -inf\n"), "min_reward is -inf", "a number"),
    "a link": (lambda p: (p / "tests/key").symlink_to("/etc/passwd"), "is a link", "the file itself"),
    "bad split": (spoil("task.toml", "[metadata]\nsplit = 3\n"), "metadata.split", "word"),
    "not text": (lambda p: (p / "instruction.md").write_bytes(b"\xff"), "cannot be read", "UTF-8"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_folder_is_told_where_and_how_to_mend_it(folder: Path, mistake: str) -> None:
    act, what, mend = MISTAKES[mistake]
    act(folder)
    with pytest.raises(TaskError) as caught:
        load.load(folder)
    assert what in caught.value.what
    assert str(folder) in caught.value.where
    assert mend in caught.value.mend


@pytest.mark.parametrize("place", [b"environment/caf\xe9", b"tests/caf\xe9/x"])
def test_a_file_whose_name_is_not_utf_8_is_named(folder: Path, place: bytes) -> None:
    file = os.path.join(os.fsencode(folder), place)
    os.makedirs(os.path.dirname(file), exist_ok=True)
    with open(file, "w"):
        pass
    with pytest.raises(TaskError, match="its name is not UTF-8") as caught:
        load.load(folder)
    assert caught.value.where.startswith(str(folder)) and caught.value.where.endswith(r"caf\xe9")
    os.remove(file)
    whole = os.path.join(os.fsencode(folder.parent), b"caf\xe9")
    os.rename(folder, whole)
    with pytest.raises(TaskError, match="its name is not UTF-8"):
        load.load(folder.parent)


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(TaskError, match="there is no"):
            load.load(path)


def test_a_path_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="it cannot be read \\(File name too long\\); check the path"):
        load.load(tmp_path / ("a" * 300))


def test_a_line_becomes_a_task() -> None:
    task = one(agent_s=30, split="test", min_reward=-1, memory_mb=512, metadata={"level": 3})
    assert [(f.path, f.content, f.mode) for f in task.files] == [
        ("bin/tool", b"#!/bin/sh\n", 0o755),
        ("word.txt", b"plum\n", 0o644),
    ]
    assert (task.agent_s, task.split, task.min_reward, task.memory_mb) == (30, "test", -1, 512)
    assert {f.path for f in task.tests} == {"test.sh", "expected"}
    assert [f.path for f in task.gold] == ["solve.sh"]
    assert (task.path, task.workdir) == (None, "/workspace")


def test_an_image_moves_the_digest_and_no_image_leaves_it_alone() -> None:
    plain, other = one(), one(image="localhost/other:1")
    assert (plain.image, other.image) == ("", "localhost/other:1")
    assert plain.digest == one(image="").digest != other.digest


def test_lines_of_a_file_are_numbered_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(line()) + "\n\n" + json.dumps(line(name="b", instruction=" ")) + "\n")
    with pytest.raises(TaskError) as caught:
        load.load(file)
    assert caught.value.where == f"{file}:3"
    file.write_text(json.dumps(line(name="b")) + "\n" + json.dumps(line(name="a")) + "\n")
    assert [task.name for task in load.load(file)] == ["a", "b"]
    file.write_text("{\n")
    with pytest.raises(TaskError, match="not JSON"):
        load.load(file)


RESERVED = (
    "/",
    "//",
    "/tests",
    "/tests/x",
    "/logs/verifier",
    "/forge",
    "/forge-attempt/home",
    "/proc/x",
    "/sys",
)
RESERVED += ("/dev/x", "/usr", "/lib", "/workspace/..", "/x/../tests")
WRONG_LINES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"verfy": 1}, "verfy"),
    "no verifier": ({"verify": ...}, "verify"),
    "no form": ({"verify": {}}, "exactly one form"),
    "two forms": ({"verify": {"script": "x", "answer_file": "a", "equals": "b"}}, "exactly one form"),
    "half a form": ({"verify": {"answer_file": "a"}}, "exactly one form"),
    "no test.sh": ({"verify": {"files": {"x.sh": "true"}}}, "no tests/test.sh"),
    "no name": ({"name": ""}, "name is empty"),
    "outside": ({"files": {"../x": "y"}}, "leads elsewhere"),
    "absolute": ({"files": {"/etc/x": "y"}}, "leads elsewhere"),
    "outside answer": ({"verify": {"answer_file": "../a", "equals": "b"}}, "leads elsewhere"),
    "bad base64": ({"files": {"x": {"base64": "?"}}}, "not base64"),
    "base64 not in ASCII": ({"files": {"x": {"base64": "YWJj\u00e9"}}}, "not base64"),
    "no content": ({"files": {"x": {}}}, "text or base64"),
    "bad limit": ({"verify_s": 0}, "verify_s is 0"),
    "endless": ({"agent_s": float("inf")}, "agent_s is inf"),
    "no time": ({"verify_s": float("nan")}, "verify_s is nan"),
    "more memory": ({"memory_mb": 10**30}, "memory_mb is 1e"),
    "no minimum": ({"min_reward": float("nan")}, "min_reward is nan"),
    "low minimum": ({"min_reward": -1e300}, "min_reward is -1e"),
    "relative workdir": ({"workdir": "app"}, "workdir"),
    "too large": ({"files": {"x": "a" * (33 << 20)}}, "33 MiB"),
    "no workdir": ({"workdir": "/a\0b"}, "is no path"),
    "long workdir": ({"workdir": "/" + "a" * 256}, "is too long"),
    **{
        f"workdir {work}": ({"workdir": work}, "is ours or the system's; name a folder of its own")
        for work in RESERVED
    },
    "file and folder": (
        {"files": {"a": "x", "a/b": "y"}},
        "of its files 'a' is a file and the folder of another",
    ),
    "one file twice": ({"files": {"a": "x", "./a": "y"}}, "of its files two are 'a'"),
    "test and folder": (
        {"verify": {"files": {"test.sh": "", "test.sh/x": ""}}},
        "of its tests 'test.sh' is a file",
    ),
    "long name": ({"files": {"ä" * 128: "x"}}, "of its files .* is too long"),
    "long path": (
        {"verify": {"files": {"test.sh": "", "a/" * 1024 + "b": ""}}},
        "of its tests .* is too long",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_LINES)
def test_a_wrong_line_is_told_what_is_wrong(mistake: str) -> None:
    changes, what = WRONG_LINES[mistake]
    with pytest.raises(TaskError, match=what):
        one(**changes)


@pytest.mark.parametrize(
    ("stated", "workdir"), [("/app/", "/app"), ("//app", "/app"), ("/app/../srv/.", "/srv"), ("/a b", "/a b")]
)
def test_a_work_folder_is_taken_as_images_take_it(stated: str, workdir: str) -> None:
    """Else links within ``/app/`` would not be seen to stay in it."""
    assert one(workdir=stated).input.workdir == workdir


def test_two_tasks_of_one_name_are_an_error() -> None:
    with pytest.raises(TaskError, match="two tasks are named 'copy-7'"):
        load.from_lines([line(), line(instruction="another")])


def test_the_digest_covers_what_moves_a_reward(folder: Path) -> None:
    (before,) = load.load(folder)
    for path in ("instruction.md", "environment/data/seed.txt", "tests/test.sh", "solution/solve.sh"):
        text = (folder / path).read_text()
        (folder / path).write_text(text + "# more\n")
        assert load.load(folder)[0].digest != before.digest
        (folder / path).write_text(text)
    (folder / "tests/test.sh").chmod(0o700)
    assert load.load(folder)[0].digest == before.digest  # executable is executable
    assert one().digest == one(split="test", metadata={"a": 1}).digest
    assert one().digest != one(agent_s=5).digest


def test_a_work_folder_is_asked_of_new_tasks_only(folder: Path) -> None:
    """Runs may be under way on one that was registered before."""
    (folder / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /opt\n")
    given = line(workdir="/opt")
    for known in (lines.read_line(given, "here", known=True), harbor.read_folder(folder, known=True)):
        row = {"name": known.name, "path": known.path, "definition": known.definition, "digest": known.digest}
        assert load.from_row(row).digest == known.digest
    for refused in (lambda: load.from_lines([line(workdir="/opt")]), lambda: load.load(folder)):
        with pytest.raises(TaskError, match="work folder '/opt'"):
            refused()


def test_a_stored_row_gives_the_task_back(folder: Path) -> None:
    for task in (*load.load(folder), one()):
        row = {
            "name": task.name,
            "path": task.path,
            "definition": json.loads(json.dumps(task.definition, default=str)),
            "digest": task.digest,
        }
        assert load.from_row(row).digest == task.digest
    (folder / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    row["path"], row["name"] = str(folder), "hello"
    with pytest.raises(TaskError, match="changed since it was registered"):
        load.from_row(row)
    with pytest.raises(TaskError, match="folder is gone"):
        load.from_row(row | {"path": str(folder / "away")})


def test_the_verifier_tar_is_plain_and_deterministic(folder: Path) -> None:
    (task,) = load.load(folder)
    assert task.verifier_tar == load.load(folder)[0].verifier_tar
    with tarfile.open(fileobj=io.BytesIO(task.verifier_tar)) as tar:
        assert [(m.name, m.mode, m.uid, m.mtime) for m in tar] == [
            ("helper.py", 0o644, 0, 0),
            ("test.sh", 0o755, 0, 0),
        ]


def run(task: Task, root: Path, script: str) -> str:
    """What the runner does, without a sandbox: files, script in the agent's place, verifier."""
    work, tests, logs = root / "work", root / "tests", root / "logs"
    for place, files in ((work, task.files), (tests, task.tests)):
        for file in files:
            (place / file.path).parent.mkdir(parents=True, exist_ok=True)
            (place / file.path).write_bytes(file.content)
            (place / file.path).chmod(file.mode)
    logs.mkdir()
    agent = subprocess.run(["bash", "-s"], input=script, text=True, cwd=work, timeout=30, capture_output=True)
    assert agent.returncode == 0, agent.stderr
    env = {"PATH": "/usr/bin:/bin", "FORGE_TESTS": str(tests), "FORGE_LOGS": str(logs)}
    subprocess.run(["bash", str(tests / "test.sh")], cwd=work, env=env, timeout=30, check=True)
    return (logs / "reward.txt").read_text()


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("plum", "1\n"),
        ("plum  \n\n", "1\n"),
        ("plum\r\n", "1\n"),
        ("Plum", "0\n"),
        ("a plum", "0\n"),
        ("", "0\n"),
        (None, "0\n"),
    ],
)
def test_an_answer_file_is_compared(tmp_path: Path, answer: str | None, reward: str) -> None:
    packed = base64.b64encode((answer or "").encode()).decode()
    script = "exit 0\n" if answer is None else f"echo {packed} | base64 -d > answer.txt\n"
    assert run(one(), tmp_path, script) == reward


def test_the_gold_of_an_answer_follows_from_it(tmp_path: Path) -> None:
    task = one(verify={"answer_file": "deep/it's.txt", "equals": "two words\n  and 'quotes' $HOME"})
    assert task.gold_script is not None
    assert run(task, tmp_path, task.gold_script) == "1\n"


def test_a_given_gold_and_script_are_used(tmp_path: Path) -> None:
    task = one(
        gold="tr a-z A-Z < word.txt > answer.txt\n",
        verify={"script": 'grep -c PLUM answer.txt > "$FORGE_LOGS/reward.txt"\n'},
    )
    assert task.gold_script is not None
    assert run(task, tmp_path, task.gold_script) == "1\n"
    assert one(verify={"script": "true"}).gold_script is None
