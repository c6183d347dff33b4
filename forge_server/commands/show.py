"""Printing: tables for people, JSON for programs."""

import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def rows(items: Sequence[Any], columns: Sequence[str], as_json: bool, *, empty: str) -> None:
    """A list of Structs as a table of ``columns``, or the whole of it as JSON."""
    if as_json:
        print(msgspec.json.encode(list(items)).decode())
        return
    if not items:
        console.print(empty)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for item in items:
        table.add_row(*(text(getattr(item, column), column) for column in columns))
    console.print(table)


def text(value: Any, column: str = "") -> str:
    """A value for the console; brackets in it, such as those of ``[engine]``, are no markup."""
    if value is None:
        return "-"
    if column.endswith("_at") and isinstance(value, float):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return " ".join(f"{k}={text(v)}" for k, v in value.items())
    return escape(str(value))


def one(item: Any, as_json: bool) -> None:
    """One Struct, field by field."""
    if as_json:
        print(msgspec.json.encode(item).decode())
        return
    for name in item.__struct_fields__:
        console.print(f"[bold]{name.replace('_', ' ')}[/]  {text(getattr(item, name), name)}", soft_wrap=True)
