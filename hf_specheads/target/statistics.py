"""Statistics of the features that heads were trained on, and a check whether a target still produces such features.

A rotated, quantised or exchanged target has different features even if its embedding, on which the fingerprint is
based, is the same. To detect this, the config of heads stores a scale per hidden state and, for a few channels spread
over its width, their means, deviations and correlations. A rotation may leave scale, means and deviations nearly
unchanged, but it always changes which channels correlate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .identity import spread_over

CHANNELS = 16
ENOUGH = 8192  # number of tokens after which the statistics of a target are precise enough
# Largest differences of the same target, since statistics also differ between texts. The scale is compared as a ratio,
# means in units of the deviations, deviations as a ratio.
SCALE_RATIO, CENTRE_SHIFT, DEVIATION_RATIO = 1.5, 1.0, 2.0
# Least correlation between the correlation patterns of the same target. For the shipped target it is 0.56 or more
# between kinds of text, 0.31 for random tokens, and 0.17 or less against its rotated copy.
SAME_PATTERN = 0.25
# Patterns are compared only if their mean squared correlation exceeds this multiple of what independent draws show.
ABOVE_NOISE = 5.0


class FeatureStatistics:
    """Running sums over features, from which the statistics are computed.

    Args:
        levels: Names of the hidden states that lie side by side in a feature.
    """

    def __init__(self, levels: Sequence[int | str]):
        self.levels, self.tokens = list(levels), 0
        self._sums: torch.Tensor | None = None

    @torch.no_grad()
    def add(self, features: torch.Tensor, mask: torch.Tensor) -> None:
        """Adds features to the sums.

        Args:
            features: [B, T, F], where F is the width of a hidden state times the number of levels.
            mask: [B, T], nonzero at rows to include.
        """
        rows = features[mask.bool()].float()
        if not len(rows):
            return
        levels = rows.view(len(rows), len(self.levels), -1)
        picked = levels[..., self._channels(levels.shape[-1]).to(levels.device)]
        squares = levels.square().mean(-1, keepdim=True).sum(0)
        products = torch.einsum("nlc,nld->lcd", picked, picked)
        sums = torch.cat([squares, picked.sum(0), products.flatten(1)], dim=-1).double().cpu()
        self._sums = sums if self._sums is None else self._sums + sums
        self.tokens += len(rows)

    def remember(self, config: Any, features: torch.Tensor, mask: torch.Tensor) -> None:
        """Adds features until there are enough, and writes the statistics into `config.feature_statistics`.

        Does nothing for heads that read no features.
        """
        if self.levels and self.tokens < ENOUGH:
            self.add(features.detach(), mask)
            config.feature_statistics = self.to_dict()

    @staticmethod
    def _channels(width: int) -> torch.Tensor:
        return torch.tensor(spread_over(width, min(CHANNELS, width)))

    def to_dict(self) -> dict[str, Any] | None:
        """Returns plain values for a config, or `None` before any rows were added.

        These are `levels`, `tokens` and, per level, `scale` (root mean square of its entries), `mean` and `deviation`
        of the chosen channels, and `correlation` of every pair of channels in hundredths, as one compact string.
        """
        if self._sums is None or not self.tokens:
            return None
        means = self._sums / self.tokens
        count = int((means.shape[-1] - 1) ** 0.5)  # the last dimension has 1 + count + count ** 2 entries
        scale, centre, products = means.split([1, count, count * count], dim=-1)
        covariance = products.view(-1, count, count) - centre[:, :, None] * centre[:, None]
        deviation = covariance.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
        spread = (deviation[:, :, None] * deviation[:, None]).clamp_min(1e-24)
        first, second = torch.triu_indices(count, count, 1)
        pairs = (100 * covariance / spread)[:, first, second].round().long().tolist()
        return {
            "levels": self.levels,
            "tokens": self.tokens,
            "scale": _rounded(scale[:, 0].sqrt()),
            "mean": _rounded(centre),
            "deviation": _rounded(deviation),
            "correlation": [" ".join(map(str, level)) for level in pairs],
        }


def _rounded(values: torch.Tensor) -> Any:
    def plain(value: Any) -> Any:
        return float(f"{value:.4g}") if isinstance(value, float) else [plain(one) for one in value]

    return plain(values.tolist())


def statistics_problem(stored: dict[str, Any], measured: dict[str, Any]) -> str | None:
    """Says how a target's features differ from those that heads were trained on; `None` if they do not.

    Args:
        stored: Statistics from the heads' config.
        measured: Statistics measured on the target at hand, for the same levels.
    """
    if len(stored.get("scale", ())) != len(measured["scale"]):
        known = len(stored.get("scale", ()))
        return f"the heads were trained on {known} hidden states, and read {len(measured['scale'])}"
    for index, level in enumerate(measured["levels"]):
        ratio = measured["scale"][index] / max(stored["scale"][index], 1e-12)
        before, now = (
            torch.tensor([one["mean"][index], one["deviation"][index]], dtype=torch.float32)
            for one in (stored, measured)
        )
        spread = before[1].clamp_min(1e-3 * stored["scale"][index])
        shift = float(((now[0] - before[0]).abs() / spread).median())
        wider = float((now[1] / spread).log().abs().median().exp())
        said = f"hidden state {level}"
        if not 1 / SCALE_RATIO <= ratio <= SCALE_RATIO:
            return f"{said} is {ratio:.2f} times as large as in training"
        if shift > CENTRE_SHIFT:
            return f"{said} has its channels' means {shift:.1f} deviations from those in training"
        if wider > DEVIATION_RATIO:
            return f"{said} has channels that vary {wider:.1f} times as much, or as little, as in training"
        if (alike := _pattern(stored, measured, index)) is not None and alike < SAME_PATTERN:
            return f"{said} has other channels going together than in training (patterns correlate by {alike:.2f})"
    return None


def _pattern(stored: dict[str, Any], measured: dict[str, Any], index: int) -> float | None:
    """Returns the correlation between the stored and the measured correlation patterns, from -1 to 1.

    The result is `None` if a pattern is unknown or may be noise.
    """
    if "correlation" not in stored:
        return None
    rows = [[float(one) / 100 for one in each["correlation"][index].split()] for each in (stored, measured)]
    if len(rows[0]) != len(rows[1]) or len(rows[0]) < 2:
        return None
    patterns, tokens = torch.tensor(rows, dtype=torch.float32), min(stored["tokens"], measured["tokens"])
    if float(patterns.square().mean(1).min()) < ABOVE_NOISE / tokens:
        return None
    return float(torch.corrcoef(patterns)[0, 1].nan_to_num(1.0))
