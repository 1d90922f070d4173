"""Chooses the target's cache for the rounds of a call, once transformers' own cache holds the prompt."""

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
    """Takes over the transformers cache of a call after its prefill.

    Args:
        target: The target.
        options: Settings of the call.
        batch: Number of sequences.
        model_kwargs: Keyword arguments of the call, as they are after the prefill.
        counted: The keyword arguments that tell the target its positions ([`FeatureReader.counted`]).
        tokens: Number of tokens in the cache.
        is_seen: Whether the caller can see the cache after the call.
        dtype: The target's compute dtype.
        fixed: Slots and rooms of compiled rounds; `None` for other rounds.
        budget: Most tokens that the call may emit; `None` without a limit.
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
