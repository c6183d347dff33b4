"""Packs what runs beside the harness into one folder: ``runner.pyz``, ``react.pyz``, ``stage.py``, ``bring.py``.

Both archives hold source and byte code: the byte code saves its compilation at every start where the
interpreter is the one that packed, the source makes them run on others. This module runs in the
server and is not packed itself.
"""

import io
import os
import py_compile
import tempfile
import zipfile
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_ENTRY = "import sys\nfrom forge_runner.main import main\n\nsys.exit(main())\n"
_REACT_ENTRY = "import sys\nfrom react import main\n\nsys.exit(main())\n"
_TIME = (2020, 1, 1, 0, 0, 0)  # equal sources give equal archives


def pack(into: Path) -> Path:
    """Write the programs into folder ``into`` (each replaced by rename); returns it."""
    into.mkdir(parents=True, exist_ok=True)
    sources = {f"forge_runner/{p.name}": p.read_text() for p in sorted(_HERE.glob("*.py"))}
    for name in ("pack", "tree", "bring"):
        del sources[f"forge_runner/{name}.py"]
    _replace(into / "runner.pyz", _archive({**sources, "__main__.py": _ENTRY}))
    react = (_HERE.parent / "harness" / "react.py").read_text()
    _replace(into / "react.pyz", _archive({"react.py": react, "__main__.py": _REACT_ENTRY}))
    for name in ("stage.py", "bring.py"):
        _replace(into / name, (_HERE / name).read_bytes())
    return into


def _archive(sources: dict[str, str]) -> bytes:
    """A zip file of modules, uncompressed (it is read at every start), each with its byte code beside it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive, tempfile.TemporaryDirectory() as scratch:
        for name, text in sources.items():
            source, code = Path(scratch, "m.py"), Path(scratch, "m.pyc")
            source.write_text(text)
            unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(source), str(code), dfile=name, doraise=True, invalidation_mode=unchecked)
            archive.writestr(zipfile.ZipInfo(name, _TIME), text)
            archive.writestr(zipfile.ZipInfo(name + "c", _TIME), code.read_bytes())
    return out.getvalue()


def _replace(target: Path, data: bytes) -> None:
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    fresh.write_bytes(data)
    fresh.chmod(0o644)
    fresh.rename(target)
