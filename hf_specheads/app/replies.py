"""Runs generations in threads, so that they can be watched round by round and stopped when nobody watches any more."""

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

INTERVAL = 0.1  # seconds between checks of a transcript for new tokens


class Stopped(Exception):
    """Raised inside a `generate` call to end it."""


class PlainTokens(BaseStreamer):
    """Streamer that adds the tokens of plain decoding to a transcript.

    Args:
        transcript: Transcript to which tokens are added.
        halt: Event that ends the call when it is set.
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
        """Does nothing; required by the interface."""


@dataclass
class Reply:
    """One generation in a thread.

    Attributes:
        run: Function that generates. It checks `halt` after every step, and raises [`Stopped`] if it is set.
        transcript: Transcript of the generation so far.
        halt: Event that ends the generation after its current step.
    """

    run: Callable[[Transcript, threading.Event], Any]
    transcript: Transcript = field(default_factory=Transcript)
    halt: threading.Event = field(default_factory=threading.Event)

    def watch(self, interval: float = INTERVAL) -> Iterator[Transcript]:
        """Starts the thread, and yields the transcript whenever it has grown, and once more at the end.

        Closing the iterator ends the generation.
        """
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
        except Exception as error:  # any error is shown on the page, which keeps working
            self.transcript.error = one_line(error)
        finally:
            self.transcript.done = True


def one_line(error: BaseException) -> str:
    """Formats an error on one line, for the page."""
    words = " ".join(str(error).split())
    return words if isinstance(error, ValueError | OSError) and words else f"{type(error).__name__}: {words}"


def reply_with_heads(
    target: PreTrainedModel, heads: DraftHead, inputs: dict[str, torch.Tensor], seed: int, **options: Any
) -> Reply:
    """Prepares a reply with draft heads, which report every round to its transcript.

    Args:
        target: The target.
        heads: Draft heads of the target; pass a copy, because an observer is assigned to it.
        inputs: Token ids and mask [1, T].
        seed: Seed for sampling; plain decoding with the same seed samples the same tokens.
        **options: Arguments of `generate`.
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
    """Prepares a reply by plain decoding; arguments as for [`reply_with_heads`]."""

    def run(transcript: Transcript, halt: threading.Event) -> None:
        torch.manual_seed(seed)
        target.generate(**inputs, streamer=PlainTokens(transcript, halt), **options)

    return Reply(run)
