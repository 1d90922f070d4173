"""Training attention for blocks of draft rows after sampled anchors (DFlash, arXiv 2602.06036, section 3).

A block at row t is a round whose root is the token after row t. Its rows see the context rows of the same document up
to t and the rows of their own block. They never see rows of other blocks, because no round knows what another drafts.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import repeat_kv

BLOCKS_AT_ONCE = 32  # number of blocks whose mask is in memory at a time


class ContextCache:
    """Takes the place of the draft cache in training and holds the context's keys and values.

    In each layer the first rows written are the context. Later rows are returned after the context, but not stored.
    """

    def __init__(self) -> None:
        self.context: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores and returns the context's keys and values [B, heads, T, head_dim], later with block rows appended."""
        if layer_idx not in self.context:
            self.context[layer_idx] = (key_states, value_states)
            return key_states, value_states
        keys, values = self.context[layer_idx]
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)


class AnchoredAttention:
    """Attention of A blocks of R rows over T context rows and over themselves, with transformers' attention signature.

    Blocks are processed in groups whose masks are recomputed in the backward, so that memory for masks does not grow
    with the number of blocks.

    Args:
        documents: int64 [B, T], equal within a document, -1 on padding.
        anchors: int64 [B, A], last context row of every block.
        visible: bool [R, R], which rows of its block each row sees.
        window: A row sees only context less than `window` positions away; `None` for all of it.
        window_from_anchor: Count the window from the root for all rows of a block, instead of from each row.
    """

    def __init__(
        self,
        documents: torch.Tensor,
        anchors: torch.Tensor,
        visible: torch.Tensor,
        window: int | None = None,
        window_from_anchor: bool = False,
    ):
        self.documents, self.anchors, self.visible = documents, anchors, visible
        self.window, self.window_from_anchor = window, window_from_anchor

    def mask(self, first: int, end: int) -> torch.Tensor:
        """Returns bool [B, 1, a R, T + a R], what the rows of the a blocks from `first` to `end` (exclusive) see."""
        anchors, size = self.anchors[:, first:end], len(self.visible)
        rows = torch.arange(self.documents.shape[1], device=anchors.device)
        theirs = self.documents.gather(1, anchors)
        seen = (rows <= anchors[..., None]) & (self.documents[:, None] == theirs[..., None])  # [B, a, T]
        context = seen[:, :, None].expand(-1, -1, size, -1)
        if self.window is not None:
            depth = torch.arange(size, device=anchors.device) * (not self.window_from_anchor)
            oldest = anchors[..., None] + 1 + depth - self.window  # the root follows right after its anchor row
            context = context & (rows > oldest[..., None])
        same = torch.eye(end - first, dtype=torch.bool, device=anchors.device)
        block = (same[:, None, :, None] & self.visible[None, :, None, :]).flatten(2, 3).flatten(0, 1)
        block = block.expand(len(anchors), -1, -1)
        return torch.cat([context.flatten(1, 2), block], dim=-1)[:, None]

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,  # [B, heads, A R, head_dim]
        key: torch.Tensor,  # [B, key-value heads, T + A R, head_dim]
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        dtype, rows, size = value.dtype, self.documents.shape[1], len(self.visible)
        query, key = query.to(dtype), key.to(dtype)  # under autocast, rotary embeddings may return a wider dtype
        groups = query.shape[1] // key.shape[1]
        (keys, own_keys), (values, own_values) = (x.split([rows, x.shape[2] - rows], dim=2) for x in (key, value))

        def attend(
            query: torch.Tensor, own_key: torch.Tensor, own_value: torch.Tensor, first: int, end: int
        ) -> torch.Tensor:
            key, value = torch.cat([keys, own_key], dim=2), torch.cat([values, own_value], dim=2)
            return nn.functional.scaled_dot_product_attention(
                query, repeat_kv(key, groups), repeat_kv(value, groups), self.mask(first, end), dropout, scale=scaling
            )

        outputs, count = [], self.anchors.shape[1]
        for first in range(0, count, BLOCKS_AT_ONCE):
            end = min(first + BLOCKS_AT_ONCE, count)
            part = slice(first * size, end * size)
            inputs = (query[:, :, part], own_keys[:, :, part], own_values[:, :, part], first, end)
            again = torch.is_grad_enabled() and count > BLOCKS_AT_ONCE
            outputs.append(checkpoint(attend, *inputs, use_reentrant=False) if again else attend(*inputs))
        return torch.cat(outputs, dim=2).transpose(1, 2), None
