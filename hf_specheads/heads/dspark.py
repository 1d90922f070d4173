"""DSpark heads: DFlash's block, with logits corrected for the token drafted before a slot (arXiv 2607.05147).

    g = W1[y]                              vanilla; y: the token before the slot, the root for the first slot
    g = sigmoid(G [h_s ; W1[y]]) * W1[y]   gated
    g = tanh(o), state' = sigmoid(z) state + (1 - sigmoid(z)) tanh(c), (z, c, o) = J [state ; W1[y] ; h_s]     rnn
    logits of slot s after y = lm_head(h_s) + W2 g

The state of `rnn` is 0 before the block and runs through all slots, including that of an idle root. A confidence head
predicts the probability that a draft of slot s after y is accepted; `stop_below` is compared with this prediction.
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import nn

from ..cache.draft import DraftCache
from ..publishing.card.facts import Published
from ..unroll.rows import DraftedPass, TrainingRows
from .block_config import BlockHeadConfig
from .corrected import CorrectedBlockHead
from .dflash import DFLASH_PAPER

__all__ = ["DSparkHead", "DSparkHeadConfig"]

MARKOV_HEADS = ("vanilla", "gated", "rnn")
DSPARK_PAPER = "DSpark, [arXiv:2607.05147](https://arxiv.org/abs/2607.05147)"


@strict
class DSparkHeadConfig(BlockHeadConfig):
    r"""Configuration of DSpark heads; see [`BlockHeadConfig`] for the block.

    Args:
        markov_rank: Rank r of the correction for the token before a slot.
        markov_head: How the correction is computed: `"vanilla"`, `"gated"` or `"rnn"`.
        confidence_head: Whether the heads predict how likely a draft is to be accepted.
        confidence_with_markov: Whether that prediction also reads the token before the slot.
    """

    model_type = "specheads_dspark"
    required_fields: ClassVar[tuple[str, ...]] = (
        *BlockHeadConfig.required_fields, "markov_rank", "markov_head", "confidence_head", "confidence_with_markov",
    )  # fmt: skip

    method: str = "dspark"
    block_size: int = 7
    anchor_slot: str = "drafts"
    markov_rank: int = 256
    markov_head: str = "vanilla"
    confidence_head: bool = True
    confidence_with_markov: bool = True

    def validate_architecture(self) -> None:
        super().validate_architecture()
        self._validate_sizes("markov_rank")
        if self.markov_head not in MARKOV_HEADS:
            raise ValueError(f"`markov_head` must be one of {list(MARKOV_HEADS)}, got {self.markov_head!r}.")


class MarkovHead(nn.Module):
    """Correction of a slot's logits for the token before it.

    Shapes: states of slots [..., h], embeddings W1[y] [..., r], recurrent states [..., r] -> g [..., r] and the next
    recurrent state [..., r] (used by `"rnn"` only).
    """

    def __init__(self, config: DSparkHeadConfig):
        super().__init__()
        rank, width = config.markov_rank, config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.vocab_size, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if config.markov_head == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank) if config.markov_head == "rnn" else None

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.gate_proj is not None:
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded, state
        if self.joint_proj is None:
            return embedded, state
        kept, new, out = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        kept = torch.sigmoid(kept)
        return torch.tanh(out), kept * state + (1 - kept) * torch.tanh(new)


class ConfidenceHead(nn.Module):
    """Linear map to the logit of a draft's acceptance: [..., h] or [..., h + r] -> [...]."""

    def __init__(self, inputs: int):
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.proj(inputs)[..., 0]


class DSparkHead(CorrectedBlockHead):
    """Block drafter with a Markov head and a confidence head."""

    config_class = DSparkHeadConfig
    config: DSparkHeadConfig
    published: ClassVar[dict[str, Published]] = {"dspark": Published("DSpark", (DSPARK_PAPER, DFLASH_PAPER))}

    def __init__(self, config: DSparkHeadConfig):
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        self.confidence_head = None
        if config.confidence_head:
            extra = config.markov_rank if config.confidence_with_markov else 0
            self.confidence_head = ConfidenceHead(config.hidden_size + extra)
        self.post_init()

    @property
    def predicts_acceptance(self) -> bool:
        return self.confidence_head is not None

    # ------------------------------------------------------------------ the correction
    @property
    def state_size(self) -> int:
        return self.config.markov_rank

    @property
    def correction_output(self) -> nn.Linear:
        return self.markov_head.markov_w2

    def read_tokens(self, token_ids: torch.Tensor, embed: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """W1[y], [B, K, r]."""
        return self.markov_head.markov_w1(token_ids)

    def correct(
        self, position: int, hidden: torch.Tensor, read: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.markov_head(hidden, read, state)

    def first_state(
        self, hidden: torch.Tensor, roots: torch.Tensor, embed: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Zeros, except for `"rnn"` with an idle root, whose state has already read the root's slot. Such heads come
        from `speculators`, which carries the state through all slots of a block (in DeepSpec's heads the root's slot
        drafts)."""
        state = super().first_state(hidden, roots, embed)
        if self.config.first_slot == 0 or self.config.markov_head != "rnn":
            return state
        read = self.read_tokens(roots, embed).to(hidden.device)
        return self.markov_head(hidden, read, state)[1]

    # ------------------------------------------------------------------ predicted acceptance
    def predicted_acceptance(self, cache: DraftCache, position: int, token_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.slot_states(cache, position).expand(-1, token_ids.shape[1], -1)
        return torch.sigmoid(self.confidence(hidden, self.markov_head.markov_w1(token_ids)).float())

    def confidence(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Logits [...] of acceptance, from states of slots [..., h] and W1[y] [..., r]."""
        if self.confidence_head is None:
            raise RuntimeError("these heads have no confidence head; check `heads.predicts_acceptance` first.")
        if self.config.confidence_with_markov:
            return self.confidence_head(torch.cat([hidden, embedded], dim=-1))
        return self.confidence_head(hidden)

    def drafted_pass(self, rows: TrainingRows, position: int, held: torch.Tensor, read: torch.Tensor) -> DraftedPass:
        """Rows of a pass are [h_s ; g ; W1[y]]."""
        drafted = super().drafted_pass(rows, position, torch.cat([held, read], dim=-1), read)
        return replace(drafted, confidence=self._row_confidence) if self.predicts_acceptance else drafted

    def _row_confidence(self, held: torch.Tensor) -> torch.Tensor:
        return self.confidence(held[..., : self.config.hidden_size], held[..., -self.config.markov_rank :])
