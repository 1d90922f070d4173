"""Feature streams of the unroll, who sees which stream, and attention over several streams.

In pass m (0-based) the draft head sees F = m + 1 streams of features: stream 0 holds the target's, stream s what pass
s - 1 drafted. The row at t stands for draft position m of a round whose root was m tokens earlier, so it sees target
features up to the root and drafted features after it, each from the pass that would have drafted it:

    lag t - j   0         1         ...  m - 1    m or more
    stream      m         m - 1     ...  1        0

All rows keep the rope position of their token. (HASS, arXiv 2408.15766, section 3.2; POSS, arXiv 2506.03566.)
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.llama.modeling_llama import repeat_kv


def document_starts(document_ids: torch.Tensor) -> torch.Tensor:
    """bool [B, T], true at the first row of every document, from document ids [B, T]."""
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return starts


def next_stream(features: torch.Tensor, drafted: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The stream a pass hands to the next: what it drafted, one row later, detached.

    Args:
        features: [B, T, H], target features; they stay at the first row of a document, which no pass predicts.
        drafted: [B, T, H], drafted features of this pass; row t - 1 predicts the feature of row t.
        starts: bool [B, T], first rows of documents.

    Returns:
        [B, T, H].
    """
    shifted = torch.cat([features[:, :1], drafted.detach()[:, :-1].to(features.dtype)], dim=1)
    return torch.where(starts[..., None], features, shifted)


def visible_rows(document_ids: torch.Tensor) -> torch.Tensor:
    """bool [B, T, T]: row t sees row j iff j <= t in the same document. Every row sees itself."""
    rows = torch.arange(document_ids.shape[1], device=document_ids.device)
    same_document = document_ids[:, :, None] == document_ids[:, None, :]
    return same_document & (rows[:, None] >= rows)


def stream_mask(visible: torch.Tensor, num_streams: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Additive mask over all rows of all streams, for any attention implementation: [B, 1, T, F * T].

    `StreamAttention` computes the same without the columns that no row sees.
    """
    rows = torch.arange(visible.shape[-1], device=visible.device)
    lag = rows[:, None] - rows  # [T, T]
    blocks = [visible & (lag >= num_streams - 1)]
    blocks += [visible & (lag == num_streams - 1 - stream) for stream in range(1, num_streams)]
    return additive(torch.cat(blocks, dim=-1)[:, None], dtype)


def additive(allowed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """0 where allowed, -inf elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


class StreamAttention:
    """Attention of T queries over F streams of T rows, in T + F - 1 columns instead of F * T.

    A row sees a triangle of stream 0 and one row of each later stream, so the later streams are a band: `F - 1` scores
    per query. Exactly the softmax under [`stream_mask`], with transformers' attention signature.

    Args:
        visible: bool [B, T, T], see [`visible_rows`].
        num_streams: F.
        phantom_columns: Reproduce the attention of HASS's and PosS's training code, which multiplies scores by a 0/1
            mask: each of the T - 1 - t future rows then adds exp(0) to the softmax's denominator.
        own_rows: A row sees its own row of every later stream, and of stream 0 all that is visible: streams whose row
            t belongs to the round with root t (EAGLE-3's training-time test).
    """

    def __init__(self, visible: torch.Tensor, num_streams: int, phantom_columns: bool = False, own_rows: bool = False):
        batch, rows, _ = visible.shape
        self.num_streams = num_streams
        index = torch.arange(rows, device=visible.device)
        last = num_streams - 1
        triangle = visible if own_rows else visible & (index[:, None] - index >= last)
        # The later streams that have a visible row, each with its lag.
        self.band = [(stream, 0 if own_rows else last - stream) for stream in range(1, num_streams)]
        self.band = [(stream, lag) for stream, lag in self.band if lag < rows]
        band = [nn.functional.pad(visible.diagonal(-lag, dim1=1, dim2=2), (lag, 0)) for _, lag in self.band]
        self.band_width = len(band)
        blocks = [triangle] + [column[..., None] for column in band]
        self.mask = additive(torch.cat(blocks, dim=-1)[:, None])  # [B, 1, T, T + F - 1]
        if phantom_columns:
            phantoms = (rows - 1 - index).float().log()  # -inf in the last row
            self.mask = torch.cat([self.mask, phantoms[None, None, :, None].expand(batch, 1, -1, 1)], dim=-1)

    def _band(self, states: torch.Tensor, groups: int) -> torch.Tensor:
        """Per query the one visible row of each stream 1..F-1, of keys or values of all streams.

        [B, key-value heads, F * T, head_dim] -> [B, heads, F - 1, T, head_dim].
        """
        batch, heads, rows, width = states.shape
        streams = states.view(batch, heads, self.num_streams, rows // self.num_streams, width)
        columns = []
        for number, lag in self.band:
            stream = streams[:, :, number]
            columns.append(nn.functional.pad(stream[:, :, : stream.shape[2] - lag], (0, 0, lag, 0)))
        return torch.stack(columns, dim=2).repeat_interleave(groups, dim=1)

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,  # [B, heads, T, head_dim]
        key: torch.Tensor,  # [B, key-value heads, F * T, head_dim]
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        rows = query.shape[2]
        query = query * scaling
        groups = module.num_key_value_groups
        scores = query @ repeat_kv(key[:, :, :rows], groups).transpose(2, 3)  # [B, heads, T, T]
        if self.band_width:
            band_keys = self._band(key, groups)
            band_scores = (query[:, :, None] * band_keys).sum(dim=-1).transpose(2, 3)  # [B, heads, T, F - 1]
            scores = torch.cat([scores, band_scores], dim=-1)
        if self.mask.shape[-1] > scores.shape[-1]:
            scores = nn.functional.pad(scores, (0, 1))
        weights = torch.softmax(scores.add_(self.mask), dim=-1, dtype=torch.float32).to(query.dtype)
        weights = nn.functional.dropout(weights, dropout, training=module.training)
        output = weights[..., :rows] @ repeat_kv(value[:, :, :rows], groups)
        if self.band_width:
            band_weights = weights[..., rows : rows + self.band_width].transpose(2, 3)[..., None]
            output = output + (band_weights * self._band(value, groups)).sum(dim=2)
        return output.transpose(1, 2), None
