"""Finds and reads harness specs: those that ship with forge-server, then those of the user's folders.

A mistake in a spec is a SpecError that names the file, the line, and for an unknown key the nearest known
one.
"""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import yaml

from forge_server.domain.errors import NotFound, SpecError
from forge_server.harness.spec import FileSpec, Spec

FILE = "spec.yaml"
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>[^`]*)`(?: - at `(?P<at>[^`]*)`)?")
_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<at>[^`]*)`)?$", re.DOTALL)


def load_all(folders: Iterable[Path]) -> dict[str, Spec]:
    """Every spec of ``FOLDER/NAME/spec.yaml``, by name; of equal names the later folder's counts.

    Raises SpecError for a spec that is wrong and NotFound for a folder that is missing.
    """
    specs: dict[str, Spec] = {}
    for folder in folders:
        if not folder.is_dir():
            raise NotFound("there is no such folder", where=str(folder), mend="mend [harness] paths")
        for file in sorted(folder.glob(f"*/{FILE}")):
            spec = load(file)
            specs[spec.name] = spec
    return specs


def load(file: Path) -> Spec:
    """The spec in ``file``, the contents of its ``source`` files filled in. Raises SpecError."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot be read ({error})", where=str(file), mend="check the path") from None
    spec = parse(text, where=str(file))
    if spec.name != file.parent.name:
        raise SpecError(
            f"name is {spec.name!r} but the folder is {file.parent.name!r}",
            where=str(file),
            mend="give both the same name",
        )
    return msgspec.structs.replace(spec, files=tuple(_with_content(f, file) for f in spec.files))


def parse(text: str, *, where: str) -> Spec:
    """The spec in YAML ``text``; ``where`` names it in errors. Raises SpecError."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SpecError(
            f"not YAML: {error.problem}", where=f"{where}:{line}", mend="mend that line"
        ) from None
    except yaml.YAMLError as error:
        raise SpecError(f"not YAML: {error}", where=where, mend="mend it") from None
    if not isinstance(node, yaml.MappingNode):
        raise SpecError("a spec is a mapping of keys to values", where=where, mend="see `harness show react`")
    _refuse_repeated_keys(node, where)
    try:
        return msgspec.convert(data, Spec)
    except msgspec.ValidationError as error:
        raise _explain(str(error), node, where) from None


def _with_content(file: FileSpec, spec_file: Path) -> FileSpec:
    if not file.source:
        return file
    source = spec_file.parent / file.source
    try:
        return msgspec.structs.replace(file, content=source.read_text(), source="")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"source {file.source!r} of file {file.path!r} cannot be read ({error})",
            where=str(spec_file),
            mend="put the file beside the spec",
        ) from None


def _explain(message: str, root: yaml.MappingNode, where: str) -> SpecError:
    """A SpecError with line and mend from what msgspec said."""
    if match := _UNKNOWN.search(message):
        path, key = _path(match["at"]), match["key"]
        known = _keys_at(path)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
        mend = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return SpecError(f"unknown key {key!r}", where=f"{where}:{_line(root, [*path, key])}", mend=mend)
    match = _AT.match(message)
    assert match is not None
    path = _path(match["at"])
    what = match["what"]
    name = ".".join(str(p) for p in path)
    text = f"{name}: {what[:1].lower()}{what[1:]}" if name else what[:1].lower() + what[1:]
    return SpecError(text, where=f"{where}:{_line(root, path)}", mend="mend that line")


def _path(at: str | None) -> list[str | int]:
    """``$.files[0].path`` as ``["files", 0, "path"]``; what follows ``[...]`` of a mapping is not known."""
    parts: list[str | int] = []
    for name, index in re.findall(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]", at or ""):
        if index == "...":
            break
        parts.append(name or int(index))
    return parts


def _keys_at(path: list[str | int]) -> list[str]:
    """The keys that the mapping at ``path`` may have."""
    kind: Any = Spec
    for part in path:
        if isinstance(part, str):
            kind = get_type_hints(kind)[part]
        kind = next((a for a in (kind, *get_args(kind)) if _is_struct(a)), kind)
    return list(kind.__struct_fields__) if _is_struct(kind) else []


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _line(node: yaml.Node, path: list[str | int]) -> int:
    """The line, from 1, of the key or item at ``path``, or of the innermost that exists."""
    line: int = node.start_mark.line + 1
    for part in path:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        elif isinstance(node, yaml.MappingNode):
            found = [(k, v) for k, v in node.value if k.value == part]
            if not found:
                break
            key, node = found[0]
            line = key.start_mark.line + 1
    return line


def _refuse_repeated_keys(node: yaml.Node, where: str) -> None:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(item, where)
    elif isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise SpecError(
                    f"key {key.value!r} is given twice", where=f"{where}:{line}", mend="remove one"
                )
            seen.add(key.value)
            _refuse_repeated_keys(value, where)
