"""The documentation says what is: every setting, command, route, error, kind and test that it must name or names."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import click
import msgspec
import pytest

from forge_server.app import running
from forge_server.cli import cli
from forge_server.domain import errors
from forge_server.domain.batches import Drop
from forge_server.domain.classify import NotTrained
from forge_server.domain.outcome import KINDS
from forge_server.domain.run import RunEval, RunSettings
from forge_server.domain.sample import BreakReason
from forge_server.domain.states import Fallback, PolicyState, Untrainable
from forge_server.engine.managed import ManagedSpec, command, environment
from forge_server.harness.spec import (
    PLACEHOLDERS,
    Ends,
    FileSpec,
    Install,
    Limits,
    Normalise,
    Removal,
    SideCall,
    Spec,
    SubAgents,
)
from forge_server.settings import LocalSettings, Section, ServerSettings, Settings
from forge_server.trajectory.attempt import Fault

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
_ROW = re.compile(r"^\| `(?P<key>[^`]+)` \| (?P<default>[^|]+) \|", re.MULTILINE)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def section(text: str, heading: str) -> str:
    """What follows the heading, up to the next one."""
    after = text.partition(f" {heading}\n")[2]
    assert after, f"there is no heading {heading}"
    return re.split(r"^##+ ", after, maxsplit=1, flags=re.MULTILINE)[0]


def toml(value: Any) -> str:
    """A default as the tables write it."""
    if value is msgspec.NODEFAULT:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return "`[]`"
    return f"`{value}`"


def defaults(kind: type[msgspec.Struct]) -> dict[str, str]:
    found = {}
    for field in msgspec.structs.fields(kind):
        made = field.default_factory
        value = field.default if made is msgspec.NODEFAULT else made()  # type: ignore[operator]
        found[field.name] = toml(value)
    return found


SECTIONS = [
    (f"`[{name}]`", kind)
    for name, kind in get_type_hints(Settings).items()
    if isinstance(kind, type) and issubclass(kind, Section)
]


@pytest.mark.parametrize(
    ("heading", "kind"), [*SECTIONS, ("`[[run]]`", RunSettings), ("`[run.eval]`", RunEval)]
)
def test_every_setting_is_told_with_its_default(heading: str, kind: type[msgspec.Struct]) -> None:
    table = section(page("configuration"), heading)
    assert {row["key"]: row["default"].strip() for row in _ROW.finditer(table)} == defaults(kind)


@pytest.mark.parametrize("cpu", [True, False])
def test_an_attached_engine_is_told_to_be_started_as_a_managed_one(cpu: bool) -> None:
    here = Path("x")
    spec = ManagedSpec(
        python=here,
        staged=here,
        folder=here,
        served_model="forge",
        dtype="auto",
        max_model_len=32768,
        max_num_seqs=64,
        cpu=cpu,
        tool_call_parser="hermes",
        reasoning_parser="NAME",
    )
    text = " ".join(
        section(page("configuration"), "An engine of your own: `attach`").replace("\\\n", "").split()
    )
    words = command(spec, Path("MODEL"), 8000)
    line = " ".join(words[words.index("--model") :])
    for flag in re.split(r" (?=--)", line):
        assert flag in text
    told = environment(spec)
    for name in told.keys() - os.environ.keys() - {"PYTHONPATH"}:
        assert f"{name}={told[name]}" in text


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[str]:
    for name, found in group.commands.items():
        if isinstance(found, click.Group):
            yield from commands(found, (*path, name))
        else:
            yield " ".join((*path, name))


def test_every_command_is_told() -> None:
    told = {match[1] for match in re.finditer(r"^\| `forge-server ([^`]+)`", page("commands"), re.MULTILINE)}
    assert told == set(commands(cli))


def test_commands_that_are_shown_exist() -> None:
    known = set(commands(cli))
    groups = {name.split()[0] for name in known if " " in name}
    shown = 0
    for file in PAGES:
        text = file.read_text()
        fences = "\n".join(_FENCE.findall(text))
        inline = "\n".join(re.findall(r"`(forge-server [^`]+)`", text))
        for words in re.findall(r"\bforge-server +([a-z]+(?: +[a-z]+)?)", f"{fences}\n{inline}"):
            first, _, second = words.partition(" ")
            name = f"{first} {second.strip()}" if first in groups else first
            if first in groups and not second:
                continue  # the group as such
            assert name in known, f"{file.name}: forge-server {words}"
            shown += 1
    assert shown > 40


async def test_every_route_is_told(tmp_path: Path) -> None:
    settings = Settings(
        server=ServerSettings(port=0, control_port=0, data_dir=str(tmp_path)),
        local=LocalSettings(min_sandbox="none"),
    )
    async with running(settings) as server:
        control = server.control_app()
        pod = server.pod_app()._otherwise
    told = section(page("api"), "Control listener")
    for route in control.routes:
        path = re.sub(r":\w+}", "}", route.path_format)
        if path.startswith("/schema"):
            continue  # pages of the OpenAPI viewer
        for method in route.methods - {"OPTIONS", "HEAD"}:
            assert f"`{method} {path}`" in told
    told = section(page("api"), "Pod-facing listener")
    for route in pod.routes:
        path = re.sub(r":\w+}", "}", route.path_format)
        for method in route.methods - {"OPTIONS", "HEAD"}:
            assert f"`{method} {path}`" in told


def test_every_problem_type_is_told() -> None:
    table = section(page("api"), "Errors")
    for kind in errors.ForgeError.__subclasses__():
        if kind.__module__ == errors.__name__:
            row = next((line for line in table.splitlines() if f"`{kind.type}`" in line), "")
            assert f"| {kind.status} |" in row, kind.type


def test_every_key_of_a_spec_is_told() -> None:
    text = page("harnesses")
    for kind in (Spec, Install, FileSpec, SideCall, Normalise, Removal, Limits, SubAgents, Ends):
        for name in kind.__struct_fields__:
            assert f"`{name}`" in text, f"{kind.__name__}.{name}"
    for name in PLACEHOLDERS:
        assert f"| `{{{name}}}` |" in text


def test_every_outcome_and_reason_is_told() -> None:
    table = section(page("operations"), "Outcomes")
    for outcome, kinds in KINDS.items():
        row = next(line for line in table.splitlines() if line.startswith(f"| `{outcome}`"))
        assert {kind for kind in kinds if f"`{kind}`" in row} == kinds
    text = page("training")
    for reasons in (Untrainable, NotTrained, Fault, BreakReason, Drop, PolicyState):
        for reason in reasons:
            assert f"`{reason}`" in text, reason
    for reason in Fallback:
        assert f"`{reason}`" in page("splice"), reason


def test_every_metric_is_told() -> None:
    """Names that are written out in the code; those made of a reason or kind are told by their prefix."""
    text = page("training")
    server = (ROOT / "forge_server" / "controller").glob("*.py")
    stats = (ROOT / "forge_server" / "evaluation").glob("*.py")
    names = {
        name
        for file in (*server, *stats)
        for name in re.findall(r'"((?:\w+/\w+|pass_rate))"', file.read_text())
    }
    update = (ROOT / "forge_server" / "trainer" / "update.py").read_text()
    names |= set(re.findall(r'^    "[\w/]+": "(\w+)",$', update, re.MULTILINE))
    names |= set(re.findall(r'^        "(\w+)": float\(', update, re.MULTILINE))
    assert len(names) > 60
    assert {name for name in names if f"`{name}`" not in text} == set()


def anchors(text: str) -> set[str]:
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(text)}


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_links_lead_somewhere(file: Path) -> None:
    for match in _LINK.finditer(file.read_text()):
        target = match["target"]
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (file.parent / path).resolve() if path else file
        assert there.exists(), f"{file.name}: {target}"
        if anchor:
            assert anchor in anchors(there.read_text()), f"{file.name}: {target}"


def test_every_page_is_reached_from_the_readme() -> None:
    linked = {
        (ROOT / match["target"].partition("#")[0]).resolve() for match in _LINK.finditer(PAGES[0].read_text())
    }
    assert set((ROOT / "docs").glob("*.md")) <= linked


def test_invariants_name_tests_and_modules_that_exist() -> None:
    text = page("invariants")
    assert re.findall(r"^\| (I\d+) \|", text, re.MULTILINE) == [f"I{number}" for number in range(1, 13)]
    source = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    known = set(re.findall(r"^(?:async )?def (test_\w+)", source, re.MULTILINE))
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| I")]
    for row in rows:
        tests = re.findall(r"`(test_\w+)`", row[3])
        assert tests and set(tests) <= known, row[0]
        modules = re.findall(r"`([\w/.]+)`", row[2])
        assert modules and all((ROOT / "forge_server" / name).exists() for name in modules), row[0]
