"""Medusa heads: one small head per draft position, all on the last committed feature (arXiv 2401.10774).

Head i predicts the token i + 2 places after the feature's own, whatever was drafted in between: no recurrence, no
draft cache. A tree is the product of what the heads say, so every node of a level has the same children.
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from ..cache.draft import DraftCache
from ..configuration import DraftHeadConfig
from ..publishing.card.facts import Published
from ..target.projection import output_weight
from ..tree.config import DraftTreeConfig
from ..tree.published import MEDUSA_CHOICES
from ..unroll.rows import DraftedPass, TrainingRows
from .base import DraftHead

LM_HEADS = ("own", "target")

MAX_HEADS = 256


@strict
class MedusaHeadConfig(DraftHeadConfig):
    r"""Configuration of Medusa heads.

    Args:
        num_heads: Heads n, one per draft position.
        num_blocks: Residual blocks per head.
        tied_blocks: Whether the blocks of a head are one and the same, as the authors' code makes them.
        lm_head: `"own"`: each head has a projection [V, H] of its own (the paper, and all published weights);
            `"target"`: they share the target's `lm_head` (the authors' later trainer), V * H parameters fewer per
            head.
        trained_positions: Heads that were trained, `None` if unknown.
    """

    model_type = "specheads_medusa"
    required_fields: ClassVar[tuple[str, ...]] = (*DraftHeadConfig.required_fields, "num_heads", "lm_head")

    method: str = "medusa"
    num_heads: int = 4
    num_blocks: int = 1
    tied_blocks: bool = True
    lm_head: str = "own"
    trained_positions: int | None = None

    def validate_architecture(self) -> None:
        super().validate_architecture()
        if self.hidden_size != self.feature_size:
            raise ValueError(
                f"the blocks keep the feature's width, so `hidden_size` ({self.hidden_size}) must equal "
                f"`feature_size` ({self.feature_size})."
            )
        for name in ("num_heads", "num_blocks"):
            if not 1 <= getattr(self, name) <= MAX_HEADS:
                raise ValueError(f"`{name}` must be between 1 and {MAX_HEADS}, got {getattr(self, name)}.")
        if self.lm_head not in LM_HEADS:
            raise ValueError(f"`lm_head` must be one of {list(LM_HEADS)}, got {self.lm_head!r}.")


def default_tree(num_heads: int) -> DraftTreeConfig:
    """The authors' 63 nodes, as deep as there are heads."""
    return DraftTreeConfig(kind="static", choices=tuple(path for path in MEDUSA_CHOICES if len(path) <= num_heads))


MEDUSA_PAPER = (
    "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads, "
    "[arXiv:2401.10774](https://arxiv.org/abs/2401.10774)"
)


class ResidualBlock(nn.Linear):
    """`y = x + SiLU(W x + b)`, [..., H] -> [..., H] (Medusa, section 2.1.1)."""

    def __init__(self, width: int):
        super().__init__(width, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + nn.functional.silu(super().forward(hidden_states))


class MedusaHead(DraftHead):
    """n heads, `logits_i = lm_head_i(blocks_i(f))` with f the target's feature of the last committed token.

    Freshly made for a target, the blocks are the identity and own projections are the target's `lm_head`.
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

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ResidualBlock):
            init.zeros_(module.weight)
            init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    @torch.no_grad()
    def start_from_target(self, target: PreTrainedModel) -> None:
        """Own projections start as the target's `lm_head` (without its bias, if it has one)."""
        if self.lm_heads is None:
            return
        weight = output_weight(target)
        for lm_head in self.lm_heads:
            lm_head.weight.copy_(weight)

    def forward(self, features: torch.Tensor, position: int) -> torch.Tensor:
        """What the head of a draft position makes of features, before its projection to logits.

        Args:
            features: [..., H], of the target, any float dtype.
            position: Draft position, 0-based.

        Returns:
            [..., H], in the dtype of the blocks.
        """
        blocks = self.blocks[position]
        hidden = features.to(blocks[0].weight.dtype)
        for index in range(self.config.num_blocks):
            hidden = blocks[0 if self.config.tied_blocks else index](hidden)
        return hidden

    def position_logits(self, features: torch.Tensor, position: int) -> torch.Tensor:
        """Draft logits of a draft position in fp32, [..., H] -> [..., Vd]."""
        hidden = self(features, position)
        return self.draft_logits(hidden) if self.lm_heads is None else self.project(hidden, position)

    def own_projections(self) -> Sequence[nn.Module]:
        return self.lm_heads or ()

    # ------------------------------------------------------------------ drafting
    @property
    def published_tree(self) -> DraftTreeConfig:
        return default_tree(self.config.num_heads)

    @property
    def max_draft_positions(self) -> int:
        return self.config.num_heads

    def new_draft_cache(self) -> DraftCache:
        """Only counts committed rows: no head looks further back than the last one."""
        return DraftCache(0)

    def start_draft(
        self, cache: DraftCache, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in the contract; the state of every node is the feature of the last committed token, [B, 1, H]."""
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
        """As in the contract; all nodes of a level have the same state and the same logits, computed once."""
        logits = self.position_logits(features[:, :1], position)
        return features, logits.expand(-1, token_ids.shape[1], -1)

    # ------------------------------------------------------------------ training
    @property
    def default_passes(self) -> int:
        return self.config.num_heads

    def passes_problem(self, num_passes: int) -> str | None:
        if num_passes < self.config.num_heads:
            count = self.config.num_heads
            return f"trains {num_passes} of {count} Medusa heads; set num_passes={count}, or make fewer heads."
        return super().passes_problem(num_passes)

    def unroll(self, rows: TrainingRows, num_passes: int) -> Iterator[DraftedPass]:
        """Pass i is head i at every row; it says what the target says i rows later."""
        for position in range(num_passes):
            yield DraftedPass(hidden=rows.features, logits=partial(self._logits_of, rows, position), offset=position)

    def _logits_of(self, rows: TrainingRows, position: int, features: torch.Tensor) -> torch.Tensor:
        hidden = self(features, position)
        return rows.lm_head(hidden) if self.lm_heads is None else self.lm_heads[position](hidden)
