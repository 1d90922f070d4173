"""A chat in the browser: what one visitor has said and got, and the next reply, side by side with plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from ..generation.verification.rules import RULES
from .models import Models, Settings
from .replies import plain_reply, reply_with_heads
from .transcript import Pieces, SeenRound, Transcript
from .tree_picture import tree_picture
from .views import Turn


class Conversation:
    """Of one visitor.

    Attributes:
        messages: The chat so far; replies are those with heads.
        ours, plain: Turns with heads, and by plain decoding where that was asked for.
        lossy: Whether the last reply may differ from the target's distribution.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, str]] = []
        self.ours: list[Turn] = []
        self.plain: list[Turn] = []
        self.lossy = False

    def ask(self, models: Models, prompt: str, settings: Settings) -> Iterator[None]:
        """Generates the reply, with heads and then plainly, one after the other so that neither slows the other down;
        gives control back whenever there is something new.

        Raises:
            ValueError: for input that cannot be served, before any forward.
            RuntimeError: if somebody else is generating.
        """
        message = {"role": "user", "content": prompt}
        messages = [*self.messages, message] if models.chats else [message]
        options = settings.generate_options
        inputs = models.inputs(messages, options["max_new_tokens"])
        heads = settings.apply(models.heads(settings.heads))
        call = (models.target, heads, inputs, settings.seed)
        self.lossy = options["do_sample"] and not RULES[settings.verification].lossless
        if not models.lock.acquire(blocking=False):
            raise RuntimeError("another reply is being written; try again when it has ended.")
        try:
            ours = reply_with_heads(*call, **options)
            self.ours.append(self._turn(models, prompt, ours.transcript))
            with closing(ours.watch()) as looks:
                yield from (None for _ in looks)
            if settings.compare and not (ours.transcript.error or ours.transcript.stopped):
                plain = plain_reply(models.target, inputs, settings.seed, **options)
                self.plain.append(self._turn(models, prompt, plain.transcript))
                with closing(plain.watch()) as looks:
                    yield from (None for _ in looks)
        finally:
            models.lock.release()
        if ours.transcript.error:
            self.ours.pop()
            raise ValueError(ours.transcript.error)
        reply = {"role": "assistant", "content": "".join(self.ours[-1].refresh())}
        self.messages = [*messages, reply]

    def _turn(self, models: Models, prompt: str, transcript: Transcript) -> Turn:
        return Turn(prompt, transcript, Pieces(models.decode), models.chats)

    @property
    def last(self) -> Transcript | None:
        """The newest reply with heads."""
        return self.ours[-1].transcript if self.ours else None

    @property
    def last_plain(self) -> Transcript | None:
        """The plain reply to the same message, if there is one."""
        return self.plain[-1].transcript if self.plain and self.plain[-1].prompt == self.ours[-1].prompt else None

    @property
    def step_to_show(self) -> int:
        """Number of the newest step of the newest reply that has a tree, or of its newest step."""
        rounds = self.last.rounds if self.last else []
        return max((number for number, one in enumerate(rounds) if one.drafted), default=max(len(rounds) - 1, 0))


def round_picture(rounds: Sequence[SeenRound], number: int, models: Models) -> str:
    """The tree of a step of a reply, as HTML, or why there is none."""
    if not 0 <= number < len(rounds):
        return '<div class="sh-tree"><p>The draft tree of a round will be here.</p></div>'
    one = rounds[number]
    own = None if one.num_drafted == len(one.token_ids) else one.token_ids[-1]
    if one.drafted:
        return f'<div class="sh-tree">{tree_picture(one.nodes, own, models.text_of)}</div>'
    why = "a plain step: drafting had not paid, or there was no room for a draft" if number else "the prompt's forward"
    return f'<div class="sh-tree"><p>Step {number} was {why}. It drafted nothing.</p></div>'


def round_words(rounds: Sequence[SeenRound], number: int) -> str:
    """A round in one line."""
    if not 0 <= number < len(rounds) or not rounds[number].drafted:
        return ""
    one = rounds[number]
    words = f"{len(one.nodes) - 1} tokens drafted, {one.num_drafted} accepted"
    return f"Round {number}: {words}; {len(one.token_ids)} tokens in {1000 * one.seconds:.0f} ms."
