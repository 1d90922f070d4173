"""Compiling the steps of rounds before the first request arrives.

What is compiled depends only on the shapes of a round: batch size, capacity of the caches, draft tree. So a few rounds
of short artificial calls compile what later calls of the same shapes need. Their drafts say nothing about real texts,
so what the engine learns from them about draft trees is discarded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ..contract import DraftingContract
from ..generation.compiled.rounds import SMALLEST_BUCKET, bucket, compiled_rounds
from ..generation.observer import Round
from ..generation.options import DraftingOptions
from ..generation.pace.menu import largest, trees_of_call
from ..generation.pace.pace import Pace
from ..tree.config import DraftTreeConfig
from .progress import bar

PROMPT = 8  # tokens of an artificial prompt
DRAFTED = 3  # rounds per artificial call; the first round takes in the prompt and runs uncompiled


class _Enough(Exception):
    """Raised to end an artificial call once everything is compiled."""


def warmup(
    target: PreTrainedModel,
    heads: DraftingContract,
    *,
    batch_sizes: Sequence[int] = (1,),
    max_length: int | None = None,
) -> float:
    """Compiles the steps of rounds for the given shapes, with a progress bar, and returns the seconds it took.

    Args:
        target: The target of the later calls.
        heads: Draft heads with `heads.compiled = True`.
        batch_sizes: Batch sizes of the later calls. When some sequences of a batch end before others, the remaining
            ones form a smaller batch; include those sizes too.
        max_length: Tokens of the longest later call, prompt included. Cache capacities are powers of two, and calls of
            equal capacity share graphs; all capacities up to this length are compiled. By default only the smallest
            one is.

    Raises:
        ValueError: if the heads are not compiled, or a batch size or `max_length` is not a positive number.
    """
    if not heads.compiled:
        raise ValueError(
            "`heads.warmup` compiles the rounds of heads with `heads.compiled = True`, got False; set it, or load the "
            "heads with `load_heads(..., compile=True)`."
        )
    sizes = list(dict.fromkeys(batch_sizes))
    if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"`batch_sizes` must be numbers of sequences, 1 or more, got {list(batch_sizes)}.")
    if max_length is not None and max_length < 1:
        raise ValueError(f"`max_length` must be a number of tokens, 1 or more, got {max_length}.")
    started = time.perf_counter()
    heads.bind(target)
    compiled_rounds(heads, target, target.generation_config)  # a pair's first call skips steps that pay off late
    tree = largest(trees_of_call(heads, target, DraftingOptions.of(heads)))
    shapes = [(size, capacity) for size in sizes for capacity in _capacities(tree, max_length)]
    with _left_as_it_was(heads, target):
        for size, capacity in bar(shapes, "compiling rounds"):
            _compile_rounds(target, heads, tree, size, capacity)
    return time.perf_counter() - started


def _capacities(tree: DraftTreeConfig, max_length: int | None) -> list[int]:
    """Returns the cache capacities, powers of two, of calls up to a length."""
    largest = SMALLEST_BUCKET if max_length is None else bucket(max_length + tree.most_nodes)
    capacities = [SMALLEST_BUCKET]
    while capacities[-1] < largest:
        capacities.append(2 * capacities[-1])
    return capacities


@contextmanager
def _left_as_it_was(heads: Any, target: PreTrainedModel) -> Iterator[None]:
    """Restores afterwards what users see of the heads, and what earlier calls have learnt about draft trees."""
    names = ("on_round", "adaptive", "last_stats", "trace", "profile")
    before = {name: getattr(heads, name) for name in names}
    known = heads.memory.setdefault(target, {})
    paces = {key: value for key, value in known.items() if isinstance(value, Pace)}
    _forget_paces(known)
    try:
        heads.trace = heads.profile = False
        yield
    finally:
        for name, value in before.items():
            setattr(heads, name, value)
        _forget_paces(known)
        known.update(paces)


def _forget_paces(known: dict[tuple, Any]) -> None:
    for key in [key for key, value in known.items() if isinstance(value, Pace)]:
        del known[key]


def _compile_rounds(
    target: PreTrainedModel, heads: Any, tree: DraftTreeConfig, batch_size: int, capacity: int
) -> None:
    """Runs rounds with trees of at most this size, and a plain step if calls may take one."""
    takes_plain_steps = heads.adaptive
    rows = max(tree.most_nodes, heads.draft_rows(tree) + tree.lookup) + 1
    ids = torch.arange(batch_size * PROMPT, device=target.device).view(batch_size, PROMPT)
    ids = ids % (target.get_input_embeddings().num_embeddings // 2) + 1
    for adaptive, steps in ((False, DRAFTED), (True, 1)) if takes_plain_steps else ((False, DRAFTED),):
        heads.adaptive, left = adaptive, [steps + 1]

        def count(step: Round, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise _Enough

        heads.on_round = count
        new_tokens = capacity - PROMPT - rows
        options = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False}
        try:
            target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=heads, **options)
        except _Enough:
            continue
