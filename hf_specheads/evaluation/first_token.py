"""Measures the time to the first token separately from the time of decoding."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..tuning.turns import timed_generation


@dataclass(frozen=True)
class TimedText:
    """Result of one timed generation.

    Attributes:
        token_ids: New tokens of every sequence.
        seconds: Wall seconds of the whole generation.
        first: Seconds until the first token; `None` for batches, which cannot be streamed.
        times: Seconds from the start to every streamed token.
    """

    token_ids: list[list[int]]
    seconds: float
    first: float | None
    times: tuple[float, ...] = ()


class _Clock(BaseStreamer):
    """Streamer that reads the clock at every token."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: Any) -> None:
        if not self._prompt:
            self.times += [time.perf_counter()] * max(int(value.numel()), 1)
        self._prompt = False

    def end(self) -> None:
        """Does nothing; required by the interface."""


def timed_text(target: PreTrainedModel, inputs: dict[str, Any], **options: Any) -> TimedText:
    """Generates, and reads the clock at every token if there is a single sequence.

    Args:
        target: The target.
        inputs: Output of a tokenizer.
        **options: Arguments of `generate`; greedy by default.
    """
    if inputs["input_ids"].shape[0] > 1:
        token_ids, seconds = timed_generation(target, inputs, **options)
        return TimedText(token_ids, seconds, None)
    clock = _Clock()
    started = time.perf_counter()
    token_ids, _ = timed_generation(target, inputs, streamer=clock, **options)
    seconds = time.perf_counter() - started  # not that of timed_generation: tokens are timed from this start
    times = tuple(moment - started for moment in clock.times)
    return TimedText(token_ids, seconds, times[0] if times else None, times)
