"""Draws the explanatory pictures of docs/concepts.md, which show no measurements: `python
docs/images/concepts/draw.py`."""

from __future__ import annotations

from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET, DRAFT, ACCEPTED, REJECTED, INK, PALE = "#2f5d8a", "#c8701a", "#2b7d4f", "#9a9a9a", "#222222", "#f4f4f2"


def picture(width: int, height: int, *parts: str) -> str:
    """Returns an SVG with a light background, so that it is also readable on dark pages."""
    arrow = (
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" '
            'font-family="DejaVu Sans, Verdana, sans-serif" font-size="14">',
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
            arrow,
            *parts,
            "</svg>\n",
        ]
    )


def text(
    x: float, y: float, words: str, colour: str = INK, size: int = 14, anchor: str = "middle", **more: str
) -> str:
    options = "".join(f' {name}="{value}"' for name, value in more.items())
    style = f'fill="{colour}" font-size="{size}" text-anchor="{anchor}"{options}'
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, words: str, colour: str, note: str = "") -> str:
    """Draws a filled box with a title and, below the title, an optional smaller line."""
    middle = y + height / 2 + (-3 if note else 5)
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{colour}"/>',
        text(x + width / 2, middle, words, "#ffffff", **{"font-weight": "bold"}),
    ]
    if note:
        parts.append(text(x + width / 2, middle + 18, note, "#ffffff", 12))
    return "".join(parts)


def token(x: float, y: float, word: str, colour: str, filled: bool = True, note: str = "", width: float = 78) -> str:
    """Draws a token centred at x and y, filled if it is part of the text."""
    fill, ink = (colour, "#ffffff") if filled else ("#ffffff", colour)
    dashes = "" if filled else ' stroke-dasharray="4 3"'
    parts = [
        f'<rect x="{x - width / 2}" y="{y - 15}" width="{width}" height="30" rx="15" fill="{fill}" '
        f'stroke="{colour}" stroke-width="2"{dashes}/>',
        text(x, y + 5, word, ink),
    ]
    if note:
        parts.append(text(x, y + 30, note, colour, 12))
    return "".join(parts)


def line(x1: float, y1: float, x2: float, y2: float, colour: str = INK, width: float = 2, arrow: bool = True) -> str:
    end = ' marker-end="url(#a)"' if arrow else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="{width}"{end}/>'


def a_round() -> str:
    """Draws one round, from text to draft tree to target and back."""
    return picture(
        820,
        190,
        box(20, 20, 150, 66, "text so far", TARGET, "by the target"),
        line(170, 53, 246, 53),
        text(208, 42, "feature", INK, 12),
        box(250, 20, 160, 66, "draft head", DRAFT, "a small step a level"),
        line(410, 53, 476, 53),
        text(443, 42, "guesses", INK, 12),
        box(480, 20, 110, 66, "draft tree", DRAFT, "N nodes"),
        line(590, 53, 666, 53),
        text(628, 42, "all at once", INK, 12),
        box(670, 20, 130, 66, "target", TARGET, "one forward"),
        f'<path d="M 735 86 V 160 H 95 V 92" fill="none" stroke="{INK}" stroke-width="2" marker-end="url(#a)"/>',
        text(415, 128, "keeps the path it would have taken, and adds a token of its own, the bonus token;", INK, 13),
        text(415, 148, "the feature that the next round starts from was computed by the way", INK, 13),
    )


def a_tree() -> str:
    """Draws a draft tree: root, guesses by level, the accepted path and the bonus token."""
    places = {
        "of": (90, 150),
        "robotics": (260, 90), "motion": (260, 210),
        "are": (430, 60), "were": (430, 120), "state": (430, 210),
        "that": (600, 30), "a": (600, 90),
    }  # fmt: skip
    edges = [("of", "robotics", True), ("of", "motion", False), ("robotics", "are", True), ("robotics", "were", False),
             ("motion", "state", False), ("are", "that", False), ("are", "a", False)]  # fmt: skip
    parts = []
    for above, below, kept in edges:
        (x1, y1), (x2, y2) = places[above], places[below]
        parts.append(line(x1 + 40, y1, x2 - 41, y2, ACCEPTED if kept else REJECTED, 3 if kept else 1.5, arrow=False))
    parts.append(line(470, 60, 559, 150, TARGET, 3, arrow=False))
    notes = {
        "robotics": "0.7",
        "motion": "0.2",
        "are": "0.6",
        "were": "0.2",
        "state": "0.5",
        "that": "0.4",
        "a": "0.3",
    }
    for word, (x, y) in places.items():
        if word == "of":
            parts.append(token(x, y, word, TARGET, note="root: the target's"))
        else:
            kept = word in ("robotics", "are")
            parts.append(token(x, y, word, ACCEPTED if kept else REJECTED, kept, notes[word]))
    parts.append(token(600, 150, "as", TARGET, note="bonus token"))
    for x, words in ((260, "draft position 1"), (430, "draft position 2"), (600, "draft position 3")):
        parts.append(text(x, 282, words, INK, 13))
    legend = [(690, 60, "accepted", ACCEPTED, True), (690, 110, "rejected", REJECTED, False),
              (690, 160, "the target's", TARGET, True)]  # fmt: skip
    parts += [
        f'<rect x="{x}" y="{y - 8}" width="22" height="16" rx="8" fill="{colour if filled else "#ffffff"}" '
        f'stroke="{colour}" stroke-width="2"/>' + text(x + 30, y + 5, words, INK, 13, "start")
        for x, y, words, colour, filled in legend
    ]
    return picture(820, 300, *parts)


def forwards() -> str:
    """Draws the forwards for the same twelve tokens, with plain decoding and in rounds."""
    parts = [text(20, 40, "plain decoding: a forward of the target for every token", INK, 14, "start")]
    for i in range(12):
        parts.append(f'<rect x="{20 + i * 65}" y="55" width="58" height="30" rx="5" fill="{TARGET}"/>')
        parts.append(text(49 + i * 65, 75, str(i + 1), "#ffffff"))
    parts.append(text(20, 130, "with draft heads: four rounds that accept 3, 1, 0 and 4 tokens", INK, 14, "start"))
    at, number = 20, 1
    for accepted in (3, 1, 0, 4):
        parts.append(f'<rect x="{at}" y="145" width="26" height="30" rx="5" fill="{DRAFT}"/>')
        parts.append(f'<rect x="{at + 28}" y="145" width="62" height="30" rx="5" fill="{TARGET}"/>')
        said = ", ".join(str(n) for n in range(number, number + accepted + 1))
        parts.append(text(at + 46, 196, said, ACCEPTED if accepted else INK, 13))
        at, number = at + 102, number + accepted + 1
    parts += [
        f'<rect x="470" y="150" width="22" height="16" rx="4" fill="{DRAFT}"/>'
        + text(500, 163, "drafting", INK, 13, "start"),
        f'<rect x="590" y="150" width="22" height="16" rx="4" fill="{TARGET}"/>'
        + text(620, 163, "a forward of the target", INK, 13, "start"),
        text(470, 196, "tau = 12 tokens / 4 rounds = 3", INK, 14, "start", **{"font-weight": "bold"}),
    ]
    return picture(820, 220, *parts)


def positions() -> str:
    """Draws which part of a draft head drafts which position, and what it reads."""
    rows = [
        ("EAGLE, HASS", ["layer"] * 4, "the same layer again, on its own last output"),
        ("POSS-2", ["specialist 1"] * 2 + ["specialist 2"] * 2, "a layer for every two positions"),
        ("Medusa", [f"MLP {i}" for i in range(1, 5)], "all from the same feature, blind to each other"),
        ("DFlash", ["slot 1", "slot 2", "slot 3", "slot 4"], "one forward of a block fills all slots"),
    ]
    colours = {"layer": DRAFT, "specialist 1": DRAFT, "specialist 2": "#8a4fa0"}
    parts = [text(190 + i * 110, 28, f"position {i + 1}", INK, 13) for i in range(4)]
    for row, (name, drafters, said) in enumerate(rows):
        y = 62 + row * 62
        parts.append(text(16, y + 5, name, INK, 14, "start", **{"font-weight": "bold"}))
        chained = row < 2
        for i, drafter in enumerate(drafters):
            x, colour = 190 + i * 110, colours.get(drafter, "#3b7f8c" if row == 2 else "#66788a")
            parts.append(
                f'<rect x="{x - 46}" y="{y - 16}" width="92" height="32" rx="6" fill="{colour}"/>'
                + text(x, y + 5, drafter, "#ffffff", 12)
            )
            if chained and i < 3:
                parts.append(line(x + 46, y, x + 63, y, INK, 1.5))
        parts.append(text(586, y + 5, said, INK, 12, "start"))
    return picture(900, 290, *parts)


PICTURES = {"round": a_round, "tree": a_tree, "forwards": forwards, "positions": positions}


def main() -> None:
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
