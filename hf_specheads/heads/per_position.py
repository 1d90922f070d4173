"""The base of Medusa and Hydra heads: per draft position, a small head of residual blocks and a projection to logits.

(Medusa, arXiv 2401.10774; Hydra, arXiv 2402.05109.)
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from collections.abc import Iterable, Sequence
from typing import ClassVar, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from ..configuration import DraftHeadConfig
from ..target.projection import output_weight
from ..tree.config import DraftTreeConfig
from ..tree.published import MEDUSA_CHOICES
from ..unroll.rows import TrainingRows
from .base import DraftHead

LM_HEADS = ("own", "target")
MAX_HEADS = 256


@strict
class PerPositionHeadConfig(DraftHeadConfig):
    r"""Configuration of draft heads with one small head per draft position.

    Args:
        num_heads: Number n of heads, one per draft position.
        num_blocks: Number of blocks per head.
        tied_blocks: Whether the residual blocks of a head share one set of weights, as in the authors' code.
        lm_head: `"own"`: each head has its own projection [V, H]; `"target"`: all heads share the target's `lm_head`,
            which saves V * H parameters per head.
        trained_positions: Number of heads that were trained; `None` if unknown.
    """

    required_fields: ClassVar[tuple[str, ...]] = (*DraftHeadConfig.required_fields, "num_heads", "lm_head")

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


class ResidualBlock(nn.Linear):
    """`y = x + SiLU(W x + b)`, [..., H] -> [..., H] (Medusa, section 2.1.1)."""

    def __init__(self, width: int):
        super().__init__(width, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + nn.functional.silu(super().forward(hidden_states))


class PerPositionHead(DraftHead):
    """n heads, each with some blocks and a projection to logits, its own or the target's.

    Families define what a head reads. They build `blocks`, one list of blocks per head (the last block of a list is
    repeated up to `num_blocks`), and `lm_heads`, which is `None` if the target's `lm_head` is used.
    """

    config_class = PerPositionHeadConfig
    config: PerPositionHeadConfig
    blocks: nn.ModuleList
    lm_heads: nn.ModuleList | None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ResidualBlock):
            init.zeros_(module.weight)
            init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    @torch.no_grad()
    def start_from_target(self, target: PreTrainedModel) -> None:
        """Copies the target's `lm_head` into own projections, including the bias if both have one."""
        if self.lm_heads is None:
            return
        weight, bias = output_weight(target), getattr(target.get_output_embeddings(), "bias", None)
        for lm_head in cast(Iterable[nn.Linear], self.lm_heads):
            lm_head.weight.copy_(weight)
            if lm_head.bias is not None and bias is not None and bias.device.type != "meta":
                lm_head.bias.copy_(bias[: len(lm_head.bias)])

    def forward(self, inputs: torch.Tensor, position: int) -> torch.Tensor:
        """Runs the blocks of the head of a draft position, without its projection to logits.

        Args:
            inputs: [..., *], what the family's heads read, in any float dtype.
            position: Draft position, 0-based.

        Returns:
            Hidden states [..., H], in the dtype of the blocks.
        """
        blocks, hidden = cast(nn.ModuleList, self.blocks[position]), inputs.to(self.dtype)
        for index in range(self.config.num_blocks):
            hidden = blocks[min(index, len(blocks) - 1)](self.dropped(hidden))
        return hidden

    def dropped(self, values: torch.Tensor) -> torch.Tensor:
        """Applies dropout to the inputs of blocks and projections; families with dropout override this."""
        return values

    def position_logits(self, inputs: torch.Tensor, position: int) -> torch.Tensor:
        """Draft logits of a draft position, fp32 [..., Vd], from inputs as in [`forward`]."""
        hidden = self(inputs, position)
        return self.draft_logits(hidden) if self.lm_heads is None else self.project(hidden, position)

    def row_logits(self, rows: TrainingRows, position: int, hidden: torch.Tensor) -> torch.Tensor:
        """Draft logits of a draft position in training, from outputs of [`forward`]: [R, H] -> [R, V]."""
        hidden = self.dropped(hidden)
        return rows.lm_head(hidden) if self.lm_heads is None else self.lm_heads[position](hidden)

    def own_projections(self) -> Sequence[nn.Module]:
        return () if self.lm_heads is None else tuple(self.lm_heads)

    @property
    def borrows(self) -> bool:
        return self.lm_heads is None

    @property
    def published_tree(self) -> DraftTreeConfig:
        """Medusa's tree of 63 nodes, cut to the depth that there are heads for."""
        choices = tuple(path for path in MEDUSA_CHOICES if len(path) <= self.config.num_heads)
        return DraftTreeConfig(kind="static", choices=choices)

    @property
    def max_draft_positions(self) -> int:
        return self.config.num_heads

    @property
    def default_passes(self) -> int:
        return self.config.num_heads

    def passes_problem(self, num_passes: int) -> str | None:
        count, name = self.config.num_heads, type(self).__name__.removesuffix("Head")
        if num_passes < count:
            return f"trains {num_passes} of {count} {name} heads; set num_passes={count}, or make fewer heads."
        return super().passes_problem(num_passes)
