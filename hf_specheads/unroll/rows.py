"""The training contract: the rows a draft head trains on, and what each pass drafts at every row of a batch.

`DraftHead.unroll` is a generator of passes, one per draft position. Rows are teacher-forced: row t holds the target's
feature at t and knows the token at t + 1. Pass m says what the draft head drafts m positions after that. The trainer
computes the losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .streams import document_starts


@dataclass(frozen=True)
class TrainingRows:
    """The input of the unroll: T rows of B sequences.

    Attributes:
        features: [B, T, F], target features that the draft head reads, including noise if any was added.
        token_ids: int64 [B, T], the token of each row; may be `None` for heads that do not read it.
        next_token_ids: int64 [B, T], the token after each row.
        documents: int64 [B, T], equal within a document, -1 on padding. No row may read across documents.
        position_ids: int64 [B, T], rope positions, counted from 0 in every document.
        embed: The target's token embedding, ids [B, T] -> [B, T, E].
        lm_head: The target's `lm_head`, features [..., H] -> logits [..., V].
        upstream_masking: Use the masks of HASS's and PosS's training code, for parity tests.
        separate_backward: The caller runs the backward of each pass before it asks for the next pass. Gradients at
            rows that passes share are accumulated and propagated when the generator ends.
        anchors: int64 [B, A], rows at which a round starts, for heads that draft at sampled rows only; -1 fills up
            sequences with fewer anchors. `None` means every row.
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
        """Returns the anchors, int64 [B, A], which are all T rows if none were sampled."""
        if self.anchors is not None:
            return self.anchors
        return torch.arange(self.documents.shape[1], device=self.documents.device).expand_as(self.documents)


@dataclass(frozen=True)
class DraftedPass:
    """What a draft head drafts at one draft position, at every row or at the anchors of [`TrainingRows`].

    Attributes:
        hidden: [B, T, *], or [B, A, *] at anchors, the rows that `logits` reads.
        logits: Rows [R, *] of `hidden` -> draft logits [R, V], or [R, Vd] over the draft vocabulary.
        offset: Row t drafts what the target predicts at row t + offset (0 if every pass reads shifted streams).
        features: [B, T, H], drafted target features of row t + offset + 1; `None` for heads that draft no features.
        confidence: Rows [R, *] of `hidden` -> logits [R] of the probability that a draft is accepted; `None` for heads
            that do not predict it.
        selected: Rows [R, *] of `hidden` and their logits [R, V] -> candidates int64 [R, K] and scores [R, K] by which
            drafts are chosen; `None` for heads that choose drafts by their logits.
        base: Rows [R, *] of `hidden` -> logits [R, V] before their correction by the drafted path, for heads that
            train these with a separate loss; `None` for all others.
    """

    hidden: torch.Tensor
    logits: Callable[[torch.Tensor], torch.Tensor]
    offset: int = 0
    features: torch.Tensor | None = None
    confidence: Callable[[torch.Tensor], torch.Tensor] | None = None
    selected: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    base: Callable[[torch.Tensor], torch.Tensor] | None = None


def row_positions(documents: torch.Tensor) -> torch.Tensor:
    """Returns rope positions, int64 [B, T], counted from 0 in every document."""
    starts = document_starts(documents)
    rows = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return rows - torch.where(starts, rows, 0).cummax(dim=1).values


def later(values: torch.Tensor, offset: int) -> torch.Tensor:
    """Shifts `values` [B, T, ...] so that row t holds row t + offset; the last row is repeated at the end."""
    if offset == 0:
        return values
    last = values[:, -1:].expand(-1, min(offset, values.shape[1]), *values.shape[2:])
    return torch.cat([values[:, offset:], last], dim=1)
