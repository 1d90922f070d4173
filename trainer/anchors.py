"""Rows at which block drafters are trained: a few of every sequence, drawn anew for every batch (DFlash, arXiv
2602.06036, section 3)."""

from __future__ import annotations

import torch


def sample_anchors(loss_mask: torch.Tensor, most: int, generator: torch.Generator) -> torch.Tensor:
    """Supervised rows, each as likely as the others and none twice.

    Args:
        loss_mask: [B, T], nonzero at rows where a round may start.
        most: Rows to draw per sequence, fewer where it has fewer.
        generator: Source of randomness, on the mask's device.

    Returns:
        int64 [B, A], -1 where a sequence has fewer than A.
    """
    allowed = loss_mask != 0
    count = max(min(most, int(allowed.sum(1).max())), 1)
    order = torch.rand(allowed.shape, device=allowed.device, generator=generator).masked_fill_(~allowed, -1.0)
    drawn = order.topk(count, dim=1)
    return drawn.indices.masked_fill(drawn.values < 0, -1)


def count_anchors(loss_mask: torch.Tensor, most: int) -> torch.Tensor:
    """How many [`sample_anchors`] draws of a batch, int64 scalar."""
    return torch.count_nonzero(loss_mask, dim=1).clamp_max(most).sum()
