"""A widget that shows lines, scrolls, and repaints those that changed."""

from collections.abc import Callable, Sequence

from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from forge_tui import ink
from forge_tui.ink import Line

Draw = Callable[[int, int], Sequence[Line]]
"""From width and height to the lines."""


class Sheet(ScrollView, can_focus=True):
    """``put`` a function that draws; it is called again when the size changes."""

    class Clicked(Message):
        """``row`` and ``column`` of the drawn lines."""

        def __init__(self, sheet: "Sheet", row: int, column: int) -> None:
            super().__init__()
            self.sheet, self.row, self.column = sheet, row, column

        @property
        def control(self) -> "Sheet":
            return self.sheet

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._lines: list[Line] = []
        self._draw: Draw = lambda width, height: []

    @property
    def lines(self) -> list[Line]:
        return self._lines

    def put(self, draw: Draw) -> None:
        self._draw = draw
        self.redraw()

    def redraw(self) -> None:
        if not self.is_mounted or not self.size.width:
            return
        size = self.scrollable_content_region.size
        old, self._lines = self._lines, [list(found) for found in self._draw(size.width, size.height)]
        if len(old) != len(self._lines):
            self.virtual_size = Size(size.width, len(self._lines))
        top = self.scroll_offset.y
        for y in range(top, top + size.height):
            before = old[y] if y < len(old) else None
            now = self._lines[y] if y < len(self._lines) else None
            if before != now:
                self.refresh(Region(0, y - top, size.width, 1))

    def render_line(self, y: int) -> Strip:
        at = y + self.scroll_offset.y
        found = self._lines[at] if at < len(self._lines) else []
        return ink.strip(found, self.size.width, self.app.theme)

    def on_resize(self, event: events.Resize) -> None:
        self._lines = []
        self.redraw()
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        self.post_message(self.Clicked(self, event.y + self.scroll_offset.y, event.x))

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self.refresh()
