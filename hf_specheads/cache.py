"""Caches of a round: the draft cache of each specialist, and compaction of the target's cache."""

from __future__ import annotations

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

TREE_CACHE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)


class DraftCacheLayer(CacheLayerMixin):
    """Keys and values of one specialist, written in place into a buffer that doubles when it is full.

    Tensors: [B, heads, rows, head_dim]; the rows up to `length` are valid.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def _reserve(self, rows: int) -> None:
        if rows <= self.keys.shape[2]:
            return
        capacity = max(rows, 2 * self.keys.shape[2], 64)
        for name in ("keys", "values"):
            old = getattr(self, name)
            buffer = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
            buffer[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, buffer)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        self._reserve(end)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def crop(self, tokens_to_remove: int) -> None:
        self.length -= abs(tokens_to_remove)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.length = 0


class DraftCache(Cache):
    """Draft cache of one generation: one layer per specialist.

    Committed rows come from target features and are the same number in every specialist; drafted rows are appended
    during a round and dropped at its end (invariant: a committed row never comes from a drafted feature).

    Attributes:
        committed: Committed rows, equal to the number of committed tokens minus one.
        drafted_inputs: This round's drafted rows, fused, [B, rows, *] each, for specialists that start later.
        context_mask: bool [B, rows], `False` on padding of the prompt; `None` when there is none.
    """

    def __init__(self, num_specialists: int):
        super().__init__(layers=[DraftCacheLayer() for _ in range(num_specialists)])
        self.committed = 0
        self.drafted_inputs: list[torch.Tensor] = []
        self.context_mask: torch.Tensor | None = None

    def commit(self, rows: int) -> None:
        """Marks the rows just appended as committed."""
        self.committed += rows
        if self.context_mask is not None:
            missing = self.committed - self.context_mask.shape[1]
            ones = self.context_mask.new_ones(self.context_mask.shape[0], max(missing, 0))
            self.context_mask = torch.cat([self.context_mask, ones], dim=1)[:, : self.committed]

    def levels_in(self, specialist: int) -> int:
        """Levels of this round's drafted rows that a specialist's cache already holds."""
        rows, levels = self.layers[specialist].length - self.committed, 0
        while rows > 0:
            rows -= self.drafted_inputs[levels].shape[1]
            levels += 1
        return levels

    def drop_drafted(self) -> None:
        """Ends a round: every specialist forgets its drafted rows."""
        self.drafted_inputs = []
        for layer in self.layers:
            layer.length = min(layer.length, self.committed)


def refuse_tree_cache(cache: Cache) -> str | None:
    """Why a target cache cannot hold a draft tree, or `None` if it can.

    An allow-list: a layer class that is not known to keep every slot would compact wrongly without an error.
    """
    for layer in cache.layers:
        if type(layer) not in TREE_CACHE_LAYERS:
            return f"its cache has layers of class {type(layer).__name__}"
    return None


def compact(cache: Cache, num_nodes: int, path: torch.Tensor) -> None:
    """After a forward over `num_nodes` nodes, keeps only the cache rows of the accepted path, in path order.

    Args:
        cache: The target cache, whose last `num_nodes` rows are the tree.
        num_nodes: N, nodes of the verified tree including the root.
        path: [B, A], node indices to keep, the root first.
    """
    kept = path.shape[1]
    for layer in cache.layers:
        if isinstance(layer, DummyLayer) or not layer.is_initialized:
            continue
        first = layer.keys.shape[-2] - num_nodes
        end = first + kept
        oldest = max(end - layer.sliding_window + 1, 0) if layer.is_sliding else 0
        moved = path[:, None, 1:, None].to(layer.keys.device)  # the root's row is where it belongs
        for name in ("keys", "values"):
            states = getattr(layer, name)
            if kept > 1:
                index = moved.expand(*states.shape[:2], -1, states.shape[3])
                states[:, :, first + 1 : end] = states[:, :, first:].gather(2, index)
            setattr(layer, name, states[:, :, oldest:end])
        if layer.is_sliding:
            layer.cumulative_length -= num_nodes - kept


def stop_recording(cache: Cache) -> None:
    """Leaves the cache as plain `generate` would."""
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False
