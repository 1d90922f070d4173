"""The cache of a recurrent or hybrid target during a generation: states are kept, restored, and caught up lazily.

A recurrent state holds the whole text, and no token can be taken out of it. So before a forward over a chain the
states are kept. If all of the chain is accepted, generation goes on from the states after it. Otherwise those from
before are restored, and the *next* forward begins with the tokens that were accepted: a wider forward, and no
additional one. All layers go back together, as all of them get these tokens again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
)
from transformers.utils import ModelOutput

from ..tree.draft_tree import DraftTree
from .layers import contents_with_states, own_rows, restore

CACHE_NAMES = ("past_key_values", "cache_params")
# Accepted tokens that wait to be caught up with; beyond, a forward that drafts nothing does it.
MOST_WAITING = 16


def cache_name(model_kwargs: dict[str, Any]) -> str:
    """Under which name `generate` prepared the cache: Mamba's is not the usual one."""
    return next((name for name in CACHE_NAMES if model_kwargs.get(name) is not None), CACHE_NAMES[0])


def tokens_in(cache: Cache, otherwise: int = 0) -> int:
    """Tokens that a cache holds; layers that are recurrent only do not count them."""
    counts = not cache.layers or any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
    return cache.get_seq_length() if counts else otherwise


def holds_tokens(cache: Cache) -> bool:
    """Whether a cache holds any tokens."""
    return tokens_in(cache) > 0 or any(
        any(layer.has_previous_state.values())
        for layer in cache.layers
        if isinstance(layer, LinearAttentionCacheLayerMixin)
    )


@dataclass
class _Forward:
    """The last forward: what it was given, and the way back.

    Attributes:
        token_ids: int64 [1, Q], tokens caught up with, then the nodes.
        first: Tokens before them.
        position: [1, 1] or [3, 1, 1], position of the first; `None` for targets that take none.
        nodes: How many of them are nodes.
        kept: How many of the tokens belong to the text.
        before: Contents of all layers before it.
    """

    token_ids: torch.Tensor
    first: int
    position: torch.Tensor | None
    nodes: int
    kept: int
    before: list[dict[str, Any]]


class RecurrentCache:
    """transformers' own cache with the way back to the states before the last forward; batch size 1.

    Args:
        stock: transformers' cache after the prefill.
        target: The target.
        name: Under which name its forward takes the cache.
        padding_mask: int or bool [1, P], 0 on padding of the prompt; `None` without padding.
        root_positions: [1, 1] or [3, 1, 1], position of the token after the prompt.
        takes_positions: Whether the target takes positions.
        tokens: Tokens of the prompt, counted as the caller counts them.
        is_seen: Whether somebody looks at the cache after the generation; otherwise nothing is caught up with then.
    """

    def __init__(
        self,
        stock: Cache,
        target: PreTrainedModel,
        name: str,
        padding_mask: torch.Tensor | None,
        root_positions: torch.Tensor,
        takes_positions: bool,
        tokens: int,
        is_seen: bool = True,
    ):
        self.stock, self.target, self.name, self.padding_mask = stock, target, name, padding_mask
        self.root_positions = root_positions if takes_positions else None
        self.counts = [tokens]
        self.is_seen = is_seen
        self._last: _Forward | None = None

    @property
    def waiting(self) -> int:
        """Accepted tokens that the states do not hold yet."""
        last = self._last
        return 0 if last is None or last.kept == last.token_ids.shape[1] else last.kept

    @property
    def must_catch_up(self) -> bool:
        """Whether the next forward should draft nothing: it commits all it is given, whatever the target says."""
        return self.waiting > MOST_WAITING

    @property
    def caught_up(self) -> bool:
        """Whether the last forward did so, and drafted nothing."""
        last = self._last
        return last is not None and last.nodes == 1 and last.token_ids.shape[1] > 1

    def verify(self, tree: DraftTree, **asked: Any) -> ModelOutput:
        """The target's forward over tokens to catch up with and a chain of N nodes; its outputs at the nodes.

        Args:
            tree: The chain.
            asked: Further arguments of the forward.
        """
        waiting = self._go_back()
        token_ids = torch.cat([waiting, tree.token_ids], dim=1)
        late = waiting.shape[1]
        position = None if self.root_positions is None else self.root_positions - late
        before = [contents_with_states(layer) for layer in self.stock.layers]
        self._last = _Forward(token_ids, self.counts[0] - late, position, tree.num_nodes, late, before)
        return at_last_rows(self._forward(token_ids, self._last.first, position, **asked), tree.num_nodes)

    def _forward(
        self, token_ids: torch.Tensor, first: int, position: torch.Tensor | None, **asked: Any
    ) -> ModelOutput:
        rows = token_ids.shape[1]
        inputs: dict[str, Any] = {self.name: self.stock, "use_cache": True, "return_dict": True}
        if self.padding_mask is not None:
            missing = first + rows - self.padding_mask.shape[1]
            inputs["attention_mask"] = torch.nn.functional.pad(self.padding_mask, (0, missing), value=1)
        if position is not None:
            inputs["position_ids"] = position + torch.arange(rows, device=position.device)
        return self.target(token_ids, **inputs, **asked)

    def _go_back(self) -> torch.Tensor:
        """Restores the states of before the last forward unless all of it is kept. Returns the tokens that the states
        lack then, int64 [1, W]."""
        last, self._last = self._last, None
        if last is None:
            return torch.zeros(1, 0, dtype=torch.long, device=self.target.device)
        if last.kept < last.token_ids.shape[1]:
            for layer, contents in zip(self.stock.layers, last.before, strict=True):
                restore(layer, contents)
            return last.token_ids[:, : last.kept]
        return last.token_ids[:, :0]

    def keep_paths(
        self, nodes: torch.Tensor, counts: list[int], device_counts: torch.Tensor, are_prefixes: bool
    ) -> None:
        """As in [`TreeCache`]; a path of a chain always is a prefix. The states stay until the next forward: how much
        of the path is emitted is not sure before."""
        if self._last is None:
            raise RuntimeError("there is no forward to keep anything of.")
        self._last.kept += counts[0]
        self.counts = [self.counts[0] + counts[0]]
        if self.root_positions is not None:
            self.root_positions = self.root_positions + counts[0]

    def select_sequences(self, kept: list[int]) -> None:
        """A chain is of one sequence, which ends with the generation."""
        raise RuntimeError("transformers' own cache holds one sequence here; there is none to leave out.")

    def give_back(self, tokens: int | None) -> None:
        """Leaves the cache as plain decoding has it after so many tokens, after an interrupted round too: with a
        forward over the accepted tokens that the states lack, if anybody looks."""
        if (last := self._last) is not None and tokens is not None:
            last.kept = max(last.kept - (self.counts[0] - tokens), 0)
        missing = self._go_back()
        if last is not None and self.is_seen and missing.shape[1] > 0:
            with torch.no_grad():
                self._forward(missing, last.first, last.position)
        for layer in self.stock.layers:
            own_rows(layer)


def at_last_rows(outputs: ModelOutput, rows: int) -> ModelOutput:
    """A forward's logits and hidden states at its last rows only."""
    outputs.logits = outputs.logits[:, -rows:]
    if outputs.hidden_states is not None:
        outputs.hidden_states = tuple(None if h is None else h[:, -rows:] for h in outputs.hidden_states)
    return outputs
