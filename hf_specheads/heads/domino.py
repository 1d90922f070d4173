"""Domino heads: DFlash's block, with logits corrected by a recurrent network over the tokens drafted before a slot.

    state' = GRU(e(y), state)                                y: the token before the slot; the root for the first slot
    logits of slot s after y = lm_head(h_s) + O silu(W [h_s ; state'])

e is the target's token embedding. The first `plain_positions` draft positions keep the slots' own logits.
(Domino, arXiv 2605.29707.)
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import initialization as init

from ..publishing.card.facts import Published
from ..tree.config import DraftTreeConfig
from ..unroll.rows import DraftedPass, TrainingRows
from .block_config import BlockHeadConfig
from .corrected import CorrectedBlockHead
from .dflash import DFLASH_PAPER

__all__ = ["DominoHead", "DominoHeadConfig"]

DOMINO_PAPER = "Domino, [arXiv:2605.29707](https://arxiv.org/abs/2605.29707)"


@strict
class DominoHeadConfig(BlockHeadConfig):
    r"""Configuration of Domino heads; see [`BlockHeadConfig`] for the block.

    Args:
        gru_hidden_size: Width g of the recurrent state.
        correction_rank: Rank e of the correction.
        plain_positions: Number of draft positions, from the first on, that are not corrected.
    """

    model_type = "specheads_domino"
    required_fields: ClassVar[tuple[str, ...]] = (
        *BlockHeadConfig.required_fields, "gru_hidden_size", "correction_rank", "plain_positions",
    )  # fmt: skip

    method: str = "domino"
    anchor_slot: str = "drafts"
    gru_hidden_size: int = 1024
    correction_rank: int = 256
    plain_positions: int = 1

    def validate_architecture(self) -> None:
        super().validate_architecture()
        self._validate_sizes("gru_hidden_size", "correction_rank")
        if not 0 <= self.plain_positions < self.block_size:
            raise ValueError(
                f"`plain_positions` must be from 0 to {self.block_size - 1}, less than `block_size`, got "
                f"{self.plain_positions}."
            )


class PrefixGru(nn.Module):
    """One step of a gated recurrent unit without biases, in the layout of `torch.nn.GRU`.

    Shapes: tokens [..., h], states [..., g] -> states [..., g].
    """

    def __init__(self, config: DominoHeadConfig):
        super().__init__()
        width = config.gru_hidden_size
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * width, config.hidden_size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * width, width))

    def forward(self, tokens: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        # Written out, because `nn.GRU` would break the graph of a compiled draft step.
        reset, kept, new = nn.functional.linear(tokens, self.weight_ih_l0).chunk(3, dim=-1)
        reset_by, kept_by, new_by = nn.functional.linear(state, self.weight_hh_l0).chunk(3, dim=-1)
        kept = torch.sigmoid(kept + kept_by)
        return kept * state + (1 - kept) * torch.tanh(new + torch.sigmoid(reset + reset_by) * new_by)


class DominoHead(CorrectedBlockHead):
    """Block drafter with a recurrent correction."""

    config_class = DominoHeadConfig
    config: DominoHeadConfig
    published: ClassVar[dict[str, Published]] = {"domino": Published("Domino", (DOMINO_PAPER, DFLASH_PAPER))}

    def __init__(self, config: DominoHeadConfig):
        super().__init__(config)
        self.prefix_gru = PrefixGru(config)
        rows, rank = config.hidden_size + config.gru_hidden_size, config.correction_rank
        self.embed_proj = nn.Sequential(
            nn.Linear(rows, rank, bias=False), nn.SiLU(), nn.Linear(rank, config.vocab_size, bias=False)
        )
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PrefixGru):
            bound = self.config.gru_hidden_size**-0.5  # the initialisation of PyTorch's `nn.GRU`
            init.uniform_(module.weight_ih_l0, -bound, bound)
            init.uniform_(module.weight_hh_l0, -bound, bound)

    @property
    def published_tree(self) -> DraftTreeConfig:
        """A chain of one position less than the block has rows, as the authors draft. This also holds if the root's
        slot drafts, which would allow one position more."""
        depth = self.config.block_size - 1
        return super().published_tree.replace(depth=depth, total_tokens=depth + 1)

    # ------------------------------------------------------------------ the correction
    @property
    def state_size(self) -> int:
        return self.config.gru_hidden_size

    @property
    def correction_output(self) -> nn.Linear:
        output: Any = self.embed_proj[2]
        return output

    def read_tokens(self, token_ids: torch.Tensor, embed: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The target's embeddings of the tokens, [B, K, h]."""
        return self.scaled(embed(token_ids))

    def correct(
        self, position: int, hidden: torch.Tensor, read: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.prefix_gru(read, state)
        if position < self.config.plain_positions:
            return hidden.new_zeros(*hidden.shape[:-1], self.config.correction_rank), state
        return self.embed_proj[:2](torch.cat([hidden, state], dim=-1)), state

    # ------------------------------------------------------------------ training
    def drafted_pass(self, rows: TrainingRows, position: int, held: torch.Tensor, read: torch.Tensor) -> DraftedPass:
        """Rows of a pass are [h_s ; c]. The slots' own logits are passed as `base`, for a loss of their own."""
        return replace(super().drafted_pass(rows, position, held, read), base=partial(self._base_logits, rows))

    def _base_logits(self, rows: TrainingRows, held: torch.Tensor) -> torch.Tensor:
        return self.row_logits(rows, held[..., : self.config.hidden_size])
