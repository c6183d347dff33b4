"""Makes the ``/forge`` tree: a Python, our programs and a harness, which run in any Linux image, whatever is in it.

It is Debian's own Python, and its bash for verifiers and harnesses that count on one, with the libraries and the loader
that they need; every program is told to load them from the tree and nowhere else, so that neither the image's libc
(musl, or none) nor its Python matters. Made once, when an image is built; needs ``patchelf``, ``ldconfig`` and the
system's ``python3``.

    python -m forge_server.runner.tree FOLDER [ENVIRONMENT]

FOLDER is called ``forge`` and will be seen as ``/forge``. ENVIRONMENT, a harness's as ``forge-server env create`` makes
it, is copied to ``/forge/env`` and made to work there: its programs (``node``) are told where their loader is, its
scripts where their interpreter is, and a virtual environment whose it is.

A program is told in place, byte for byte, since some (those that Bun packs) do not survive any other change. It cannot
be told so where its libraries are; so the loader looks them up in an index of the tree's own instead of the image's.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from forge_server.runner.pack import pack

PLACE = "/forge"
SYSTEM_PYTHON = Path("/usr/bin/python3")
BASH = Path("/bin/bash")
LOADER = "/forge/ld.so"
"""A short name of the loader, which fits wherever another was."""
_INDEX, _OWN_INDEX = b"/etc/ld.so.cache\0", b"/forge/lib/cache\0"  # of equal length
_LEFT_OUT = (
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "lib2to3",
    "ensurepip",
    "distutils",
    "turtledemo",
    "__pycache__",
    "config-*",
    "site-packages",
    "dist-packages",
)
_LIBRARY = re.compile(r"(?P<name>\S+) => (?P<path>/\S+)|(?P<loader>/\S*ld-linux\S*)")
_SHEBANG = re.compile(rb"#![ \t]*(?:/usr/bin/env[ \t]+(?:-S[ \t]+)?)?(\S+)")


def make(into: Path, environment: Path | None = None) -> None:
    """Write the tree, which must not be there yet."""
    python = SYSTEM_PYTHON.resolve()
    version = python.name  # python3.11
    (into / "bin").mkdir(parents=True)
    (into / "lib").mkdir()
    shutil.copy2(python, into / "bin" / "python3")
    _copy_library(Path("/usr/lib") / version, into / "lib" / version)
    shutil.copy2(BASH, into / "bin" / "bash")
    programs = [into / "bin" / "python3", into / "bin" / "bash"]
    for file in (*programs, *(into / "lib" / version / "lib-dynload").glob("*.so")):
        _bring_libraries(file, into / "lib", within=into)
    for program in programs:
        # these start in whatever environment the image has, which may name other libraries first
        _patch("--set-interpreter", LOADER, "--force-rpath", "--set-rpath", f"{PLACE}/lib", program)
    if environment is not None:
        _bring_environment(environment.absolute(), into, version)
    _index_libraries(into)
    pack(into)


def _bring_environment(source: Path, into: Path, version: str) -> None:
    env = into / "env"
    shutil.copytree(source, env, symlinks=True)
    if (env / "pyvenv.cfg").exists():
        _bring_venv(source, into, version)
    for file in _files(env):
        if _is_program(file):
            _bring_libraries(file, into / "lib", within=env)
            _name_loader(file)
        elif os.access(file, os.X_OK):
            _mend_script(file, source, env)
    for link in [path for path in env.rglob("*") if path.is_symlink()]:
        target = os.readlink(link)
        if target.startswith(f"{source}/"):
            _link(link, f"{PLACE}/env{target.removeprefix(str(source))}")


def _bring_venv(source: Path, into: Path, version: str) -> None:
    """A virtual environment borrows an installation's interpreter and standard library: the tree's own where the
    version is the same, else that installation comes along."""
    env = into / "env"
    base = Path(os.path.realpath(source / "bin" / "python"))
    home, interpreter = f"{PLACE}/bin", "python3"
    if base.name != version:
        home, interpreter = f"{PLACE}/env/base/bin", base.name
        (env / "base" / "bin").mkdir(parents=True)
        shutil.copy2(base, env / "base" / "bin")
        _copy_library(base.parents[1] / "lib" / base.name, env / "base" / "lib" / base.name)
    for link in (env / "bin").glob("python*"):
        if link.is_symlink():
            _link(link, f"{home}/{interpreter}")
    lines = (env / "pyvenv.cfg").read_text().splitlines()
    kept = [line for line in lines if line.split(" ")[0] not in ("home", "executable", "command")]
    (env / "pyvenv.cfg").write_text("\n".join([f"home = {home}", *kept]) + "\n")


def _copy_library(source: Path, target: Path) -> None:
    """A standard library with its byte code, which nobody could write later."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    python = source.parents[1] / "bin" / source.name
    compiling = ["-I", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    subprocess.run([python, *compiling, target], check=True)


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            if path.is_file() and not path.is_symlink():
                yield path


def _head(file: Path, size: int) -> bytes:
    with file.open("rb") as opened:
        return opened.read(size)


def _is_program(file: Path) -> bool:
    """Whether it is a program or library of this machine's kind."""
    wanted, found = _head(SYSTEM_PYTHON, 20), _head(file, 20)
    return found[:6] == wanted[:6] and found[18:20] == wanted[18:20]


def _bring_libraries(file: Path, lib: Path, *, within: Path) -> None:
    """Copy into ``lib`` what a program or library loads from outside ``within``."""
    # of static programs and those for musl it lists nothing
    listed = subprocess.run(["ldd", file], capture_output=True, text=True).stdout
    for found in _LIBRARY.finditer(listed):
        path = Path(found["path"] or found["loader"])
        if not path.is_relative_to(within) and not (lib / path.name).exists():
            shutil.copy2(path.resolve(), lib / path.name)


def _name_loader(file: Path) -> None:
    """Have a program of glibc's name our loader."""
    asked = subprocess.run(["patchelf", "--print-interpreter", file], capture_output=True, text=True)
    loader = asked.stdout.strip()
    if asked.returncode != 0 or "ld-linux" not in loader:
        return
    stat = file.stat()
    file.chmod(stat.st_mode | 0o200)
    with file.open("r+b") as opened:
        old = loader.encode() + b"\0"
        opened.seek(opened.read(1 << 20).index(old))
        opened.write(LOADER.encode().ljust(len(old), b"\0"))
    file.chmod(stat.st_mode)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _index_libraries(into: Path) -> None:
    (loader,) = (into / "lib").glob("ld-linux*")
    (into / "ld.so").symlink_to(f"lib/{loader.name}")
    data = loader.read_bytes()
    assert data.count(_INDEX) == 1, loader
    loader.write_bytes(data.replace(_INDEX, _OWN_INDEX))
    places = into / "lib" / "places"
    places.write_text(f"{PLACE}/lib\n")
    options = ["-X", "-r", str(into.parent), "-f", f"{PLACE}/lib/places", "-C", f"{PLACE}/lib/cache"]
    subprocess.run(["/sbin/ldconfig", *options], check=True)
    places.unlink()


def _patch(*words: object) -> None:
    subprocess.run(["patchelf", *map(str, words)], check=True)


def _mend_script(file: Path, source: Path, env: Path) -> None:
    """Programs of the environment are called by their place: an image may have no ``/usr/bin/env``."""
    head = _SHEBANG.match(_head(file, 512))
    if head is None:
        return
    called = Path(os.fsdecode(head[1]))
    if called.is_absolute() and not called.is_relative_to(source):
        return
    name = called.name
    if not os.path.lexists(env / "bin" / name):
        return
    stat = file.stat()
    file.write_bytes(f"#!{PLACE}/env/bin/{name}".encode() + file.read_bytes()[head.end() :])
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _link(link: Path, target: str) -> None:
    link.unlink()
    link.symlink_to(target)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
