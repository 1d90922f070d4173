"""The training contract: what a head trains on, and what it drafts at every row of a batch, one draft position a pass.

`DraftHead.unroll` is a generator of passes. Rows are teacher-forced: row t holds the target's feature at t and knows
the token at t + 1; pass m says what the head drafts m positions after that. Losses are the trainer's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .streams import document_starts


@dataclass(frozen=True)
class TrainingRows:
    """T rows of B sequences.

    Attributes:
        features: [B, T, F], target features the head reads (noise included, if there is any).
        token_ids: int64 [B, T], the token of each row; `None` if nobody knows, for heads that do not ask.
        next_token_ids: int64 [B, T], the token after each row.
        documents: int64 [B, T], equal within a document, -1 on padding; no row may read across documents.
        position_ids: int64 [B, T], rope positions, from 0 in every document.
        embed: The target's token embedding, ids [B, T] -> [B, T, E].
        lm_head: The target's `lm_head`, features [..., H] -> logits [..., V].
        upstream_masking: The masks of HASS's and PosS's training code, for parity tests.
        anchors: int64 [B, A], rows at which a round starts, for heads that draft at sampled rows only; -1 where a
            sequence has fewer. `None`: at every row.
        separate_backward: The caller runs one backward per pass before asking for the next; gradients at rows that
            passes share are then gathered, and sent on when the generator ends.
    """

    features: torch.Tensor
    token_ids: torch.Tensor | None
    next_token_ids: torch.Tensor
    documents: torch.Tensor
    position_ids: torch.Tensor
    embed: Callable[[torch.Tensor], torch.Tensor]
    lm_head: Callable[[torch.Tensor], torch.Tensor]
    upstream_masking: bool = False
    separate_backward: bool = False
    anchors: torch.Tensor | None = None

    def anchor_rows(self) -> torch.Tensor:
        """int64 [B, A], the anchors, all T rows where nobody has sampled some."""
        if self.anchors is not None:
            return self.anchors
        return torch.arange(self.documents.shape[1], device=self.documents.device).expand_as(self.documents)


@dataclass(frozen=True)
class DraftedPass:
    """What a head drafts at one draft position, at every row, or at the anchors of [`TrainingRows`] if it has some.

    Attributes:
        hidden: [B, T, *], or [B, A, *] at anchors, rows that `logits` reads.
        logits: Rows [R, *] of `hidden` -> draft logits [R, V], or [R, Vd] over the head's draft vocabulary.
        offset: Row t drafts what the target says at row t + offset (0 where every pass reads shifted streams).
        features: [B, T, H], drafted target features at row t + offset + 1; `None` for heads that draft none.
        confidence: Rows [R, *] of `hidden` -> logits [R] of a draft's being accepted; `None` for heads that predict
            none.
        selected: Rows [R, *] of `hidden` and their logits [R, V] -> candidates int64 [R, K] and their scores [R, K],
            which drafts are chosen by; `None` for heads that draft by their logits.
        base: Rows [R, *] of `hidden` -> logits [R, V] before they are corrected by the drafted path, where these have
            a loss of their own.
    """

    hidden: torch.Tensor
    logits: Callable[[torch.Tensor], torch.Tensor]
    offset: int = 0
    features: torch.Tensor | None = None
    confidence: Callable[[torch.Tensor], torch.Tensor] | None = None
    selected: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    base: Callable[[torch.Tensor], torch.Tensor] | None = None


def row_positions(documents: torch.Tensor) -> torch.Tensor:
    """Rope positions int64 [B, T] that count from 0 in every document."""
    starts = document_starts(documents)
    rows = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return rows - torch.where(starts, rows, 0).cummax(dim=1).values


def later(values: torch.Tensor, offset: int) -> torch.Tensor:
    """`values` [B, T, ...] moved so that row t holds row t + offset; the last rows repeat the last one."""
    if offset == 0:
        return values
    last = values[:, -1:].expand(-1, min(offset, values.shape[1]), *values.shape[2:])
    return torch.cat([values[:, offset:], last], dim=1)
