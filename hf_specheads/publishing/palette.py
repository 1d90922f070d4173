"""Colours of methods in all figures, cards and pages, and colours of draft positions for accepted tokens."""

from __future__ import annotations

PLAIN, OTHER = "#7f7f7f", "#4d4d4d"
# Methods that are often compared have colours that colour-blind readers can distinguish.
METHOD_COLOURS = {
    "eagle": "#0072b2",
    "hass": "#56b4e9",
    "poss": "#d55e00",
    "poss-lora": "#e69f00",
    "eagle3": "#009e73",
    "poss-eagle3": "#6cc24a",
    "peagle": "#00695c",
    "medusa": "#cc79a7",
    "hydra": "#882255",
    "mtp": "#332288",
    "draft-lm": "#8c564b",
    "lookup": "#b5a300",
    "dflash": "#6a51a3",
    "dflash2": "#9e9ac8",
    "jetspec": "#e7298a",
    "dspark": "#17becf",
    "domino": "#a6761d",
}
# Background colours of accepted tokens, from draft position 1; deeper positions use the last colour.
POSITION_COLOURS = ("#c9ecb8", "#a8e6d2", "#a5d8f5", "#b7c5f9", "#d0bcf7", "#edbdf0", "#fabfd5", "#fccbae")
INK = "#1b1f24"  # colour of text on these backgrounds
MARKERS, STYLES = ("o", "s", "^", "D", "v", "P"), ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))


def method_colour(method: str) -> str:
    """Colour of a method: dark grey if it is unknown, light grey for plain generation."""
    return PLAIN if method == "plain" else METHOD_COLOURS.get(method, OTHER)


def position_colour(position: int) -> str:
    """Colour of a draft position, counted from 1."""
    return POSITION_COLOURS[min(position, len(POSITION_COLOURS)) - 1]


def line_styles(methods: dict[str, str]) -> dict[str, dict[str, object]]:
    """Chooses colour, marker and dashes of every line of a figure.

    Heads of the same method share a colour and differ in marker and dashes.

    Args:
        methods: Methods, by name of the heads.

    Returns:
        Keyword arguments for matplotlib's `plot`, by name of the heads.
    """
    seen: dict[str, int] = {}
    styles = {}
    for name, method in methods.items():
        number = seen[method] = seen.get(method, -1) + 1
        styles[name] = {
            "color": method_colour(method),
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": STYLES[number % len(STYLES)],
        }
    return styles
