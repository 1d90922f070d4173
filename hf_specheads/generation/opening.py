"""Which cache a call's rounds have, once transformers' own holds the prompt."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache.chain import ChainCache
from ..cache.names import cache_name
from ..cache.recurrent import RecurrentCache
from ..cache.rooms import Rooms
from ..cache.target import TreeCache, root_positions_of
from .options import DraftingOptions
from .refusals import rounds_go_back, tree_problem_of

TargetCache = TreeCache | ChainCache | RecurrentCache


def open_cache(
    target: PreTrainedModel,
    options: DraftingOptions,
    batch: int,
    model_kwargs: dict[str, Any],
    counted: dict[str, Any],
    tokens: int,
    is_seen: bool,
    dtype: torch.dtype,
    fixed: tuple[int, Rooms | None] | None,
    budget: int | None,
) -> TargetCache:
    """Takes over the target's cache of a call.

    Args:
        target: The target.
        options: Of the call.
        batch: Sequences.
        model_kwargs: As after the prefill.
        counted: Those by which the target knows positions.
        tokens: In the cache.
        is_seen: Whether somebody looks at it after the call.
        dtype: The target's compute dtype.
        fixed: Slots and rooms of compiled rounds.
        budget: Tokens the call may emit, `None` without a limit.
    """
    name = cache_name(model_kwargs)
    stock, mask = model_kwargs[name], model_kwargs.get("attention_mask")
    positions = root_positions_of(counted, tokens, target.device)
    takes_positions = model_kwargs.get("position_ids") is not None
    if rounds_go_back(target, options, batch, stock):
        return RecurrentCache(stock, target, name, mask, positions, takes_positions, tokens, is_seen, batch)
    if options.tree.is_chain and tree_problem_of(target, stock):
        return ChainCache(stock, mask, positions, takes_positions)
    capacity, rooms = (None, None) if fixed is None else fixed
    most = None if budget is None else tokens + budget + options.tree.most_nodes
    return TreeCache(stock, target, batch, mask, positions, dtype, capacity, rooms, is_seen and batch > 1, most)
