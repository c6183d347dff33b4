"""The wheel: it is complete, its base install is light, and its commands work away from the checkout."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from forge_server.assets import STAGED

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 300


def run(*command: str | Path, cwd: Path) -> str:
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("FORGE_", "PYTHON"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` folder of a fresh environment with the wheel, and this one's packages but not its checkout."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    place = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=folder).strip()
    (Path(place) / "packages.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin"


def test_the_wheel_is_complete_and_holds_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    sources = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "forge_server").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert sources <= names
    for asset in ("migrations", "harness_specs", "k8s_templates"):
        for file in (ROOT / asset).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert f"forge_server/_assets/{file.relative_to(ROOT).as_posix()}" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} <= {"forge_server", "forge_tui"}
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]
    base = [
        row.split()[1].lower()
        for row in metadata.splitlines()
        if row.startswith("Requires-Dist") and "extra ==" not in row
    ]
    for heavy in ("torch", "vllm", "verl", "ray", "transformers", "psycopg"):
        assert not [name for name in base if name.startswith(heavy)], heavy


def test_commands_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    forge = installed / "forge-server"
    assert "Usage" in run(forge, "--help", cwd=tmp_path)
    specs = json.loads(run(forge, "harness", "list", "--json", cwd=tmp_path))
    assert {"react", "mini-swe-agent"} <= {spec["name"] for spec in specs}
    run(forge, "init", cwd=tmp_path)
    assert "schema is at" in run(forge, "db", "upgrade", cwd=tmp_path)
    assert json.loads(run(forge, "run", "list", "--json", cwd=tmp_path)) == []


def test_assets_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = f"""
import pathlib, forge_server
from forge_server import assets
from forge_server.domain.errors import NotFound
from forge_server.runner.pack import pack
from forge_server.store import schema
place = pathlib.Path(forge_server.__file__).parent
assert {str(ROOT)!r} not in str(place)
for name in ("migrations", "harness_specs"):
    assert place in assets.folder(name).parents
try:
    assets.folder("nothing")
except NotFound as error:
    assert "reinstall" in str(error)
else:
    raise AssertionError
for name in {STAGED!r}:
    into = assets.stage_package(name, pathlib.Path(name))
    assert list((into / "forge_server" / name).glob("*.py"))
pack(pathlib.Path("packed"))
assert (pathlib.Path("packed") / "runner.pyz").stat().st_size
print(schema.head())
"""
    assert run(installed / "python", "-c", code, cwd=tmp_path).strip()
