"""Sides take turns on prompts, and generations are timed: how anything is compared here.

Whatever else a machine does meets all sides alike if they run every prompt right after each other, in an order that
rotates. Which of the repeats count (the fastest, the median) is for the caller to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from ..contract import DraftingContract
from ..texts import Text
from .progress import bar

Prompts = Sequence[Text]
Side = TypeVar("Side", bound=Hashable)
Prompt = TypeVar("Prompt")
Outcome = TypeVar("Outcome")


def take_turns(
    sides: Iterable[Side],
    prompts: Sequence[Prompt],
    run: Callable[[Side, Prompt, int], Outcome],
    repeats: int,
    warm_up: Callable[[Side, Prompt], Any] | None = None,
    what: str = "in turns",
) -> dict[Side, list[list[Outcome]]]:
    """Every side on every prompt, `repeats` times.

    Args:
        sides: Names of what is compared.
        prompts: What each side runs.
        run: Runs one side on one prompt. The third argument numbers the turns from 0; it is the same for all sides,
            and so can serve as a seed.
        repeats: Times every prompt is run.
        warm_up: Runs one side on the first prompt, once and before all turns, so that first-call costs are not
            measured; by default `run` does, its outcome left out.
        what: What the bar that is shown meanwhile says.

    Returns:
        What `run` returned, by side, `[repeat][prompt]`.

    Raises:
        ValueError: without prompts.
    """
    if not prompts:
        raise ValueError("sides take turns on prompts: expected at least one prompt, got none.")
    names = list(sides)
    for side in bar(names, f"{what}: first calls"):
        if warm_up is None:
            run(side, prompts[0], 0)
        else:
            warm_up(side, prompts[0])
    outcomes: dict[Side, list[list[Outcome]]] = {side: [[] for _ in range(repeats)] for side in names}
    for turn in bar(range(repeats * len(prompts)), what):
        repeat, index = divmod(turn, len(prompts))
        first = (index + repeat) % len(names)
        for side in names[first:] + names[:first]:
            outcomes[side][repeat].append(run(side, prompts[index], turn))
    return outcomes


def generate_text(target: PreTrainedModel, prompt: Any, **options: Any) -> torch.Tensor:
    """Prompt and new tokens of one generation, int64 [B, T]; greedy unless the options say otherwise.

    Args:
        target: The target.
        prompt: What a tokenizer returns (`input_ids` [B, T], `attention_mask`, ...), or the token ids of one text,
            [1, T] or a plain list.
        **options: For `generate`.
    """
    inputs = _inputs_of(target, prompt)
    text = target.generate(**inputs, **{"do_sample": False, **options})
    return text if isinstance(text, torch.Tensor) else text.sequences


def timed_generation(target: PreTrainedModel, prompt: Any, **options: Any) -> tuple[list[list[int]], float]:
    """New tokens of every sequence, and the wall seconds they took.

    Args:
        target: The target.
        prompt: As for [`generate_text`].
        **options: For `generate`; greedy by default.
    """
    inputs = _inputs_of(target, prompt)
    started = time.perf_counter()
    text = generate_text(target, inputs, **options)
    new_ids = text[:, inputs["input_ids"].shape[1] :].tolist()  # waits for the device
    return new_ids, time.perf_counter() - started


def _inputs_of(target: PreTrainedModel, prompt: Any) -> dict[str, torch.Tensor]:
    if isinstance(prompt, Mapping):
        return {name: tensor.to(target.device) for name, tensor in prompt.items()}
    ids = torch.as_tensor(prompt, device=target.device).reshape(1, -1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextmanager
def every_round_drafts(heads: DraftingContract) -> Iterator[DraftingContract]:
    """While this lasts these heads, and copies made of them, draft every round whether it pays or not: for measuring
    them."""
    before = heads.adaptive
    heads.adaptive = False
    try:
        yield heads
    finally:
        heads.adaptive = before
