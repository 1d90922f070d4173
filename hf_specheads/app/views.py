"""Renders parts of the page as HTML: replies with coloured accepted drafts, their numbers, and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from ..publishing.palette import INK, POSITION_COLOURS, position_colour
from .transcript import Pieces, Transcript

WITH_HEADS, PLAIN = "with draft heads", "plain decoding"
NONE = "-"  # shown for a number that is not known yet


def _positions_css() -> str:
    colours = {str(position): position_colour(position) for position in range(1, len(POSITION_COLOURS) + 1)}
    return "\n".join(
        f".sh-reply .p{position}, .sh-legend .p{position} {{ background: {colour}; color: {INK}; }}"
        for position, colour in colours.items()
    )


CSS = f"{resources.files(__package__).joinpath('page.css').read_text(encoding='utf-8')}{_positions_css()}"

# Reports the step of a token that is clicked.
PICK_ROUND = """
element.addEventListener('click', (event) => {
  const token = event.target.closest('[data-round]');
  if (token) { trigger('click', {round: Number(token.dataset.round)}); }
});
"""


@dataclass(frozen=True)
class Turn:
    """One message of the user, and the reply to it so far.

    Attributes:
        prompt: The user's message.
        transcript: The reply.
        pieces: Texts of the reply's tokens.
        answers: Whether the target answers the message; otherwise it continues the message.
    """

    prompt: str
    transcript: Transcript
    pieces: Pieces
    answers: bool

    def refresh(self) -> list[str]:
        """Decodes new tokens, and returns the texts of all tokens so far."""
        self.pieces.extend(self.transcript.token_ids[len(self.pieces.ids) :])
        return self.pieces.pieces


def legend() -> str:
    """Legend of the colours."""
    last = len(POSITION_COLOURS)
    marks = "".join(
        f'<span class="p p{position}">{position}{"+" if position == last else ""}</span>'
        for position in range(1, last + 1)
    )
    return (
        f'<div class="sh-legend">Accepted drafts, by draft position: {marks}<span>uncoloured: the target\'s own '
        "tokens. Click a token to see the tree of its round.</span></div>"
    )


def reply_html(turns: Sequence[Turn], newest: int | None = None, nothing: str = "") -> str:
    """Renders a column of replies.

    Args:
        turns: All turns so far.
        newest: Step of the last reply whose tokens are framed; `None` for no frame.
        nothing: Text that is shown before the first turn.
    """
    code = "" if turns and turns[-1].answers else " code"
    shown = "".join(_turn(turn, newest if turn is turns[-1] else None) for turn in turns)
    shown = shown or f'<span class="empty">{escape(nothing)}</span>'
    return f'<div class="sh-reply{code}"><div class="sh-turns">{shown}</div></div>'


def _turn(turn: Turn, newest: int | None) -> str:
    said, is_last = turn.transcript, newest is not None
    spans = []
    for index, piece in enumerate(turn.refresh()):
        if not piece:
            continue
        position = said.positions[index]
        if not said.rounds:
            spans.append(escape(piece))
            continue
        number = said.round_of[index]
        marks = f" p{min(position, len(POSITION_COLOURS))}" if position else ""
        marks += " now" if is_last and number == newest else ""
        where = f"draft position {position}" if position else "the target's own"
        spans.append(
            f'<span class="t{marks}" data-round="{number}" title="round {number}, {where}">{escape(piece)}</span>'
        )
    ended = f"\n[{escape(said.error)}]" if said.error else " [stopped]" if said.stopped else ""
    return f'<span class="turn"><span class="user">{escape(turn.prompt)}</span>{"".join(spans)}{ended}</span>'


def numbers_html(title: str, transcript: Transcript | None, with_heads: bool) -> str:
    """Renders the header of a column: its title, tokens per second, tau, tokens, and target forwards."""
    said = transcript or Transcript()
    cells = [("tokens/s", said.tokens_per_second, 1)]
    if with_heads:
        cells.append(("tau", said.acceptance_length, 2))
    whole = [("tokens", len(said.token_ids)), ("target forwards", said.forwards)]
    shown = "".join(_number(name, NONE if value is None else f"{value:.{digits}f}") for name, value, digits in cells)
    shown += "".join(_number(name, str(value) if transcript else NONE) for name, value in whole)
    return f'<div class="sh-head"><h3>{escape(title)}</h3><div class="sh-numbers">{shown}</div></div>'


def _number(name: str, value: str) -> str:
    return f'<div><b data-number="{escape(name)}">{value}</b><span>{escape(name)}</span></div>'


def comparison(ours: Transcript, plain: Transcript | None, lossy: bool) -> str:
    """Renders the comparison: whether the texts are equal, the speed-up, and acceptance by draft position."""
    by_position = "".join(
        f' <span class="p p{min(position, len(POSITION_COLOURS))}">{position}: {value:.0%}</span>'
        for position, value in enumerate(ours.pos_acc, start=1)
    )
    accepted = (
        f'<div class="sh-legend">accepted, if all earlier drafts were:{by_position}</div>' if by_position else ""
    )
    if plain is None or not (plain.done and ours.done) or plain.error or ours.error or plain.stopped or ours.stopped:
        return accepted
    speed = ""
    if plain.tokens_per_second and ours.tokens_per_second:
        speed = f"{ours.tokens_per_second / plain.tokens_per_second:.2f} times the tokens per second of plain decoding"
    if plain.token_ids == ours.token_ids:
        return f'<div class="sh-verdict good">The same text, token for token; {speed}.</div>{accepted}'
    if lossy:
        said = "The texts differ: typical acceptance does not keep the target's distribution when sampling"
        return f'<div class="sh-verdict">{said}; {speed}.</div>{accepted}'
    said = "The texts differ: in 16 bits, rounding decides between two equally likely tokens; see `specheads diff`"
    return f'<div class="sh-verdict bad">{said}; {speed}.</div>{accepted}'


def message(text: str, kind: str = "bad") -> str:
    """Renders a message to the visitor; empty for an empty text."""
    return f'<div class="sh-verdict {kind}" role="status">{escape(text)}</div>' if text else ""
