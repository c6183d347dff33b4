"""Colours by role, for a dark and a light terminal. Hues are those of Okabe and Ito, told apart by colour-blind
people, and no role is told by its colour alone: states carry a symbol and a word."""

from functools import lru_cache

from rich.style import Style
from textual.theme import Theme

DARK = {
    "ground": "#11151a",
    "raised": "#1b2129",
    "chosen": "#2b4a66",
    "text": "#dde3ea",
    "muted": "#8b97a5",
    "rule": "#3a4552",
    "good": "#35c69a",
    "warn": "#f2b134",
    "bad": "#ff8a5c",
    "info": "#62b9f2",
    "accent": "#d99bc4",
    "mark": "#f0e442",
    "ramp0": "#14202b",
    "ramp1": "#1d3d5c",
    "ramp2": "#5a4a1a",
    "ramp3": "#7d5212",
    "ramp4": "#a04a1c",
}
LIGHT = {
    "ground": "#fbfbf8",
    "raised": "#eeeeea",
    "chosen": "#bcd9ee",
    "text": "#1c2126",
    "muted": "#5f6872",
    "rule": "#bfc5cb",
    "good": "#00694c",
    "warn": "#8a5700",
    "bad": "#b03a00",
    "info": "#005f99",
    "accent": "#8f3a74",
    "mark": "#6b6200",
    "ramp0": "#f4f8fb",
    "ramp1": "#d6e6f2",
    "ramp2": "#f0dca0",
    "ramp3": "#efb868",
    "ramp4": "#e08a45",
}
RAMP = ("ramp0", "ramp1", "ramp2", "ramp3", "ramp4")
"""From likely to unlikely, as backgrounds: lightness goes one way, so that no hue is needed to read them."""

SERIES = ("info", "warn", "good", "accent", "bad", "mark")
"""For what has no order: versions, agents, parts of a bar."""

THEMES = {"forge-dark": DARK, "forge-light": LIGHT}


def theme(name: str) -> Theme:
    roles = THEMES[name]
    return Theme(
        name=name,
        primary=roles["info"],
        secondary=roles["accent"],
        accent=roles["accent"],
        warning=roles["warn"],
        error=roles["bad"],
        success=roles["good"],
        foreground=roles["text"],
        background=roles["ground"],
        surface=roles["raised"],
        panel=roles["raised"],
        dark=name == "forge-dark",
        variables={
            "footer-key-foreground": roles["info"],
            "footer-background": roles["raised"],
            "block-cursor-text-style": "bold",
        },
    )


@lru_cache(2048)
def style(name: str, theme_name: str, chosen: bool = False) -> Style:
    """Words: a role, ``on ROLE``, and ``bold``, ``underline``, ``italic``, ``reverse``, ``dim``."""
    roles = THEMES.get(theme_name, DARK)
    words = name.split()
    ground = roles["chosen" if chosen else "ground"]
    if "on" in words:
        at = words.index("on")
        ground = roles[words[at + 1]]
        del words[at : at + 2]
    role = next((word for word in words if word in roles), "text")
    found = Style(color=roles[role], bgcolor=ground)
    for word in words:
        if word in ("bold", "underline", "italic", "reverse", "dim"):
            found += Style.parse(word)
    return found
