"""A chat in the browser: messages and replies of one visitor, with heads and by plain decoding."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing

from ..generation.verification.rules import RULES
from .models import Models, Settings
from .replies import Reply, plain_reply, reply_with_heads
from .transcript import Pieces, SeenRound, Transcript
from .tree_picture import tree_picture
from .views import Turn

PATIENCE = 10.0  # longest time in seconds that `stop` waits for the current step to end


class Conversation:
    """Conversation of one visitor.

    Attributes:
        messages: Messages of the chat so far; the replies are those with heads.
        ours, plain: Turns with heads, and by plain decoding if requested.
        lossy: Whether the last reply may deviate from the target's distribution.
        left: Whether the visitor has started another chat, so that this one must not be shown any more.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, str]] = []
        self.ours: list[Turn] = []
        self.plain: list[Turn] = []
        self.lossy = self.left = self._halted = False
        self._writing: Reply | None = None
        self._idle = threading.Event()
        self._idle.set()

    def ask(self, models: Models, prompt: str, settings: Settings) -> Generator[None]:
        """Generates the reply, with heads and then plainly, and yields whenever there are new tokens.

        The two run one after the other, so that neither slows the other down.

        Raises:
            ValueError: If the input cannot be served (before any forward), or if the reply with heads fails.
            RuntimeError: If another reply is being generated.
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
        self._halted = False
        self._idle.clear()
        try:
            ours = reply_with_heads(*call, **options)
            self.ours.append(self._turn(models, prompt, ours.transcript))
            yield from self._write(ours)
            if settings.compare and not (ours.transcript.error or ours.transcript.stopped or self._halted):
                plain = plain_reply(models.target, inputs, settings.seed, **options)
                self.plain.append(self._turn(models, prompt, plain.transcript))
                yield from self._write(plain)
        finally:
            models.lock.release()
            self._idle.set()
        if ours.transcript.error:
            self.ours.pop()
            raise ValueError(ours.transcript.error)
        reply = {"role": "assistant", "content": "".join(self.ours[-1].refresh())}
        self.messages = [*messages, reply]

    def stop(self) -> None:
        """Ends the reply that is being written after its current step, and waits until it has ended.

        Does nothing if there is none.
        """
        self._halted = True
        if self._writing is not None:
            self._writing.halt.set()
        self._idle.wait(PATIENCE)

    def _write(self, reply: Reply) -> Iterator[None]:
        self._writing = reply
        with closing(reply.watch()) as looks:
            yield from (None for _ in looks)

    def _turn(self, models: Models, prompt: str, transcript: Transcript) -> Turn:
        return Turn(prompt, transcript, Pieces(models.decode), models.chats)

    @property
    def last(self) -> Transcript | None:
        """The newest reply with heads."""
        return self.ours[-1].transcript if self.ours else None

    @property
    def last_plain(self) -> Transcript | None:
        """The plain reply to the last message, if there is one."""
        return self.plain[-1].transcript if self.plain and self.plain[-1].prompt == self.ours[-1].prompt else None

    @property
    def step_to_show(self) -> int:
        """Number of the last step with a draft tree in the newest reply; if there is none, of its last step."""
        rounds = self.last.rounds if self.last else []
        return max((number for number, one in enumerate(rounds) if one.drafted), default=max(len(rounds) - 1, 0))


def round_picture(rounds: Sequence[SeenRound], number: int, models: Models) -> str:
    """Renders the draft tree of a step as HTML, or says why there is none."""
    if not 0 <= number < len(rounds):
        return '<div class="sh-tree"><p>The draft tree of a round will be shown here.</p></div>'
    one = rounds[number]
    own = None if one.num_drafted == len(one.token_ids) else one.token_ids[-1]
    if one.drafted:
        return f'<div class="sh-tree">{tree_picture(one.nodes, own, models.text_of)}</div>'
    why = (
        "a plain step: drafting had not paid off, or there was no room for a draft"
        if number
        else "the prompt's forward"
    )
    return f'<div class="sh-tree"><p>Step {number} was {why}. It drafted nothing.</p></div>'


def round_words(rounds: Sequence[SeenRound], number: int) -> str:
    """Describes a round in one line; empty for steps that drafted nothing."""
    if not 0 <= number < len(rounds) or not rounds[number].drafted:
        return ""
    one = rounds[number]
    words = f"{len(one.nodes) - 1} tokens drafted, {one.num_drafted} accepted"
    return f"Round {number}: {words}; {len(one.token_ids)} tokens in {1000 * one.seconds:.0f} ms."
