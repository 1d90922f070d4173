"""One colour per method, in every figure, card and page; and one per draft position, for accepted tokens."""

from __future__ import annotations

PLAIN, OTHER = "#7f7f7f", "#4d4d4d"
# What is most often compared differs for the colour-blind, too.
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
# Behind dark text: draft position 1 first, the last one for all that follow.
POSITION_COLOURS = ("#c9ecb8", "#a8e6d2", "#a5d8f5", "#b7c5f9", "#d0bcf7", "#edbdf0", "#fabfd5", "#fccbae")
INK = "#1b1f24"  # of that text
MARKERS, STYLES = ("o", "s", "^", "D", "v", "P"), ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))


def method_colour(method: str) -> str:
    """Of a method; of one that is not known a dark grey, and a light one of plain generation."""
    return PLAIN if method == "plain" else METHOD_COLOURS.get(method, OTHER)


def position_colour(position: int) -> str:
    """Of a draft position, from 1."""
    return POSITION_COLOURS[min(position, len(POSITION_COLOURS)) - 1]


def line_styles(methods: dict[str, str]) -> dict[str, dict[str, object]]:
    """Colour, marker and dashes of every line of a figure: heads of one method share a colour and differ in the rest.

    Args:
        methods: Names of heads and their methods.

    Returns:
        Keywords for matplotlib's `plot`, by name.
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
