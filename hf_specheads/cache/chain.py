"""The cache of a target that cannot verify trees: chains are verified in it, and their rejected tokens removed."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from ..tree.draft_tree import DraftTree
from .layers import contents_of, own_rows, restore
from .masks import tree_position_ids
from .names import CACHE_NAME


class ChainCache:
    """Wraps transformers' own cache and removes the rejected tokens of verified chains from it; batch size 1.

    The arguments are those of [`target.TreeCache`]; `takes_positions` says whether the target takes positions.
    """

    def __init__(
        self, stock: Cache, padding_mask: torch.Tensor | None, root_positions: torch.Tensor, takes_positions: bool
    ):
        self.stock, self.padding_mask = stock, padding_mask
        self.root_positions = root_positions if takes_positions else None
        self.counts = [stock.get_seq_length()]
        # State of the last forward while its rejected rows are still in the layers: its number of nodes, how many of
        # them are kept (`None` until verification has said so), and the contents of the layers before it.
        self._nodes = 0
        self._kept: int | None = None
        self._before: list[dict[str, Any]] = []
        stock.activate_past_recording()  # only after the prefill, or sliding layers would keep the whole prompt

    def forward_inputs(self, tree: DraftTree) -> dict[str, Any]:
        """Returns the arguments of the target's forward over a chain."""
        self._drop_rejected()
        inputs: dict[str, Any] = {"attention_mask": self.padding_mask, CACHE_NAME: self.stock}
        if self.padding_mask is not None:
            longer = self.counts[0] + tree.num_nodes - self.padding_mask.shape[1]
            inputs["attention_mask"] = torch.nn.functional.pad(self.padding_mask, (0, longer), value=1)
        if self.root_positions is not None:
            inputs["position_ids"] = tree_position_ids(self.root_positions, tree)
        self._nodes = tree.num_nodes
        self._before = [contents_of(layer) for layer in self.stock.layers]
        return inputs

    def _drop_rejected(self, uncommitted: int = 0) -> None:
        """Removes the rejected rows of the last forward from the layers, and the last `uncommitted` kept rows."""
        if self._kept is not None:
            # Even crop(0) has an effect: it trims sliding layers back to their window.
            self.stock.crop(self._kept - uncommitted - self._nodes)
        self._nodes, self._kept, self._before = 0, None, []

    def keep_paths(
        self, nodes: torch.Tensor, counts: list[int], device_counts: torch.Tensor, are_prefixes: bool
    ) -> None:
        """Commits the accepted path, see [`TreeCache.keep_paths`]; a path of a chain always is a prefix.

        The rejected rows stay in the layers until the next forward, because until then the round may still emit less
        than the whole path.
        """
        longer = [self.counts[0] + counts[0]]
        self._kept, self._before, self.counts = counts[0], [], longer  # in one statement, in case of an interrupt
        if self.root_positions is not None:
            self.root_positions = self.root_positions + counts[0]

    def select_sequences(self, kept: list[int]) -> None:
        """Always raises: the cache holds a single sequence, which ends with the generation.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("transformers' own cache holds a single sequence here, which cannot be removed.")

    def give_back(self, tokens: int | None, text: torch.Tensor | None = None) -> None:
        """Leaves the cache as plain decoding would after `tokens` tokens, even if a round was interrupted."""
        if self._kept is None:
            for layer, contents in zip(self.stock.layers, self._before, strict=False):
                restore(layer, contents)
        self._drop_rejected(0 if tokens is None else self.counts[0] - tokens)
        for layer in self.stock.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False
            own_rows(layer)
