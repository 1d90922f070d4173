"""Compiling the steps of rounds before the first request comes.

What is compiled depends on the shapes of a round alone: batch, capacity of the caches, draft tree. So a few
rounds of short made-up calls compile what later calls of such shapes find ready. Their drafts tell nothing of real
texts, and what they teach the engine about its trees is forgotten.
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

PROMPT = 8  # tokens
DRAFTED = 3  # rounds: the first takes in the prompt, and runs uncompiled


class _Enough(Exception):
    """Ends a call: what was to be compiled is."""


def warmup(
    target: PreTrainedModel,
    heads: DraftingContract,
    *,
    batch_sizes: Sequence[int] = (1,),
    max_length: int | None = None,
) -> float:
    """Compiles the steps of rounds of these shapes, under a progress bar; returns the wall seconds that took.

    Args:
        target: The target of the calls to come.
        heads: Draft heads with `heads.compiled = True`.
        batch_sizes: Sequences of the calls to come. Where some end before others, those that are left are a batch of
            their own size: name those sizes as well.
        max_length: Tokens of the longest calls to come, prompts included. Calls share graphs with others whose length
            has the same power of two above it, so there are a few sizes up to this one; by default the smallest alone.

    Raises:
        ValueError: for heads that are not compiled, or sizes that are none.
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
    compiled_rounds(heads, target, target.generation_config)  # the first call of a pair leaves out what pays late
    tree = largest(trees_of_call(heads, target, DraftingOptions.of(heads)))
    shapes = [(size, capacity) for size in sizes for capacity in _capacities(tree, max_length)]
    with _left_as_it_was(heads, target):
        for size, capacity in bar(shapes, "compiling rounds"):
            _compile_rounds(target, heads, tree, size, capacity)
    return time.perf_counter() - started


def _capacities(tree: DraftTreeConfig, max_length: int | None) -> list[int]:
    """Slots of the caches of calls up to a length: powers of two."""
    largest = SMALLEST_BUCKET if max_length is None else bucket(max_length + tree.most_nodes)
    capacities = [SMALLEST_BUCKET]
    while capacities[-1] < largest:
        capacities.append(2 * capacities[-1])
    return capacities


@contextmanager
def _left_as_it_was(heads: Any, target: PreTrainedModel) -> Iterator[None]:
    """What a user sees of the heads, and what calls have learnt of trees, is the same after this."""
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
    """Rounds that draft, of no larger trees than this one, and a plain step where calls may take one."""
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
