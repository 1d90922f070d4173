"""How a sequence joins others in transformers' own cache: what its layers hold comes into a place of their batch.

In such a cache all sequences have equally many columns, so one of fewer tokens begins behind padding, as in a batch
that is padded on the left. States of recurrent layers and of convolutions have no columns, and are put in as they are.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from .layers import APPENDED

JOINED_LAYERS = (
    DummyLayer, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer, LinearAttentionLayer,
)  # fmt: skip
# Where the batch is, of tensors that have it elsewhere than in front.
BATCH = {"indexer_position_ids": 1}


def joining_problem(cache: Cache) -> str | None:
    """Why sequences cannot join and leave the batch of a cache, or `None` if they can."""
    for layer in cache.layers:
        if type(layer) not in JOINED_LAYERS:
            return f"what its cache keeps of a text in layers of class {type(layer).__name__} depends on other texts"
    return None


def put_layer(mine: CacheLayerMixin, theirs: CacheLayerMixin, place: int, columns: int) -> None:
    """The only sequence of a layer comes into the place of a sequence of another, or after its last.

    Args:
        mine, theirs: Layers of one kind. What `mine` holds is replaced, and never written into.
        place: Of the sequence.
        columns: That both have then: those of the longer one.
    """
    for name, dim in APPENDED.items():
        ours, new = getattr(mine, name, None), getattr(theirs, name, None)
        if isinstance(ours, torch.Tensor) and isinstance(new, torch.Tensor) and ours.dim() > 1:
            width = max(ours.shape[dim], new.shape[dim])
            ours, new = (_behind_zeros(states, width, dim) for states in (ours, new))
            setattr(mine, name, with_sequence(ours, new, place, BATCH.get(name, 0)))
    _count(mine, columns)
    if not isinstance(mine, LinearAttentionCacheLayerMixin):
        return
    for name in ("conv_states", "recurrent_states"):
        held = getattr(theirs, name)
        states = {index: None if state is None else with_sequence(state, held[index], place)
                  for index, state in getattr(mine, name).items()}  # fmt: skip
        setattr(mine, name, states)


def drop_columns(layer: CacheLayerMixin, columns: int) -> None:
    """Takes the oldest rows out of a layer, which only padding lies in.

    Args:
        layer: The layer.
        columns: That are left.
    """
    for name, dim in APPENDED.items():
        if isinstance(rows := getattr(layer, name, None), torch.Tensor) and rows.dim() > 1:
            kept = min(rows.shape[dim], columns)
            setattr(layer, name, rows.narrow(dim, rows.shape[dim] - kept, kept))
    _count(layer, columns)


def with_sequence(batch: torch.Tensor, one: torch.Tensor, place: int, dim: int = 0) -> torch.Tensor:
    """A batch [B, ...] with the only sequence of `one` [1, ...] in the place of one of its own, or after the last."""
    before, after = batch.narrow(dim, 0, place), batch.narrow(dim, place, batch.shape[dim] - place)
    after = after.narrow(dim, 1, after.shape[dim] - 1) if after.shape[dim] else after
    return torch.cat([before, one, after], dim=dim)


def _behind_zeros(states: torch.Tensor, width: int, dim: int) -> torch.Tensor:
    """States with so many rows, the first of them zeros."""
    shape = list(states.shape)
    shape[dim] = width - shape[dim]
    return torch.cat([states.new_zeros(shape), states], dim=dim) if shape[dim] else states


def _count(layer: CacheLayerMixin, columns: int) -> None:
    """Layers with a window hold fewer rows than columns, and count those."""
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = columns
