"""Fair timing: all sides of a comparison take turns on the same prompts.

The sides run every prompt right after each other, in rotating order, so that other load on the machine affects all of
them alike. The caller decides which of the repeats count (the fastest, the median).
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
    """Runs every side on every prompt, `repeats` times.

    Args:
        sides: Names of the sides that are compared.
        prompts: Prompts that each side runs.
        run: Runs one side on one prompt. The third argument is the number of the turn, from 0. It is the same for all
            sides, so it can serve as a seed.
        repeats: Number of times every prompt is run.
        warm_up: Runs one side on the first prompt. It is called once per side before all turns, so that first-call
            costs are not measured. By default `run` is called and its outcome discarded.
        what: Text of the progress bar.

    Returns:
        The outcomes of `run` by side, as `[repeat][prompt]`.

    Raises:
        ValueError: if there are no prompts.
    """
    if not prompts:
        raise ValueError("expected at least one prompt, got none.")
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
    """Generates once and returns prompt and new tokens, int64 [B, T].

    Args:
        target: The target.
        prompt: A tokenizer's output (`input_ids` [B, T], `attention_mask`, ...), or the token ids of one text, [1, T]
            or a plain list.
        **options: Options of `generate`; greedy by default.
    """
    inputs = _inputs_of(target, prompt)
    text = target.generate(**inputs, **{"do_sample": False, **options})
    return text if isinstance(text, torch.Tensor) else text.sequences


def timed_generation(target: PreTrainedModel, prompt: Any, **options: Any) -> tuple[list[list[int]], float]:
    """Generates once and returns the new tokens of every sequence and the wall-clock seconds they took.

    Args:
        target: The target.
        prompt: As for [`generate_text`].
        **options: Options of `generate`; greedy by default.
    """
    inputs = _inputs_of(target, prompt)
    started = time.perf_counter()
    text = generate_text(target, inputs, **options)
    new_ids = text[:, inputs["input_ids"].shape[1] :].tolist()  # `tolist` waits for the device before time is taken
    return new_ids, time.perf_counter() - started


def _inputs_of(target: PreTrainedModel, prompt: Any) -> dict[str, torch.Tensor]:
    if isinstance(prompt, Mapping):
        return {name: tensor.to(target.device) for name, tensor in prompt.items()}
    ids = torch.as_tensor(prompt, device=target.device).reshape(1, -1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextmanager
def every_round_drafts(heads: DraftingContract) -> Iterator[DraftingContract]:
    """Makes these heads, and copies made of them, draft in every round inside the context, even if it does not pay.

    Without this, a measurement of the heads would include the plain steps that replace rounds.
    """
    before = heads.adaptive
    heads.adaptive = False
    try:
        yield heads
    finally:
        heads.adaptive = before
