"""EAGLE-1/2 and HASS heads, and the machinery POSS shares: layers over `fc([embedding ; feature])`.

EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858), HASS (arXiv 2408.15766). The three share one architecture:
they differ in training (HASS) and in the tree (EAGLE-2).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..cache import DraftCache
from ..configuration import EagleHeadConfig
from ..layers import DraftDecoderLayer
from ..modeling import DraftHead


class EagleHead(DraftHead):
    """One-layer draft head: `g = layer(fc([e(x_{j+1}) ; f_j]))`, logits = target `lm_head(g)`, g is fed back.

    No norm before attention, no final norm; embedding and `lm_head` are the target's.
    """

    config_class = EagleHeadConfig
    config: EagleHeadConfig

    def __init__(self, config: EagleHeadConfig):
        super().__init__(config)
        self.fc = nn.Linear(config.embedding_size + config.feature_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(DraftDecoderLayer(config, index) for index in range(config.num_specialists))
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()

    def specialist_of(self, position: int) -> int:
        """Specialist in charge of draft position `position` (0-based); the last one continues past its positions."""
        return min(position // self.config.positions_per_specialist, self.config.num_specialists - 1)

    def fuse(self, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """`fc([embedding ; feature])`: [B, R, E] and [B, R, H] -> [B, R, h]."""
        dtype = self.fc.weight.dtype
        return self.fc(torch.cat([embeddings.to(dtype), features.to(dtype)], dim=-1))

    def forward(
        self,
        fused: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        specialist: int = 0,
        num_queries: int | None = None,
        attention_function: Callable | None = None,
    ) -> torch.Tensor:
        """One specialist over rows to append: the only forward, for prefill, drafting and training.

        Args:
            fused: [B, R, h], rows from [`fuse`].
            position_ids: [B, R], rope positions of the rows.
            attention_mask: Additive float [B, 1, Q, cached + R] over cached and new rows; `None` only for one query
                that sees everything, or for Q = R rows of plain causal attention on an empty cache.
            past_key_values: Cache to append to, or `None`.
            specialist: Index of the decoder layer.
            num_queries: Q, how many of the last rows to compute outputs for; default all, 0 only fills the cache.
            attention_function: Replacement for the attention implementation, of transformers' signature.

        Returns:
            Drafted features of the last Q rows, [B, Q, h].
        """
        rotary = self.rotary_emb(fused, position_ids)
        queries = fused.shape[1] if num_queries is None else num_queries
        layer = self.layers[specialist]
        return layer(fused, rotary, attention_mask, past_key_values, queries, attention_function)

    # ------------------------------------------------------------------ drafting
    def new_draft_cache(self) -> DraftCache:
        return DraftCache(self.config.num_specialists)

    def start_draft(
        self, cache: DraftCache, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache.drop_drafted()
        fused = self.fuse(self.borrowed.embed_tokens(token_ids).to(features.device), features)
        rows = fused.shape[1]
        positions = self._positions(fused, cache.committed)
        mask = self._context_mask(cache, rows, fused)
        drafted = self(fused, positions, mask, cache, specialist=0, num_queries=1)
        # Every later specialist in use commits the same rows, so that it is ready whenever its first position comes.
        for specialist in range(1, self.specialist_of(self.tree_config.depth - 1) + 1):
            self(fused, positions, None, cache, specialist, num_queries=0)
        cache.commit(rows)
        return drafted, self.draft_logits(drafted)

    def extend_draft(
        self,
        cache: DraftCache,
        position: int,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        visible: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        nodes = token_ids.shape[1]
        fused = self.fuse(self.borrowed.embed_tokens(token_ids).to(features.device), features)
        cache.drafted_inputs.append(fused)
        specialist = self.specialist_of(position)
        # A specialist that starts here takes over the earlier levels first: their rows were never in its cache.
        levels_cached = (cache.layers[specialist].length - cache.committed) // nodes
        rows = torch.cat(cache.drafted_inputs[levels_cached:], dim=1)
        levels = torch.arange(levels_cached, position, device=fused.device).repeat_interleave(nodes)
        positions = (cache.committed + levels)[None].expand(fused.shape[0], -1)
        mask = self._tree_mask(cache, visible, fused)
        drafted = self(rows, positions, mask, cache, specialist, num_queries=nodes)
        return drafted, self.draft_logits(drafted)

    @staticmethod
    def _positions(rows: torch.Tensor, first: int) -> torch.Tensor:
        return torch.arange(first, first + rows.shape[1], device=rows.device)[None].expand(rows.shape[0], -1)

    @staticmethod
    def _context_mask(cache: DraftCache, rows: int, like: torch.Tensor) -> torch.Tensor | None:
        """Mask of the last committed row, which sees every row but padding: `None` if there is no padding."""
        if cache.context_mask is None:
            return None
        seen = cache.context_mask.new_ones(like.shape[0], cache.committed + rows)
        known = min(seen.shape[1], cache.context_mask.shape[1])
        seen[:, :known] = cache.context_mask[:, :known]
        return additive_mask(seen[:, None, None], like.dtype)

    @staticmethod
    def _tree_mask(cache: DraftCache, visible: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """[B, 1, K, committed + drafted rows]: all committed rows but padding, and the node's own ancestors."""
        batch, nodes, _ = visible.shape
        context = visible.new_ones(batch, nodes, cache.committed)
        if cache.context_mask is not None:
            context = context & cache.context_mask[:, None]
        return additive_mask(torch.cat([context, visible], dim=-1)[:, None], like.dtype)


def additive_mask(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where allowed, the most negative number elsewhere (eager attention silently mishandles boolean masks)."""
    zero = torch.zeros((), dtype=dtype, device=allowed.device)
    return torch.where(allowed, zero, torch.finfo(dtype).min)
