"""Slots for layers with sparse attention whose indexer has keys of its own (DeepSeek V3.2, GLM-5)."""

from __future__ import annotations

import torch

from .slots import SlotCacheLayer

INDEXER_KEYS = "indexer_keys"


class IndexedSlotLayer(SlotCacheLayer):
    """A [`SlotCacheLayer`] that also holds the keys of the layer's indexer, if the layer has one.

    Attributes:
        indexer_keys: [B, 1, capacity, index_head_dim]; `None` for layers without an indexer and before the first row.
    """

    indexer_keys: torch.Tensor | None = None

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Writes the indexer's keys of R rows [B, R, index_head_dim] to the same slots as their attention keys.

        Returns:
            The indexer's keys of the visible slots, [B, shown, index_head_dim].
        """
        rows = indexer_key_states[:, None]
        keys = self._begin(rows) if self.indexer_keys is None else self.indexer_keys
        self.cache.write(keys, rows)
        first, end = self.cache.shown(self.window)
        return keys[:, 0, first:end]

    def _begin(self, rows: torch.Tensor) -> torch.Tensor:
        self.indexer_keys = self._buffer(INDEXER_KEYS, rows, self.cache.capacity)
        self.names = (*SlotCacheLayer.names, INDEXER_KEYS)
        return self.indexer_keys

    def put_sequence(self, place: int, other: SlotCacheLayer, batch: int) -> None:
        theirs = getattr(other, INDEXER_KEYS, None)
        if self.indexer_keys is None and theirs is not None:
            self._begin(theirs.expand(batch, -1, -1, -1))
        super().put_sequence(place, other, batch)

    def reset(self) -> None:
        super().reset()
        self.indexer_keys, self.names = None, SlotCacheLayer.names
