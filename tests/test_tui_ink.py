"""Lines, tables, plots and colours of the dashboard, without a server."""

import math

import pytest
from forge_tui import ink, palette, plot, words
from forge_tui.views import talk, tokens
from forge_tui.views.rollouts import parsed
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from forge_server.client.schemas import TokensView

TEXTS = st.text(alphabet=st.characters(codec="utf-8"), max_size=200)


@given(TEXTS)
def test_nothing_that_was_written_reaches_the_terminal_as_a_command(text: str) -> None:
    shown = ink.plain(text)
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in shown)
    assert not set(shown) & set("‎‏‪‫‬‭‮⁦⁧⁨⁩")
    painted = ink.strip([(text, "good")], 40, "forge-dark")
    assert painted.cell_length == 40


WIDE = st.one_of(TEXTS, st.text(alphabet="ab é中字\u0301\u200d\ufe0f❤👩🗑\t\r\n ", max_size=200))


@given(WIDE, st.integers(1, 60))
def test_wrapped_text_keeps_its_words_and_its_width(text: str, width: int) -> None:
    rows = ink.wrap(text, width)
    assert all(cell_len(row) <= max(width, 2) for row in rows)  # a wide character alone may take two
    assert "".join(rows).replace(" ", "") == "".join(map(ink.plain, text.split("\n"))).replace(" ", "")


def wrapped_plainly(text: str, width: int) -> list[str]:
    """What ``ink.wrap`` means; it looks at everything that is left for every row."""
    out = []
    for paragraph in text.split("\n"):
        rest = ink.plain(paragraph)
        while cell_len(rest) > width:
            end = max(at for at in range(len(rest)) if cell_len(rest[:at]) <= width)
            space = rest.rfind(" ", 0, end + 1)
            at = space if space > end // 2 else end
            out.append(rest[:at])
            rest = rest[at:].removeprefix(" ") if at == space else rest[at:]
        out.append(rest)
    return out


@given(WIDE.map(lambda text: text.replace("\u200d", "").replace("\ufe0f", "")), st.integers(2, 30))
def test_text_is_wrapped_as_it_is_plainly_meant(text: str, width: int) -> None:
    assert ink.wrap(text, width) == wrapped_plainly(text, width)


@pytest.mark.parametrize(
    "unit", ["中文字 ", "中文字", "abcdefg ", "abcdefgh", "\rDownloading 12%", "é\u0301", "❤\ufe0f"]
)
def test_a_long_line_is_looked_at_about_once(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    def counting(text: str) -> int:
        nonlocal looked
        looked += len(text)
        return cell_len(text)

    for name in ("cell_len", "get_character_cell_size"):
        monkeypatch.setattr(ink, name, counting)
    text = unit * (20_000 // len(unit))
    assert len(ink.wrap(text, 90)) > 1
    assert looked <= 2 * len(text)


@pytest.mark.parametrize("text", ["中文字 " * 20_000, "word " * 20_000, "line\n" * 20_000, "\tx\n" * 20_000])
def test_of_what_is_folded_away_nothing_is_wrapped(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wrapped = ink.plain, 0

    def counting(paragraph: str) -> str:
        nonlocal wrapped
        wrapped += len(paragraph)
        return plain(paragraph)

    monkeypatch.setattr(ink, "plain", counting)
    short, long = (talk._folded(shown, 90, whole=False) for shown in (text[:9000], text))
    assert wrapped < 10_000
    assert short[:-1] == long[:-1] == ink.wrap(text, 90)[: talk.FOLDED]
    left = "".join(text.split()).removeprefix("".join("".join(long[:-1]).split()))
    assert long[-1] == f"… {plot.number(len(left))} more characters (e unfolds)"


def test_a_text_that_is_folded_says_how_many_lines() -> None:
    lines = [f"line {i}" for i in range(30)]
    assert talk._folded("\n".join(lines), 40, whole=False) == [*lines[:10], "… 20 more lines (e unfolds)"]
    assert (
        talk._folded("\n".join(lines[:11]), 40, whole=False) == lines[:11]
    )  # one line takes the room of the word
    assert talk._folded("\n".join(lines), 40, whole=True) == lines
    unseen = "a\u0301" + "\u0301" * 10_000 + "\n" + "\n".join(lines)  # takes the room of one letter
    assert talk._folded(unseen, 40, whole=False)[-1] == "… 21 more lines (e unfolds)"


@given(TEXTS.map(ink.plain), st.integers(0, 40))
def test_a_cell_is_as_wide_as_its_column(text: str, width: int) -> None:
    assert cell_len(ink.fit(text, width)) == width
    assert ink.width_of(ink.cut([(text, ""), (text, "")], width)) == width


@given(
    st.lists(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)), max_size=300),
    st.integers(12, 100),
    st.integers(3, 12),
)
@example([5e-324], 40, 5)
def test_any_series_is_a_curve(values: list[float | None], width: int, height: int) -> None:
    lines = plot.curve(values, width, height)
    assert len(lines) == height
    assert all(ink.width_of(line) <= max(width, 24) for line in lines)


def test_a_curve_tells_its_ends_whole_and_invents_none() -> None:
    labels = [line[0][0].strip() for line in plot.curve([-0.004128, 0.0007], 28, 3)]
    assert labels == ["7.0e-4", "", "-0.0041"]
    for same in ([0.25], [0.25, 0.25]):
        assert [line[0][0].strip() for line in plot.curve(same, 28, 3)] == ["", "0.25", ""]
    assert [line[0][0].strip() for line in plot.curve([0.0, 0.0], 28, 3, floor=0.0)] == ["", "", "0"]


def test_lines_flow_and_money_is_told() -> None:
    spans = [("one  ", ""), ("two  ", ""), ("three  ", "")]
    assert ink.text_of(ink.flow(spans, 8)) == "one  two\nthree"
    assert all(ink.width_of(line) <= 8 for line in ink.flow(spans, 8))
    assert [words.money(value) for value in (None, 0.0, 0.0012, 0.37, 1234.5)] == [
        "-",
        "0.00",
        "0.0012",
        "0.37",
        "1,234.50",
    ]


def test_a_curve_goes_up_when_its_values_do() -> None:
    lines = ["".join(text for text, _ in line) for line in plot.curve([0, 1, 2, 3], 28, 4)]
    first = [next(i for i, c in enumerate(line[8:]) if c != "⠀") for line in lines]
    assert first == sorted(first, reverse=True)
    assert lines[0].startswith("      3 ") and lines[-1].startswith("      0 ")


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.integers(4, 80))
def test_stacked_parts_fill_their_share(values: list[float], width: int) -> None:
    line = plot.stacked([(value, "info", "█") for value in values], width)
    assert ink.width_of(line) == width
    if sum(values) > 0:
        assert sum(text.count("█") for text, _ in line) == width


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (12, "12"), (1550.4, "1550"), (12345, "12.3k"), (3.2e6, "3.2M"), (0.12345, "0.123"),
     (2e-4, "2.0e-4"), (math.nan, "-")],
)  # fmt: skip
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert plot.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.8, "800ms"),
        (2.34, "2.3s"),
        (59, "59s"),
        (61, "1m01s"),
        (3720, "1h02m"),
        (200_000, "2d07h"),
    ],
)
def test_durations_are_short(seconds: float | None, text: str) -> None:
    assert words.span_of(seconds) == text


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("roles", palette.THEMES.values(), ids=palette.THEMES)
def test_every_colour_can_be_read(roles: dict[str, str]) -> None:
    """WCAG AA for text, on the ground, on a chosen row and on the ramp."""
    for role in ("text", "muted", "good", "warn", "bad", "info", "accent", "mark"):
        assert contrast(roles[role], roles["ground"]) >= 4.5, role
        assert contrast(roles[role], roles["chosen"]) >= 3.0, role
    steps = [luminance(roles[role]) for role in palette.RAMP]
    assert steps in (sorted(steps), sorted(steps, reverse=True))
    for role in palette.RAMP:
        assert contrast(roles["text"], roles[role]) >= 4.5, role


def test_no_state_is_told_by_its_colour_alone() -> None:
    for state in (*words.OUTCOMES, *words.LIVE, "pending", "paused", "live", "rejected"):
        text, _ = words.told(state)
        assert text[0] not in " ·" and state.replace("_", " ") in text
    outcomes = [words.symbol(outcome)[0] for outcome in words.OUTCOMES]
    assert len(set(outcomes)) == len(outcomes)


def test_a_query_is_filters_and_words() -> None:
    assert parsed("task:a kind:b two words x:y") == {"task": "a", "kind": "b", "text": "two words x:y"}
    assert parsed("") == {}


def test_messages_of_any_shape_are_shown() -> None:
    for message in (
        None,
        "text",
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}, 7]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{broken"}}, 3]},
        {"role": "odd", "content": {"deep": [1]}},
    ):
        assert talk.said(message, 40, whole=False)


def test_a_line_break_in_a_token_breaks_the_line() -> None:
    found = TokensView(
        length=4, offset=0, ids=[1, 2, 3, 4], mask=[0, 0, 1, 1], logprobs=[0.0, 0.0, -0.05, -5.0],
        versions=[-1, -1, 3, 4], text=["a", "\n", "b", "\x1b"],
    )  # fmt: skip
    lines, places = tokens.flow(found, 20, "logprob", 0)
    assert places == [0, 0, 1, 1]
    assert ink.text_of(lines) == "a⏎\nb␛"
    assert tokens.versions_of(found) == [3, 4]
    assert [style for _, style in lines[1]] == ["text on ramp1", "text on ramp4"]
