"""Samples the rows at which block drafters are trained: a few per sequence, drawn again for every batch (DFlash, arXiv
2602.06036, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hf_specheads.contract import TrainingContract

from ..arguments import DraftHeadTrainingArguments


def sample_anchors(loss_mask: torch.Tensor, most: int, generator: torch.Generator) -> torch.Tensor:
    """Samples supervised rows uniformly and without replacement.

    Args:
        loss_mask: [B, T], nonzero at rows where a round may start.
        most: Rows to draw per sequence; all rows where a sequence has fewer.
        generator: Source of randomness, on the mask's device.

    Returns:
        Row indices, int64 [B, A]; -1 where a sequence has fewer than A rows.
    """
    allowed = loss_mask != 0
    count = max(min(most, int(allowed.sum(1).max())), 1)
    order = torch.rand(allowed.shape, dtype=torch.float32, device=allowed.device, generator=generator).masked_fill_(
        ~allowed, -1.0
    )
    drawn = order.topk(count, dim=1)
    return drawn.indices.masked_fill(drawn.values < 0, -1)


def anchors_of(heads: TrainingContract, batch: dict[str, torch.Tensor], most: int, seed: int) -> torch.Tensor | None:
    """Samples the anchor rows of a batch; `None` for draft heads that are trained at every row.

    Args:
        heads: The draft heads to train.
        batch: Batch from a collator.
        most: Rows to draw per sequence.
        seed: Seed of the draw.
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
    """Counts the rows at which rounds start, summed over processes, as an fp32 scalar: all supervised rows of the
    batches, or as many as [`anchors_of`] draws."""
    count = torch.zeros((), dtype=torch.float32, device=device)
    for batch in batches:
        counts = torch.count_nonzero(batch["loss_mask"][:, 1:], dim=1)
        count += (counts.clamp_max(args.num_anchors) if heads.trains_at_anchors else counts).sum()
    if args.world_size > 1:
        dist.all_reduce(count)
    return count
