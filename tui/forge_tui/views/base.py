"""What every screen of the main window is: a part of it that reads the server now and then, and shows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from textual.containers import Vertical

from forge_server.client.schemas import EventView

if TYPE_CHECKING:
    from forge_tui.app import ForgeApp


class View(Vertical):
    """``load`` asks and shows; it is called when the screen opens, every ``PERIOD`` seconds while it is open, and when
    ``stale`` was set. ``show`` paints what is known."""

    TITLE: ClassVar[str] = ""
    PERIOD: ClassVar[float] = 5.0

    stale = True

    @property
    def forge(self) -> "ForgeApp":
        return cast("ForgeApp", self.app)

    async def load(self) -> None:
        """Raises ForgeError."""

    def show(self) -> None: ...

    def heard(self, events: Sequence[EventView]) -> None:
        """Called at most four times a second while the screen is open, with what has happened."""

    def begin(self) -> None:
        """The screen was opened: give the focus to what takes keys."""

    def forget(self) -> None:
        """Another run is looked at, or events were lost."""
        self.stale = True

    def act(self, **filters: Any) -> None:
        """Another screen wants this one to show something in particular."""
