"""Adding a sequence to the batch of transformers' own cache, layer by layer.

All sequences of such a cache have equally many columns, so a sequence with fewer tokens begins with padding, as in a
batch that is padded on the left. States of recurrent layers and of convolutions have no columns and are copied as is.
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
# Batch dimension of tensors whose batch dimension is not the first.
BATCH = {"indexer_position_ids": 1}


def joining_problem(cache: Cache) -> str | None:
    """Says why sequences cannot join and leave the batch of a cache; `None` if they can."""
    for layer in cache.layers:
        if type(layer) not in JOINED_LAYERS:
            return f"its cache has layers of class {type(layer).__name__}, which depend on all texts of a batch"
    return None


def put_layer(mine: CacheLayerMixin, theirs: CacheLayerMixin, place: int, columns: int) -> None:
    """Puts the only sequence of layer `theirs` over sequence `place` of layer `mine`, or after the last one.

    Args:
        mine, theirs: Layers of the same class. The tensors of `mine` are replaced, never written in place.
        place: Index of the sequence to replace, or the batch size to append.
        columns: Number of columns afterwards: that of the longer layer.
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
    """Removes the oldest columns of a layer, which hold only padding.

    Args:
        layer: The layer.
        columns: Number of columns to keep.
    """
    for name, dim in APPENDED.items():
        if isinstance(rows := getattr(layer, name, None), torch.Tensor) and rows.dim() > 1:
            kept = min(rows.shape[dim], columns)
            setattr(layer, name, rows.narrow(dim, rows.shape[dim] - kept, kept))
    _count(layer, columns)


def with_sequence(batch: torch.Tensor, one: torch.Tensor, place: int, dim: int = 0) -> torch.Tensor:
    """Returns a batch [B, ...] in which `one` [1, ...] replaces entry `place` along `dim`, or follows the last."""
    before, after = batch.narrow(dim, 0, place), batch.narrow(dim, place, batch.shape[dim] - place)
    after = after.narrow(dim, 1, after.shape[dim] - 1) if after.shape[dim] else after
    return torch.cat([before, one, after], dim=dim)


def _behind_zeros(states: torch.Tensor, width: int, dim: int) -> torch.Tensor:
    """Pads states with zeros at the front of dimension `dim`, to a size of `width`."""
    shape = list(states.shape)
    shape[dim] = width - shape[dim]
    return torch.cat([states.new_zeros(shape), states], dim=dim) if shape[dim] else states


def _count(layer: CacheLayerMixin, columns: int) -> None:
    """Sets the column count of layers with a sliding window, which hold fewer rows than columns."""
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = columns
