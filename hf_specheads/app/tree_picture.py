"""Draws a draft tree as SVG text: nodes with token and probability, and the accepted path in colour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from ..generation.observer import DraftNode
from ..publishing.palette import INK, position_colour

WIDTH, HEIGHT = 104, 26  # size of a node
STEP_X, STEP_Y, TOP, MARGIN = 146, 34, 34, 12
LONGEST = 11  # largest number of characters of a token that are shown
VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
GREY, FAINT = "#8a939c", "#d5dae0"


def shown(token: str) -> str:
    """Formats a token on one line: white space is made visible, and long tokens are cut."""
    text = "".join(VISIBLE.get(character, character) for character in token) or "∅"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def places(nodes: Sequence[DraftNode]) -> list[tuple[float, float]]:
    """Computes column and row of every node.

    Each leaf has a row of its own, parents are centred on their children, and more likely children are above others.
    """
    children: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes):
        if node.parent >= 0:
            children[node.parent].append(number)
    rows, free = [0.0] * len(nodes), 0.0
    stack = [(0, False)]
    while stack:
        number, seen = stack.pop()
        below = sorted(children[number], key=lambda child: (-nodes[child].probability, child))
        if not below:
            rows[number], free = free, free + 1
        elif seen:
            rows[number] = (rows[below[0]] + rows[below[-1]]) / 2
        else:
            stack += [(number, True), *((child, False) for child in reversed(below))]
    return [(float(node.depth), row) for node, row in zip(nodes, rows, strict=True)]


def tree_picture(nodes: Sequence[DraftNode], own_token: int | None, text_of: Callable[[int], str]) -> str:
    """Draws the tree of a round as an `<svg>` element.

    Args:
        nodes: Nodes of the tree, the root first, parents before their children.
        own_token: The target's own token after the accepted path; `None` if the text ended within the path.
        text_of: Function that returns the text of a token.
    """
    spots = places(nodes)
    last = max((number for number, node in enumerate(nodes) if node.accepted), key=lambda n: nodes[n].depth)
    own_place = None
    if own_token is not None:
        taken = {spots[number][1] for number, node in enumerate(nodes) if node.depth == nodes[last].depth + 1}
        row = spots[last][1]
        while any(abs(row - other) < 1 for other in taken):  # moved below the rejected drafts at this depth
            row += 0.5
        own_place = (spots[last][0] + 1, row)
    everything = [*spots, *([own_place] if own_place else [])]
    width = MARGIN * 2 + WIDTH + max(x for x, _ in everything) * STEP_X
    height = TOP + MARGIN + HEIGHT + max(y for _, y in everything) * STEP_Y
    parts = [
        f'<svg class="draft-tree" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="draft tree" '
        f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" font-size="12" '
        'font-family="ui-monospace, Menlo, Consolas, monospace">',
        *_headings(max(node.depth for node in nodes), nodes[last].depth + 1 if own_place else 0),
    ]
    rejected_first = sorted(range(1, len(nodes)), key=lambda number: nodes[number].accepted)
    parts += [_link(spots[nodes[n].parent], spots[n], nodes[n]) for n in rejected_first]
    if own_place is not None:
        parts.append(_path(spots[last], own_place, f'stroke="{INK}" stroke-width="1.6" stroke-dasharray="4 3"'))
    chance = _chances(nodes)
    parts += [_node(spots[n], node, text_of(node.token_id), chance[n]) for n, node in enumerate(nodes)]
    if own_place is not None and own_token is not None:
        parts.append(_own(own_place, own_token, text_of(own_token)))
    return "".join([*parts, "</svg>"])


def _chances(nodes: Sequence[DraftNode]) -> list[float]:
    """Draft probability of the path from the root to every node."""
    found: list[float] = []
    for node in nodes:
        found.append(node.probability * (found[node.parent] if node.parent >= 0 else 1.0))
    return found


def _corner(place: tuple[float, float]) -> tuple[float, float]:
    return MARGIN + place[0] * STEP_X, TOP + place[1] * STEP_Y


def _headings(deepest: int, own: int) -> list[str]:
    found = []
    for depth in range(max(deepest, own) + 1):
        x, _ = _corner((depth, 0))
        words = "root" if depth == 0 else f"position {depth}" if depth <= deepest else "the target's own"
        found.append(f'<text x="{x + WIDTH / 2:.0f}" y="18" text-anchor="middle" fill="{GREY}" '
                     f'font-family="system-ui, sans-serif">{words}</text>')  # fmt: skip
    return found


def _path(start: tuple[float, float], end: tuple[float, float], style: str) -> str:
    (x, y), (to_x, to_y) = _corner(start), _corner(end)
    x, y, to_y = x + WIDTH, y + HEIGHT / 2, to_y + HEIGHT / 2
    middle = (x + to_x) / 2
    curve = f"M{x:.0f},{y:.1f} C{middle:.0f},{y:.1f} {middle:.0f},{to_y:.1f} {to_x:.0f},{to_y:.1f}"
    return f'<path d="{curve}" fill="none" {style}/>'


def _link(start: tuple[float, float], end: tuple[float, float], node: DraftNode) -> str:
    width = 1 + 2.5 * node.probability
    colour = INK if node.accepted else FAINT
    return _path(start, end, f'stroke="{colour}" stroke-width="{width:.1f}"')


def _box(place: tuple[float, float], kind: str, title: str, style: str, ink: str, left: str, right: str) -> str:
    x, y = _corner(place)
    middle = y + HEIGHT / 2 + 4
    number = ""
    if right:
        number = f'<text x="{x + WIDTH - 6:.0f}" y="{middle:.1f}" text-anchor="end" font-size="10" fill="{GREY}">'
        number += f"{right}</text>"
    return (
        f'<g class="{kind}"><title>{escape(title)}</title>'
        f'<rect x="{x:.0f}" y="{y:.1f}" width="{WIDTH}" height="{HEIGHT}" rx="6" {style}/>'
        f'<text x="{x + 7:.0f}" y="{middle:.1f}" fill="{ink}" xml:space="preserve">{escape(left)}</text>{number}</g>'
    )


def _node(place: tuple[float, float], node: DraftNode, token: str, chance: float) -> str:
    if node.parent < 0:
        title = f"root: {token!r}, token {node.token_id}, the newest token of the text"
        return _box(place, "root", title, f'fill="{INK}"', "#ffffff", shown(token), "")
    state = "accepted" if node.accepted else "rejected"
    title = (
        f"{state}: {token!r}, token {node.token_id}, draft position {node.depth}\n"
        f"the draft gave it {node.probability:.1%} after its parent, {chance:.2%} from the root"
    )
    style = f'fill="#f6f7f9" stroke="{FAINT}"'
    if node.accepted:
        style = f'fill="{position_colour(node.depth)}" stroke="{INK}" stroke-width="1.6"'
    right = f"{node.probability:.2f}".removeprefix("0") if node.probability < 0.995 else "1"
    cut = shown(token)
    cut = cut if len(cut) <= 9 else f"{cut[:8]}…"
    return _box(place, state, title, style, INK if node.accepted else "#4a525a", cut, right)


def _own(place: tuple[float, float], token_id: int, token: str) -> str:
    title = f"the target's own: {token!r}, token {token_id}, the root of the next round"
    style = f'fill="#ffffff" stroke="{INK}" stroke-dasharray="4 3"'
    return _box(place, "own", title, style, INK, shown(token), "")
