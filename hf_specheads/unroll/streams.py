"""Feature streams of the unroll, and which rows see which stream.

In pass m (0-based) the draft head sees S = m + 1 streams of features: stream 0 holds the target's features, stream s
those that pass s - 1 drafted. The row at t stands for the row of a round whose root was m tokens earlier, so it
sees target features up to the root and drafted features after it, each from the pass that would have drafted it:

    lag t - j   0         1         ...  m - 1    m or more
    stream      m         m - 1     ...  1        0

All rows keep the rope position of their token. (HASS, arXiv 2408.15766, section 3.2; POSS, arXiv 2506.03566.)
"""

from __future__ import annotations

import torch


def document_starts(document_ids: torch.Tensor) -> torch.Tensor:
    """Returns bool [B, T], true at the first row of every document, from document ids [B, T]."""
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return starts


def next_stream(features: torch.Tensor, drafted: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Returns the stream that a pass hands to the next one: its drafted features, shifted one row later and detached.

    Args:
        features: [B, T, H], target features. They are kept at the first row of a document, which no pass predicts.
        drafted: [B, T, H], features drafted by this pass; row t - 1 predicts the feature of row t.
        starts: bool [B, T], true at the first rows of documents.

    Returns:
        [B, T, H].
    """
    shifted = torch.cat([features[:, :1], drafted.detach()[:, :-1].to(features.dtype)], dim=1)
    return torch.where(starts[..., None], features, shifted)


def visible_rows(document_ids: torch.Tensor) -> torch.Tensor:
    """Returns bool [B, T, T]: row t sees row j iff j <= t in the same document. Every row sees itself."""
    rows = torch.arange(document_ids.shape[1], device=document_ids.device)
    same_document = document_ids[:, :, None] == document_ids[:, None, :]
    return same_document & (rows[:, None] >= rows)


def stream_mask(visible: torch.Tensor, num_streams: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns an additive mask over all rows of all streams, [B, 1, T, S * T], for any attention implementation.

    [`attention.StreamAttention`] computes the same attention without a tensor of T x T elements.
    """
    rows = torch.arange(visible.shape[-1], device=visible.device)
    lag = rows[:, None] - rows  # [T, T]
    blocks = [visible & (lag >= num_streams - 1)]
    blocks += [visible & (lag == num_streams - 1 - stream) for stream in range(1, num_streams)]
    return additive(torch.cat(blocks, dim=-1)[:, None], dtype)


def additive(allowed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns an additive mask: 0 where allowed, -inf elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
