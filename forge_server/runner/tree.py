"""Makes the ``/forge`` tree: a Python and our packed programs that run in any Linux image, whatever is in it.

It is Debian's own Python with the libraries and the loader that it needs; the program is told to load them from the
tree and nowhere else, so that neither the image's libc (musl, or none) nor its Python matters. Made once, when the
runner's image is built; needs ``patchelf`` and the system's ``python3``.

    python -m forge_server.runner.tree FOLDER [PROGRAM...]

Further PROGRAMs (``node``) are told the same: they become runnable wherever the tree is mounted at ``/forge``.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from forge_server.runner.pack import pack

PLACE = "/forge"
_LEFT_OUT = (
    "test",
    "idlelib",
    "tkinter",
    "lib2to3",
    "ensurepip",
    "distutils",
    "turtledemo",
    "__pycache__",
    "config-*",
)
_LIBRARY = re.compile(r"(?P<name>\S+) => (?P<path>/\S+)|(?P<loader>/\S*ld-linux\S*)")


def make(into: Path, programs: list[Path]) -> None:
    """Write the tree into ``into``, which will be seen as ``/forge``; ``programs`` are changed where they lie."""
    python = Path("/usr/bin/python3").resolve()
    version = python.name  # python3.11
    (into / "bin").mkdir(parents=True)
    (into / "lib").mkdir()
    shutil.copy2(python, into / "bin" / "python3")
    stdlib = Path("/usr/lib") / version
    shutil.copytree(stdlib, into / "lib" / version, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    extensions = sorted((into / "lib" / version / "lib-dynload").glob("*.so"))
    loader = ""
    for program in (into / "bin" / "python3", *extensions, *programs):
        loader = _bring(program, into / "lib") or loader
    for program in (into / "bin" / "python3", *programs):
        _patch(
            "--set-interpreter",
            f"{PLACE}/lib/{loader}",
            "--force-rpath",
            "--set-rpath",
            f"{PLACE}/lib",
            program,
        )
    pack(into)


def _bring(program: Path, lib: Path) -> str:
    """Copy the libraries that a program loads, and those that these load; returns the loader's name."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    loader = ""
    for found in _LIBRARY.finditer(listed):
        path = Path(found["path"] or found["loader"])
        if found["loader"]:
            loader = path.name
        if not (lib / path.name).exists():
            shutil.copy2(path.resolve(), lib / path.name)
    return loader


def _patch(*words: object) -> None:
    subprocess.run(["patchelf", *map(str, words)], check=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]])
