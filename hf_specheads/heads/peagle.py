"""P-EAGLE: EAGLE-3 that drafts all positions in one forward, with mask rows in place of unknown tokens.

    rows       (x_1, f_0) ... (x_n, f_{n-1}), then (mask token, mask feature) at positions n, n + 1, ...
    layer 0    EAGLE-3's, over [norm(embedding) ; norm(fc(feature))]; further layers are ordinary ones
    logits     the last true row drafts position 1, the d-th mask row position d + 1

All rows attend causally; only the true rows stay in the cache. (P-EAGLE, arXiv 2602.01469.) No position depends on
what was drafted before it, so every node of a level has the same children, as with Medusa heads.
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..cache.draft import DraftCache, Rotary
from ..cache.masks import additive_mask
from ..publishing.card.facts import Published
from ..tree.config import DraftTreeConfig
from ..unroll.attention import Documents, StreamAttention, StreamCache
from ..unroll.rows import DraftedPass, TrainingRows
from .base import DraftHead
from .eagle3 import EAGLE3_PAPER, Eagle3Head, Eagle3HeadConfig
from .layers import Eagle3DecoderLayer, NormedDecoderLayer
from .specialists import SpecialistHeadConfig

__all__ = ["PEagleHead", "PEagleHeadConfig"]

PEAGLE_PAPER = (
    "P-EAGLE: Parallel-Drafting EAGLE with Scalable Training, [arXiv:2602.01469](https://arxiv.org/abs/2602.01469)"
)
PEAGLE_FIELDS = ("num_hidden_layers", "mask_token_id", "trained_positions")


@strict
class PEagleHeadConfig(Eagle3HeadConfig):
    r"""Configuration of P-EAGLE heads; see [`Eagle3HeadConfig`] for the other fields.

    Args:
        num_hidden_layers: Number of stacked decoder layers; the first is EAGLE-3's.
        mask_token_id: Token whose embedding a mask row reads.
        trained_positions: Number of draft positions in training; `None` if unknown. Further positions can be drafted,
            but badly.
    """

    model_type = "specheads_peagle"
    required_fields: ClassVar[tuple[str, ...]] = (
        *Eagle3HeadConfig.required_fields, "num_hidden_layers", "mask_token_id",
    )  # fmt: skip

    method: str = "peagle"
    num_hidden_layers: int = 4
    mask_token_id: int = 0

    @classmethod
    def fields_for_target(cls, target: PreTrainedModel, method: str) -> dict[str, Any]:
        # The last token of a vocabulary is padding or rare, and the heads can train their own embedding of it.
        fields = super().fields_for_target(target, method)
        return {**fields, "mask_token_id": fields["vocab_size"] - 1, "own_embedding": True}

    def validate_architecture(self) -> None:
        super().validate_architecture()
        if not 1 <= self.num_hidden_layers <= 64:
            raise ValueError(f"`num_hidden_layers` must be between 1 and 64, got {self.num_hidden_layers}.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` must be at least 0 and less than `vocab_size` ({self.vocab_size}), got "
                f"{self.mask_token_id}."
            )


class PEagleHead(Eagle3Head):
    """EAGLE-3's rows and vocabulary, several layers, and `mask_hidden`, a learnt feature for mask rows."""

    config_class = PEagleHeadConfig
    config: PEagleHeadConfig
    published: ClassVar[dict[str, Published]] = {"peagle": Published("P-EAGLE", (PEAGLE_PAPER, EAGLE3_PAPER))}
    _no_split_modules = ["Eagle3DecoderLayer", "NormedDecoderLayer"]

    def __init__(self, config: PEagleHeadConfig):
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.fc.in_features))

    def build_layers(self, config: SpecialistHeadConfig) -> nn.ModuleList:
        assert isinstance(config, PEagleHeadConfig)
        rest = (NormedDecoderLayer(config, index) for index in range(1, config.num_hidden_layers))
        return nn.ModuleList([Eagle3DecoderLayer(config, 0), *rest])

    # ------------------------------------------------------------------ rows
    def forward(
        self,
        fused: torch.Tensor,
        position_ids: torch.Tensor | Rotary,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        specialist: int = 0,
        num_queries: int | None = None,
        attention_function: Callable | None = None,
    ) -> torch.Tensor:
        """Runs all layers over rows to append. Arguments are as in [`SpecialistHead.forward`], except that
        `attention_mask` covers all R rows as queries, and that there is a single specialist.

        Returns:
            Drafted states of the last Q rows, [B, Q, h].
        """
        rotary, rows = self.rotary_of(fused, position_ids), fused.shape[1]
        states, last = fused, len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            queries = rows if index < last or num_queries is None else num_queries
            mask = None if attention_mask is None else attention_mask[:, :, -queries:]
            states = layer(states, rotary, mask, past_key_values, queries, attention_function)
        return self.drafted_state(states)

    def mask_rows(self, batch: int, count: int, like: torch.Tensor) -> torch.Tensor:
        """Mask rows, [B, count, E + h]."""
        token_ids = torch.full((1, 1), self.config.mask_token_id, device=like.device)
        row = self.fuse(self.embed(token_ids, like.device), self.mask_hidden)
        return row.expand(batch, count, -1)

    # ------------------------------------------------------------------ drafting
    @property
    def independent_positions(self) -> bool:
        return True

    @property
    def drafts_in_one_forward(self) -> bool:
        return True

    @property
    def link_layers(self) -> None:
        """None, because all positions are drafted at once."""
        return None

    def draft_rows(self, tree: DraftTreeConfig) -> int:
        """Number of positions that one forward drafts, at least two."""
        return max(tree.depth, 2)

    def new_draft_cache(self) -> DraftCache:
        return DraftCache(self.config.num_hidden_layers)

    def start_draft(
        self, cache: DraftCache, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in the contract. The state of every node is that of all positions, [B, 1, D * h]; the logits of all
        positions are computed here at once."""
        fused = self.fuse(self.embed(token_ids[:, 1:], features.device), features)
        slots = max(cache.levels or cache.deepest or self.tree_config.depth, 2)
        batch, rows = fused.shape[:2]
        fused = torch.cat([fused, self.mask_rows(batch, slots - 1, fused)], dim=1)
        positions = cache.open_rows(rows, fused.device, slots - 1).expand(batch, -1)
        shown = torch.arange(cache.shown()[1], device=fused.device)
        mask = additive_mask((shown <= positions[..., None])[:, None], fused.dtype)
        drafted = self(fused, positions, mask, cache, num_queries=slots)
        cache.commit(rows)
        cache.drafted_inputs = [self.draft_logits(drafted)]
        return drafted.flatten(1)[:, None], cache.drafted_inputs[0][:, :1]

    def extend_draft(
        self,
        cache: DraftCache,
        position: int,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in the contract. All nodes of a level have the same state and the same logits."""
        (logits,) = cache.drafted_inputs
        return features, logits[:, position : position + 1].expand(-1, token_ids.shape[1], -1)

    def drafted_logits(self, cache: DraftCache, depth: int) -> torch.Tensor | None:
        (logits,) = cache.drafted_inputs
        return logits[:, :depth] if depth <= logits.shape[1] else None

    # ------------------------------------------------------------------ training
    def unroll(self, rows: TrainingRows, num_passes: int) -> Iterator[DraftedPass]:
        """Row t is the last true row in every pass. Pass 0 yields row t itself, pass i the i-th mask row after it, at
        rope position t + i, which sees the true rows up to t and the mask rows after row t from earlier passes.

        The authors' training keeps only some rows of later passes (conditional drop-out); here every pass keeps all.
        """
        documents, length = Documents(rows.documents), rows.features.shape[1]
        embeddings = rows.embed(rows.next_token_ids) if self.embed_tokens is None else self.embed(
            rows.next_token_ids, rows.features.device
        )  # fmt: skip
        fused, cache = self.fuse(embeddings, rows.features), StreamCache(length)
        for position in range(num_passes):
            states = self(
                fused,
                rows.position_ids + position,
                past_key_values=cache,  # type: ignore[arg-type]  # it has the methods layers call
                num_queries=length,
                attention_function=StreamAttention(documents, position + 1, own_rows=True),
            )
            yield DraftedPass(hidden=states, logits=self.draft_logits, offset=position)
            fused = self.mask_rows(len(fused), length, fused)

    @classmethod
    def fields_of_source(cls, source: DraftHead) -> dict[str, Any]:
        fields = super().fields_of_source(source)
        return fields | {name: value for name in PEAGLE_FIELDS if (value := getattr(source.config, name, None))}
