"""Bootstrap confidence intervals over texts: of means, and of paired differences between two sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

DRAWS = 1000
NORMAL = 1.96  # 95 % of a normal distribution lie within this many standard deviations of its mean


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})"


def careful(interval: Interval, units: int) -> Interval:
    """Widens an interval for a small number of units, according to Student's t-distribution.

    Bootstrap draws of few units underestimate the spread.

    Args:
        interval: The middle 95 % of draws.
        units: Number of units that were drawn from. With fewer than two the interval is infinite.
    """
    if units < 2:
        return Interval(interval.mean, -torch.inf, torch.inf)
    freedom = units - 1
    # Cornish-Fisher expansion of Student's quantile in terms of the normal quantile.
    z, z3, z5, z7 = (NORMAL**power for power in (1, 3, 5, 7))
    terms = ((z3 + z) / 4, (5 * z5 + 16 * z3 + 3 * z) / 96, (3 * z7 + 19 * z5 + 17 * z3 - 15 * z) / 384)
    quantile = z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
    wider = quantile / NORMAL * (units / freedom) ** 0.5
    mean, low, high = interval.mean, interval.low, interval.high
    return Interval(mean, mean - wider * (mean - low), mean + wider * (high - mean))


def ratio_draws(sums: Sequence[float], counts: Sequence[float], draws: int = DRAWS) -> torch.Tensor:
    """Returns bootstrap draws of sum(sums) / sum(counts), fp64 [draws], with texts drawn with replacement.

    For an equal number of texts always the same texts are drawn, so that draws can be paired.

    Args:
        sums: Numerator of each text.
        counts: Denominator of each text; a text with count 0 has no weight.
        draws: Number of draws.
    """
    each = torch.tensor([list(sums), list(counts)], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(each.shape[1], (draws, each.shape[1]), generator=generator)
    drawn = each[:, chosen].sum(-1)
    return drawn[0] / drawn[1].clamp_min(1e-12)


def interval_of(draws: torch.Tensor, mean: float) -> Interval:
    """Returns the mean with the middle 95 % of the draws."""
    low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
    return Interval(mean, low, high)


def ratio_interval(sums: Sequence[float], counts: Sequence[float]) -> Interval:
    """Returns the interval of a ratio of sums over texts, such as tau, which is (accepted + rounds) / rounds."""
    return interval_of(ratio_draws(sums, counts), sum(sums) / max(sum(counts), 1e-12))


def difference_interval(
    ours: tuple[Sequence[float], Sequence[float]], theirs: tuple[Sequence[float], Sequence[float]]
) -> Interval:
    """Returns the interval of the difference between two ratios over the same texts, which are drawn in pairs."""
    means = [sum(sums) / max(sum(counts), 1e-12) for sums, counts in (ours, theirs)]
    return interval_of(ratio_draws(*ours) - ratio_draws(*theirs), means[0] - means[1])
