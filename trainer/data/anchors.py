"""Rows at which block drafters are trained: a few of every sequence, drawn anew for every batch (DFlash, arXiv
2602.06036, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hf_specheads.contract import TrainingContract

from ..arguments import DraftHeadTrainingArguments


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
    order = torch.rand(allowed.shape, dtype=torch.float32, device=allowed.device, generator=generator).masked_fill_(
        ~allowed, -1.0
    )
    drawn = order.topk(count, dim=1)
    return drawn.indices.masked_fill(drawn.values < 0, -1)


def anchors_of(heads: TrainingContract, batch: dict[str, torch.Tensor], most: int, seed: int) -> torch.Tensor | None:
    """Rows of a batch to draft from, of heads that are trained at some rows only; `None` for the others.

    Args:
        heads: The heads.
        batch: As the collators make it.
        most: Rows to draw per sequence.
        seed: Of the draw.
    """
    if not heads.trains_at_anchors:
        return None
    loss_mask = batch["loss_mask"][:, 1:]
    return sample_anchors(loss_mask, most, torch.Generator(loss_mask.device).manual_seed(seed))


def count_rounds(
    heads: TrainingContract,
    batches: Sequence[dict[str, torch.Tensor]],
    args: DraftHeadTrainingArguments,
    device: torch.device,
) -> torch.Tensor:
    """Rows where rounds start, fp32 scalar, summed over processes: all supervised ones of the batches, or as many as
    [`anchors_of`] draws."""
    count = torch.zeros((), dtype=torch.float32, device=device)
    for batch in batches:
        counts = torch.count_nonzero(batch["loss_mask"][:, 1:], dim=1)
        count += (counts.clamp_max(args.num_anchors) if heads.trains_at_anchors else counts).sum()
    if args.world_size > 1:
        dist.all_reduce(count)
    return count
