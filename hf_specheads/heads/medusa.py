"""Medusa heads: one small head per draft position, all reading the last committed feature (arXiv 2401.10774).

Head i predicts the token i + 2 places after the feature's own token, whatever was drafted in between. There is no
recurrence and no draft cache. A tree is the product of the heads' distributions, so every node of a level has the same
children.
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import nn

from ..cache.draft import DraftCache
from ..publishing.card.facts import Published
from ..unroll.rows import DraftedPass, TrainingRows
from .per_position import PerPositionHead, PerPositionHeadConfig, ResidualBlock

__all__ = ["MedusaHead", "MedusaHeadConfig"]

MEDUSA_PAPER = (
    "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, "
    "[arXiv:2401.10774](https://arxiv.org/abs/2401.10774)"
)


@strict
class MedusaHeadConfig(PerPositionHeadConfig):
    r"""Configuration of Medusa heads.

    Args:
        num_heads: Number n of heads, one per draft position.
        num_blocks: Number of residual blocks per head.
        tied_blocks: Whether all blocks of a head share one set of weights, as in the authors' code.
        lm_head: `"own"`: each head has its own projection [V, H] (the paper, and all published weights); `"target"`:
            all heads share the target's `lm_head` (the authors' later trainer), which saves V * H parameters per head.
        trained_positions: Number of heads that were trained; `None` if unknown.
    """

    model_type = "specheads_medusa"

    method: str = "medusa"


class MedusaHead(PerPositionHead):
    """n heads, `logits_i = lm_head_i(blocks_i(f))` with f the target's feature of the last committed token.

    In fresh heads for a target, the blocks are the identity and own projections are copies of the target's `lm_head`.
    """

    config_class = MedusaHeadConfig
    config: MedusaHeadConfig
    published: ClassVar[dict[str, Published]] = {"medusa": Published("Medusa", (MEDUSA_PAPER,))}

    def __init__(self, config: MedusaHeadConfig):
        super().__init__(config)
        stored = 1 if config.tied_blocks else config.num_blocks
        self.blocks = nn.ModuleList(
            nn.ModuleList(ResidualBlock(config.hidden_size) for _ in range(stored)) for _ in range(config.num_heads)
        )
        self.lm_heads = None
        if config.lm_head == "own":
            self.lm_heads = nn.ModuleList(
                nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(config.num_heads)
            )
        self.post_init()

    # ------------------------------------------------------------------ drafting
    @property
    def independent_positions(self) -> bool:
        return True

    def new_draft_cache(self) -> DraftCache:
        """Cache that only counts committed rows, because no head looks further back than the last one."""
        return DraftCache(0)

    def start_draft(
        self, cache: DraftCache, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in the contract. The state of every node is the feature of the last committed token, [B, 1, H]."""
        cache.commit(features.shape[1])
        last = features[:, -1:]
        return last, self.position_logits(last, 0)

    def extend_draft(
        self,
        cache: DraftCache,
        position: int,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in the contract. All nodes of a level have the same state and the same logits, computed once."""
        logits = self.position_logits(features[:, :1], position)
        return features, logits.expand(-1, token_ids.shape[1], -1)

    # ------------------------------------------------------------------ training
    def unroll(self, rows: TrainingRows, num_passes: int) -> Iterator[DraftedPass]:
        """Pass i runs head i at every row, to predict what the target says i rows later."""
        for position in range(num_passes):
            yield DraftedPass(hidden=rows.features, logits=partial(self._logits_of, rows, position), offset=position)

    def _logits_of(self, rows: TrainingRows, position: int, features: torch.Tensor) -> torch.Tensor:
        return self.row_logits(rows, position, self(features, position))
