"""Intervals of means over texts, by drawing texts anew; differences of two sides are paired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

DRAWS = 1000


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio_draws(sums: Sequence[float], counts: Sequence[float], draws: int = DRAWS) -> torch.Tensor:
    """fp64 [draws], sum over count with texts drawn with replacement, the same ones for the same number of texts.

    Args:
        sums: Per text.
        counts: Per text; texts without any weigh nothing.
        draws: How often all texts are drawn.
    """
    each = torch.tensor([list(sums), list(counts)], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(each.shape[1], (draws, each.shape[1]), generator=generator)
    drawn = each[:, chosen].sum(-1)
    return drawn[0] / drawn[1].clamp_min(1e-12)


def interval_of(draws: torch.Tensor, mean: float) -> Interval:
    """The middle 95 % of draws."""
    low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
    return Interval(mean, low, high)


def ratio_interval(sums: Sequence[float], counts: Sequence[float]) -> Interval:
    """Of a ratio of sums over texts: tau is (accepted + rounds) / rounds."""
    return interval_of(ratio_draws(sums, counts), sum(sums) / max(sum(counts), 1e-12))


def difference_interval(
    ours: tuple[Sequence[float], Sequence[float]], theirs: tuple[Sequence[float], Sequence[float]]
) -> Interval:
    """Of the difference of two ratios over the same texts, which are drawn together."""
    means = [sum(sums) / max(sum(counts), 1e-12) for sums, counts in (ours, theirs)]
    return interval_of(ratio_draws(*ours) - ratio_draws(*theirs), means[0] - means[1])
