"""A table that may change many times a second: only lines whose cells changed are painted again.

Rows are slots: the caller hands over all rows in order, the cursor stays with the row's key. Columns give way by
priority when the terminal is narrow, one of them takes what is left.
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from textual import events
from textual.binding import Binding
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from forge_tui import ink
from forge_tui.ink import Line, Span

GAP = 1


class Column(NamedTuple):
    """``width`` cells, at least; ``grow``: it takes what is left. The highest ``priority`` goes first when narrow."""

    title: str
    width: int
    align: str = "left"
    priority: int = 0
    grow: bool = False
    sort: str = ""


class Row(NamedTuple):
    key: str
    cells: tuple[Span, ...]


class Grid(ScrollView, can_focus=True):
    """Rows by ``put``."""

    BINDINGS: ClassVar = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "move_page(-1)", "Page up", show=False),
        Binding("pagedown", "move_page(1)", "Page down", show=False),
        Binding("home", "move_to(0)", "First", show=False),
        Binding("end", "move_to(-1)", "Last", show=False),
        Binding("enter", "choose", "Open"),
    ]

    class Chosen(Message):
        """Enter or a click on a row that was under the cursor."""

        def __init__(self, grid: "Grid", key: str) -> None:
            super().__init__()
            self.grid, self.key = grid, key

        @property
        def control(self) -> "Grid":
            return self.grid

    class Moved(Message):
        """The cursor is on another row, the ``index``-th of ``count``."""

        def __init__(self, grid: "Grid", index: int, count: int) -> None:
            super().__init__()
            self.grid, self.index, self.count = grid, index, count

        @property
        def control(self) -> "Grid":
            return self.grid

    class Sorted(Message):
        """A click on a heading that sorts."""

        def __init__(self, grid: "Grid", sort: str) -> None:
            super().__init__()
            self.grid, self.sort = grid, sort

        @property
        def control(self) -> "Grid":
            return self.grid

    def __init__(
        self, columns: Sequence[Column], *, empty: str = "", id: str | None = None, classes: str | None = None
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._columns = tuple(columns)
        self._rows: Sequence[Row] = ()
        self._at: dict[str, int] = {}
        self._widths: tuple[tuple[int, int], ...] = ()  # (column, cells) of those that are shown
        self._empty = empty
        self.sorted_by = ""
        self.descending = True
        self.cursor = 0

    @property
    def key(self) -> str | None:
        """Of the row under the cursor."""
        return self._rows[self.cursor].key if self._rows else None

    @property
    def rows(self) -> Sequence[Row]:
        return self._rows

    def use(self, columns: Sequence[Column]) -> None:
        """Show other columns; the rows must follow."""
        self._columns, self._rows, self._at, self.cursor = tuple(columns), (), {}, 0
        self._lay_out()
        self.refresh()

    def put(self, rows: Sequence[Row], *, empty: str | None = None) -> None:
        """Show these. The cursor follows its row, unless it is on the first: that one shows what is new."""
        chosen = self.key if self.cursor else None
        old, before = self._rows, self.cursor
        self._rows = rows
        self._at = {row.key: index for index, row in enumerate(rows)}
        if empty is not None and empty != self._empty:
            self._empty = empty
            self.refresh()
        cursor = self._at.get(chosen, self.cursor) if chosen is not None else self.cursor
        self.cursor = max(0, min(cursor, len(rows) - 1))
        if len(old) != len(rows):
            self.virtual_size = Size(self.size.width, len(rows) + 1)
        if not old or not rows:
            self.refresh()
            return
        top = self.scroll_offset.y
        if self.cursor != before:
            top += self.cursor - before
            self.scroll_to(y=max(0, top), animate=False, force=True)
            self.refresh()
            return
        for y in range(1, self.size.height):
            index = top + y - 1
            was = old[index] if index < len(old) else None
            now = rows[index] if index < len(rows) else None
            if was != now:
                self.refresh(Region(0, y, self.size.width, 1))

    def change(self, key: str, cells: tuple[Span, ...]) -> None:
        """New cells of one row, if it is shown."""
        index = self._at.get(key)
        if index is None or self._rows[index].cells == cells:
            return
        rows = list(self._rows) if not isinstance(self._rows, list) else self._rows
        rows[index] = Row(key, cells)
        self._rows = rows
        self._repaint(index)

    def heading(self, sort: str, descending: bool) -> None:
        """Mark the column that sorts."""
        if (sort, descending) != (self.sorted_by, self.descending):
            self.sorted_by, self.descending = sort, descending
            self.refresh(Region(0, 0, self.size.width, 1))

    # --- painting

    def render_line(self, y: int) -> Strip:
        width, theme = self.size.width, self.app.theme
        if y == 0:
            return ink.strip(self._heading(), width, theme)
        index = y - 1 + self.scroll_offset.y
        if not self._rows and y == 2:
            return ink.strip([(f"  {self._empty}", "muted")], width, theme)
        if index >= len(self._rows):
            return ink.strip([], width, theme)
        chosen = index == self.cursor
        mark: Span = ("▌" if chosen else " ", "info")
        line: Line = [mark]
        cells = self._rows[index].cells
        for column, cell_width in self._widths:
            text, style = cells[column]
            line.append((ink.fit(ink.plain(text), cell_width, self._columns[column].align), style))
            line.append((" " * GAP, ""))
        return ink.strip(line, width, theme, chosen=chosen)

    def _heading(self) -> Line:
        line: Line = [(" ", "")]
        for column, width in self._widths:
            found = self._columns[column]
            title = found.title
            if found.sort and found.sort == self.sorted_by:
                title += "▼" if self.descending else "▲"
            line.append((ink.fit(title, width, found.align), "muted bold underline"))
            line.append((" " * GAP, ""))
        return line

    def on_resize(self, event: events.Resize) -> None:
        self.virtual_size = Size(self.size.width, len(self._rows) + 1)
        self._lay_out()
        self.refresh()

    def _lay_out(self) -> None:
        shown = list(range(len(self._columns)))
        room = self.size.width - 2
        while len(shown) > 1 and sum(self._columns[i].width + GAP for i in shown) > room:
            last = max(shown, key=lambda i: (self._columns[i].priority, i))
            if not self._columns[last].priority:
                break
            shown.remove(last)
        spare = max(0, room - sum(self._columns[i].width + GAP for i in shown))
        growing = [i for i in shown if self._columns[i].grow]
        extra = spare // len(growing) if growing else 0
        self._widths = tuple(
            (i, self._columns[i].width + (extra if self._columns[i].grow else 0)) for i in shown
        )

    def _repaint(self, index: int) -> None:
        y = index - self.scroll_offset.y + 1
        if 1 <= y < self.size.height:
            self.refresh(Region(0, y, self.size.width, 1))

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self.refresh()

    # --- moving

    def go(self, index: int) -> None:
        """Put the cursor on the ``index``-th row."""
        if not self._rows:
            return
        before, self.cursor = self.cursor, max(0, min(index, len(self._rows) - 1))
        self._repaint(before)
        self._repaint(self.cursor)
        page = max(1, self.size.height - 1)
        top = self.scroll_offset.y
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False, force=True)
        elif self.cursor >= top + page:
            self.scroll_to(y=self.cursor - page + 1, animate=False, force=True)
        self.post_message(self.Moved(self, self.cursor, len(self._rows)))

    def action_move(self, by: int) -> None:
        self.go(self.cursor + by)

    def action_move_page(self, by: int) -> None:
        self.go(self.cursor + by * max(1, self.size.height - 2))

    def action_move_to(self, index: int) -> None:
        self.go(index if index >= 0 else len(self._rows) - 1)

    def action_choose(self) -> None:
        if self.key is not None:
            self.post_message(self.Chosen(self, self.key))

    def on_click(self, event: events.Click) -> None:
        if event.y == 0:
            x = 1
            for column, width in self._widths:
                if x <= event.x < x + width and self._columns[column].sort:
                    self.post_message(self.Sorted(self, self._columns[column].sort))
                x += width + GAP
            return
        index = event.y - 1 + self.scroll_offset.y
        if index < len(self._rows):
            again = index == self.cursor
            self.go(index)
            if again:
                self.action_choose()
