"""What is asked before something is done: yes or no, a number, one of several."""

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, OptionList
from textual.widgets.option_list import Option


class Confirm(ModalScreen[bool]):
    """Whether to do it. Enter does not: a key that is hit by habit must not end a run."""

    BINDINGS: ClassVar = [Binding("y", "answer(True)", "Yes"), Binding("n,escape", "answer(False)", "No")]

    def __init__(self, title: str, detail: str) -> None:
        super().__init__()
        self._title, self._detail = title, detail

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Label(self._title, classes="title", markup=False)
            yield Label(self._detail, markup=False)
            with Horizontal(classes="buttons"):
                yield Button("No (n)", id="no", compact=True)
                yield Button("Yes (y)", id="yes", variant="warning", compact=True)

    def on_mount(self) -> None:
        self.query_one("#no").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


class Ask(ModalScreen[str | None]):
    """A line of text; with ``number`` only digits."""

    BINDINGS: ClassVar = [Binding("escape", "dismiss(None)", "Leave it")]

    def __init__(self, title: str, detail: str, value: str, *, number: bool = False) -> None:
        super().__init__()
        self._title, self._detail, self._value, self._number = title, detail, value, number

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Label(self._title, classes="title", markup=False)
            yield Label(self._detail, markup=False)
            yield Input(
                self._value,
                type="integer" if self._number else "text",
                max_length=6 if self._number else 1000,
                compact=True,
            )

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)


class Pick(ModalScreen[str | None]):
    """One of (id, text)."""

    BINDINGS: ClassVar = [Binding("escape", "dismiss(None)", "Leave it")]

    def __init__(self, title: str, options: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._title, self._options = title, options

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Label(self._title, classes="title", markup=False)
            yield OptionList(*(Option(text, id=id) for id, text in self._options), markup=False, compact=True)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)


class Help(ModalScreen[None]):
    """All keys."""

    BINDINGS: ClassVar = [Binding("escape,question_mark,q,enter", "dismiss(None)", "Close")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog tall"):
            yield Label("Keys", classes="title")
            yield Label(self._text, markup=False)
