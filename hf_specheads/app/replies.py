"""Generations that are watched: in a thread of their own, round by round, and stopped when nobody looks any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..generation.observer import Round
from ..heads.base import DraftHead
from .transcript import Transcript

INTERVAL = 0.1  # seconds between two looks at a transcript


class Stopped(Exception):
    """Raised inside a call to end it."""


class PlainTokens(BaseStreamer):
    """Takes in the tokens of plain decoding.

    Args:
        transcript: Where they go.
        halt: Set to end the call.
    """

    def __init__(self, transcript: Transcript, halt: threading.Event):
        self.transcript, self.halt = transcript, halt
        self.started, self._is_prompt = time.perf_counter(), True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self.transcript.add_token(int(value.flatten()[0]), time.perf_counter() - self.started)
        if self.halt.is_set():
            raise Stopped

    def end(self) -> None:
        """There is nothing left to do."""


@dataclass
class Reply:
    """One generation in a thread.

    Attributes:
        run: What generates; it looks at `halt` after every step and raises [`Stopped`] if it is set.
        transcript: What it has brought so far.
        halt: Ends it after the step it is at.
    """

    run: Callable[[Transcript, threading.Event], Any]
    transcript: Transcript = field(default_factory=Transcript)
    halt: threading.Event = field(default_factory=threading.Event)

    def watch(self, interval: float = INTERVAL) -> Iterator[Transcript]:
        """Starts the thread; gives the transcript whenever it has grown, and once more when it is done. Leaving the
        iterator ends the generation."""
        thread = threading.Thread(target=self._work, daemon=True)
        thread.start()
        seen = -1
        try:
            while thread.is_alive():
                thread.join(interval)
                if len(self.transcript.token_ids) != seen:
                    seen = len(self.transcript.token_ids)
                    yield self.transcript
        finally:
            self.halt.set()
            thread.join()
        yield self.transcript

    def _work(self) -> None:
        try:
            self.run(self.transcript, self.halt)
        except Stopped:
            self.transcript.stopped = True
        except Exception as error:  # whatever it is, the page says so and lives on
            self.transcript.error = one_line(error)
        finally:
            self.transcript.done = True


def one_line(error: BaseException) -> str:
    """What went wrong, for a page."""
    words = " ".join(str(error).split())
    return words if isinstance(error, ValueError | OSError) and words else f"{type(error).__name__}: {words}"


def reply_with_heads(
    target: PreTrainedModel, heads: DraftHead, inputs: dict[str, torch.Tensor], seed: int, **options: Any
) -> Reply:
    """A reply with draft heads, which are told to report every round for it.

    Args:
        target: The target.
        heads: Heads of it; a copy of one's own, since the observer is assigned to it.
        inputs: Token ids and mask [1, T].
        seed: Of sampling: the same seed draws the same tokens plainly.
        **options: For `generate`.
    """

    def run(transcript: Transcript, halt: threading.Event) -> None:
        started = time.perf_counter()

        def observe(one: Round) -> None:
            transcript.add_round(one, time.perf_counter() - started)
            if halt.is_set():
                raise Stopped

        heads.on_round = observe
        torch.manual_seed(seed)
        target.generate(**inputs, assistant_model=heads, **options)
        transcript.stats = heads.last_stats

    return Reply(run)


def plain_reply(target: PreTrainedModel, inputs: dict[str, torch.Tensor], seed: int, **options: Any) -> Reply:
    """The same by plain decoding."""

    def run(transcript: Transcript, halt: threading.Event) -> None:
        torch.manual_seed(seed)
        target.generate(**inputs, streamer=PlainTokens(transcript, halt), **options)

    return Reply(run)
