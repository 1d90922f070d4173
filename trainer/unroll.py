"""The unroll: every draft position of a batch at once, each pass fed with what the pass before drafted.

EAGLE trains one pass (arXiv 2401.15077), HASS several with one layer (arXiv 2408.15766), POSS several with one
specialist per span of passes (arXiv 2506.03566). All of them run the draft head's only forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hf_specheads.features import as_embedding, as_lm_head
from hf_specheads.heads.eagle import EagleHead

from .losses import TargetDistribution, feature_loss, masked_mean, token_and_top_k_loss
from .streams import StreamAttention, document_starts, next_stream, visible_rows


@dataclass(frozen=True)
class PassLosses:
    """Losses of one pass, unweighted scalars with a graph.

    Attributes:
        feature_loss: SmoothL1 to the target's features.
        token_loss: Cross-entropy against the target's distribution.
        top_k_loss: The part of it that falls on the target's K most probable tokens.
        drafted: [B, T, H], drafted features, detached.
    """

    feature_loss: torch.Tensor
    token_loss: torch.Tensor
    top_k_loss: torch.Tensor
    drafted: torch.Tensor

    def weighted(self, feature: float = 1.0, token: float = 0.1, top_k: float = 1.0) -> torch.Tensor:
        """feature weight * feature loss + token weight * token loss + top-k weight * top-k loss."""
        return feature * self.feature_loss + token * self.token_loss + top_k * self.top_k_loss


class Unroll:
    """Unrolled training forward of one batch. Call [`next_pass`] `num_passes` times.

    Row t pairs the feature at t with the token at t + 1 and is compared with the target's feature at t + 1.

    Args:
        draft_head: Heads of the EAGLE family (EAGLE, HASS, POSS).
        features: [B, T, H], target features of the rows, noise included if there is any.
        next_token_ids: int64 [B, T], the token after each row.
        target_features: [B, T, H], clean features one position later.
        loss_mask: [B, T], nonzero at supervised rows; the same in every pass.
        attention_mask: [B, T], zero on padding, on either side; or `None`.
        embed_tokens: The target's token embedding, a weight [V, E] or a module.
        lm_head: The target's `lm_head`, a weight [V, H] or a module.
        top_k: K of the top-k loss.
        upstream_masking: For parity with the authors' training code only: see [`unroll_losses`].
        document_ids: int64 [B, T], equal within a document of a packed row, or `None` for one document per row. No
            row attends, and no drafted feature moves, across documents.
        position_ids: int64 [B, T], rope positions; default counts from 0 in every document.
        num_items: Divisor of the losses instead of the batch's own number of supervised rows.
        separate_backward: Each pass is followed by its own backward, which frees the pass's graph; gradients at the
            `fc` outputs, which later passes share, are kept until [`finish_backward`].

    Raises:
        ValueError: if a shape does not fit.
    """

    def __init__(
        self,
        draft_head: EagleHead,
        *,
        features: torch.Tensor,
        next_token_ids: torch.Tensor,
        target_features: torch.Tensor,
        loss_mask: torch.Tensor,
        attention_mask: torch.Tensor | None,
        embed_tokens: torch.Tensor | nn.Module,
        lm_head: torch.Tensor | nn.Module,
        top_k: int = 10,
        upstream_masking: bool = False,
        document_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        num_items: torch.Tensor | float | None = None,
        separate_backward: bool = False,
    ):
        _check_shapes(features, next_token_ids, target_features, loss_mask, attention_mask, document_ids, position_ids)
        self.draft_head = draft_head
        self.features = features
        self.lm_head = as_lm_head(lm_head)
        self.upstream_masking = upstream_masking
        self.num_items = num_items
        self.separate_backward = separate_backward
        documents = _documents(next_token_ids, None if upstream_masking else attention_mask, document_ids)
        self.starts = document_starts(documents)
        self.visible = visible_rows(documents)
        self.position_ids = _positions(self.starts) if position_ids is None else position_ids
        with torch.no_grad():
            self.embeddings = as_embedding(embed_tokens)(next_token_ids)
            self.supervised = loss_mask.flatten().nonzero()[:, 0]  # [S]
            self.target_features = target_features.flatten(0, 1)[self.supervised]  # [S, H]
            self.target = TargetDistribution.from_logits(self.lm_head(self.target_features), top_k)
        self.passes_done = 0
        self._stream = features
        self._fused: list[torch.Tensor] = []  # with graph, [B, T, h] per stream
        self._rows: list[torch.Tensor] = []  # what the passes read: the same, or leaves with a gradient of their own

    def next_pass(self) -> PassLosses:
        """Runs the next pass: specialist `specialist_of(m)` over m + 1 streams."""
        specialist = self.draft_head.specialist_of(self.passes_done)
        self.passes_done += 1
        fused = self.draft_head.fuse(self.embeddings, self._stream)
        self._fused.append(fused)
        self._rows.append(fused.detach().requires_grad_() if self.separate_backward else fused)
        streams = len(self._rows)
        drafted = self.draft_head(
            torch.cat(self._rows, dim=1),
            self.position_ids.repeat(1, streams),
            specialist=specialist,
            num_queries=self.features.shape[1],
            attention_function=StreamAttention(self.visible, streams, phantom_columns=self.upstream_masking),
        )
        self._stream = next_stream(self.features, drafted, self.starts)
        return self._losses(drafted)

    def finish_backward(self) -> None:
        """After the last pass's backward: sends the gradients gathered at the shared rows through `fc`, once."""
        if not self.separate_backward:
            return
        used = [(fused, rows) for fused, rows in zip(self._fused, self._rows, strict=True) if rows.grad is not None]
        if used:
            torch.autograd.backward([fused for fused, _ in used], [rows.grad for _, rows in used])

    def _losses(self, drafted: torch.Tensor) -> PassLosses:
        # Rows are selected before `lm_head`, the largest product of a pass.
        supervised = drafted.flatten(0, 1)[self.supervised]  # [S, H]
        token, top_k = token_and_top_k_loss(self.lm_head(supervised), self.target)
        feature = feature_loss(supervised, self.target_features)
        means = (masked_mean(values, self.num_items) for values in (feature, token, top_k))
        return PassLosses(*means, drafted=drafted.detach())


def unroll_losses(
    draft_head: EagleHead,
    *,
    features: torch.Tensor,
    next_token_ids: torch.Tensor,
    target_features: torch.Tensor,
    loss_mask: torch.Tensor,
    attention_mask: torch.Tensor | None,
    embed_tokens: torch.Tensor | nn.Module,
    lm_head: torch.Tensor | nn.Module,
    num_passes: int,
    top_k: int = 10,
    upstream_masking: bool = False,
    document_ids: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    num_items: torch.Tensor | float | None = None,
) -> list[PassLosses]:
    """Losses of `num_passes` draft positions, unweighted, sharing one graph.

    Arguments are those of [`Unroll`]. `upstream_masking=True` reproduces what the authors' training code computes
    instead of what it means to: with several passes (HASS, PosS), masked scores count as 0 in the softmax and padding
    is not masked; with one pass (EAGLE) their masks are the true ones. It is for parity tests, not for training:
    drafting has no such columns.

    Raises:
        ValueError: if `num_passes` is below 1 or a shape does not fit.
    """
    if num_passes < 1:
        raise ValueError(f"`num_passes` must be at least 1, got {num_passes}.")
    unroll = Unroll(
        draft_head,
        features=features,
        next_token_ids=next_token_ids,
        target_features=target_features,
        loss_mask=loss_mask,
        attention_mask=attention_mask,
        embed_tokens=embed_tokens,
        lm_head=lm_head,
        top_k=top_k,
        upstream_masking=upstream_masking and num_passes > 1,
        document_ids=document_ids,
        position_ids=position_ids,
        num_items=num_items,
    )
    return [unroll.next_pass() for _ in range(num_passes)]


def _documents(
    next_token_ids: torch.Tensor, attention_mask: torch.Tensor | None, document_ids: torch.Tensor | None
) -> torch.Tensor:
    """Document ids [B, T] in which padding is a document of its own, so that no real row sees it."""
    documents = torch.zeros_like(next_token_ids) if document_ids is None else document_ids
    if attention_mask is None:
        return documents
    return documents.masked_fill(attention_mask == 0, -1)


def _positions(starts: torch.Tensor) -> torch.Tensor:
    """Rope positions [B, T] that count from 0 in every document."""
    rows = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return rows - torch.where(starts, rows, 0).cummax(dim=1).values


def _check_shapes(
    features: torch.Tensor, next_token_ids: torch.Tensor, target_features: torch.Tensor, *others
) -> None:
    rows = tuple(features.shape[:2])
    named = {"next_token_ids": next_token_ids, "target_features": target_features}
    named.update(zip(("loss_mask", "attention_mask", "document_ids", "position_ids"), others, strict=True))
    for name, tensor in named.items():
        if tensor is not None and tuple(tensor.shape[:2]) != rows:
            raise ValueError(f"`{name}` must have the rows of `features` {rows}, got {tuple(tensor.shape)}.")
