"""Attention masks and position ids with which the target's stock forward verifies a tree.

Masks are built by *position*. Siblings share a position although they lie in different cache slots, so transformers'
own mask functions, which compare slots, would hide too much under a sliding window.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ..tree.draft_tree import DraftTree
from ..tree.shape import TreeShape


def slot_mask(
    visible: torch.Tensor,
    lengths: int | torch.Tensor,
    first: int,
    end: int,
    window: int | None = None,
    depths: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns which slots of a [`SlotCache`] every new row sees, bool [B, Q, end - first].

    Args:
        visible: bool [B, Q, R], which of the R rows after the committed ones each new row sees.
        lengths: Committed rows: one number for all sequences, or int64 [B].
        first, end: Range of the slots shown.
        window: Sliding window of the attention; `None` if it has none.
        depths: int64 [B, R], distance in positions of each row from the last committed row (its slot may be further
            away). Required with a window, in which case the Q rows must be these R rows.
        padding_mask: int or bool [B, P], 0 on padding of the prompt, which occupies the first slots.

    Raises:
        ValueError: if there is a window but no `depths`.
    """
    if window is not None and depths is None:
        raise ValueError(
            "a mask with a sliding window needs `depths`, the distance of each row from the last committed row."
        )
    depths = visible.new_zeros(visible.shape[:2]) if depths is None else depths  # only read if there is a window
    if isinstance(lengths, torch.Tensor):
        return _ragged_slot_mask(visible, lengths, first, end, window, depths, padding_mask)
    context = visible.new_ones(*visible.shape[:2], lengths - first)
    if window is not None:
        oldest = lengths + depths[:, :, None] - window
        context = torch.arange(first, lengths, device=visible.device) > oldest
        visible = visible & (lengths + depths[:, None, :] > oldest)
    mask = torch.cat([context, visible], dim=-1)
    if end > lengths + visible.shape[2]:
        mask = torch.nn.functional.pad(mask, (0, end - lengths - visible.shape[2]))
    return mask if padding_mask is None else mask & _not_padding(padding_mask, first, end)


def _ragged_slot_mask(
    visible: torch.Tensor,
    lengths: torch.Tensor,
    first: int,
    end: int,
    window: int | None,
    depths: torch.Tensor,
    padding_mask: torch.Tensor | None,
) -> torch.Tensor:
    rows = visible.shape[2]
    slots = torch.arange(first, end, device=visible.device)
    offset = slots - lengths[:, None]  # [B, S], index among the new rows of the row in each slot; < 0 if committed
    if window is not None:
        oldest = depths[:, :, None] - window
        visible = visible & (depths[:, None, :] > oldest)
    held = offset.clamp(0, rows - 1)[:, None].expand(-1, visible.shape[1], -1)
    own = visible.gather(2, held) & ((offset >= 0) & (offset < rows))[:, None]
    context = (offset < 0)[:, None]
    if window is not None:
        context = context & (offset[:, None] > oldest)
    mask = context | own
    return mask if padding_mask is None else mask & _not_padding(padding_mask, first, end)


def shown_whole(tree: DraftTree, context: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [B, 1, N, context + N] in which every node of a tree sees the whole context and its ancestors."""
    if tree.num_nodes == 1:
        own = torch.zeros(len(tree.token_ids), 1, 1, 1, dtype=dtype, device=tree.token_ids.device)
    elif tree.shape is None:
        own = additive_mask(tree.ancestor_mask, dtype)[:, None]
    else:
        own = _own_nodes(tree.shape, dtype).expand(len(tree.token_ids), -1, -1, -1)
    return torch.nn.functional.pad(own, (context, 0))


@lru_cache(maxsize=128)
def _own_nodes(shape: TreeShape, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [1, 1, N, N] among the nodes of a tree. It is cached: never write to it."""
    return additive_mask(shape.ancestor_mask, dtype)[:, None]


def _not_padding(padding_mask: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """bool [B, 1, end - first], false in slots that hold padding; slots past the prompt never do."""
    real = padding_mask[:, first:end].bool()
    return torch.nn.functional.pad(real, (0, end - first - real.shape[1]), value=True)[:, None]


def tree_position_ids(root_positions: torch.Tensor, tree: DraftTree) -> torch.Tensor:
    """Returns the position of every node: the root's position plus the node's depth.

    Args:
        root_positions: int64 [B, 1], or [3, B, 1] for targets with several position axes.
        tree: The draft tree.
    """
    return root_positions + tree.depths


def additive_mask(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask: 0 where allowed, the most negative number elsewhere.

    Boolean masks are not used because eager attention silently mishandles them.
    """
    zero = torch.zeros((), dtype=dtype, device=allowed.device)
    return torch.where(allowed, zero, torch.finfo(dtype).min)


def chain_mask(slots: torch.Tensor, shown: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [B, 1, 1, shown] of a row in slot int64 [B, 1] that sees all rows before it and itself."""
    return additive_mask((torch.arange(shown, device=slots.device) <= slots)[:, None, None], dtype)


def block_mask(allowed: torch.Tensor) -> BlockMask:
    """Block mask for flex attention, from a dense mask.

    Args:
        allowed: bool [B, Q, S], which of the slots each row sees.
    """

    def looked_up(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        return allowed[batch, row, slot]

    batch, rows, slots = allowed.shape
    return create_block_mask(looked_up, batch, None, rows, slots, device=str(allowed.device))
