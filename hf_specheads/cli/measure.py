"""Generates the same prompts plainly and with heads, and compares the two."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from ..heads.base import DraftHead
    from ..metrics import GenerationStats


@dataclass
class Sample:
    """One prompt generated with heads and, unless skipped, plainly.

    Attributes:
        prompt_length: Number of tokens of the prompt.
        token_ids: New tokens with heads.
        seconds: Wall seconds with heads.
        stats: Statistics of the generation with heads.
        steps: For every target forward, the number of tokens that it gained, and how many of these were drafted; the
            drafted tokens come first.
        plain_token_ids, plain_seconds: New tokens and wall seconds of plain generation; `None` if skipped.
    """

    prompt_length: int
    token_ids: list[int]
    seconds: float
    stats: GenerationStats
    steps: list[tuple[int, int]] = field(default_factory=list)
    plain_token_ids: list[int] | None = None
    plain_seconds: float | None = None

    @property
    def identical(self) -> bool | None:
        """Whether both generations gave the same tokens; `None` if plain generation was skipped."""
        return None if self.plain_token_ids is None else self.plain_token_ids == self.token_ids

    @property
    def speed_up(self) -> float | None:
        """Tokens per second with heads, divided by those of plain generation."""
        if not self.plain_seconds:
            return None
        return (len(self.token_ids) / self.seconds) / (len(self.plain_token_ids or ()) / self.plain_seconds)


@dataclass
class Summary:
    """All samples of a run together. Rates are ratios of sums, so long generations weigh more."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """New tokens with heads."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second with heads, prefill included."""
        return self.num_tokens / max(sum(sample.seconds for sample in self.samples), 1e-9)

    @property
    def plain_tokens_per_second(self) -> float | None:
        """Tokens per second of plain generation, prefill included; `None` if any sample lacks it."""
        if not self.samples or any(sample.plain_seconds is None for sample in self.samples):
            return None
        tokens = sum(len(sample.plain_token_ids or ()) for sample in self.samples)
        return tokens / max(sum(sample.plain_seconds or 0.0 for sample in self.samples), 1e-9)

    @property
    def speed_up(self) -> float | None:
        """Tokens per second with heads, divided by those of plain generation; `None` if not compared."""
        plain = self.plain_tokens_per_second
        return None if plain is None else self.tokens_per_second / plain

    @property
    def acceptance_length(self) -> float:
        """tau over the rounds of all samples."""
        from ..metrics import acceptance_length

        return acceptance_length([row for sample in self.samples for row in sample.stats.num_accepted])

    @property
    def pos_acc(self) -> list[float]:
        """Conditional acceptance per draft position over the rounds of all samples."""
        from ..metrics import position_acceptance

        return position_acceptance(
            [row for sample in self.samples for row in sample.stats.num_accepted],
            [row for sample in self.samples for row in sample.stats.offered],
        )

    @property
    def target_forwards(self) -> int:
        """Target forwards with heads; plain generation needs one per token."""
        return sum(sample.stats.target_forwards for sample in self.samples)

    @property
    def tokens_per_forward(self) -> float:
        """New tokens per target forward, prefills and plain steps included; plain generation has 1."""
        return self.num_tokens / self.target_forwards if self.target_forwards else 0.0

    @property
    def plain_steps(self) -> int:
        """Number of target forwards without drafts, between rounds."""
        return sum(sample.stats.plain_steps for sample in self.samples)

    @property
    def plain_because(self) -> list[str]:
        """Distinct reasons for plain steps."""
        return list(dict.fromkeys(s.stats.plain_because for s in self.samples if s.stats.plain_because))

    @property
    def all_identical(self) -> bool | None:
        """Whether all texts are identical to the plain ones; `None` if not compared."""
        verdicts = [sample.identical for sample in self.samples]
        return None if None in verdicts else all(verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return {
            "prompts": len(self.samples),
            "new_tokens": self.num_tokens,
            "acceptance_length": self.acceptance_length,
            "pos_acc": self.pos_acc,
            "tokens_per_second": self.tokens_per_second,
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "speed_up": self.speed_up,
            "target_forwards": self.target_forwards,
            "tokens_per_forward": self.tokens_per_forward,
            "plain_steps": self.plain_steps,
            "plain_because": self.plain_because,
            "identical": self.all_identical,
        }


def run_sample(
    target: PreTrainedModel,
    heads: DraftHead,
    inputs: dict[str, torch.Tensor],
    compare: bool,
    seed: int = 0,
    **generate_kwargs: Any,
) -> Sample:
    """Generates one prompt with heads and, if `compare`, plainly, with the same seed."""
    import torch

    from ..tuning.turns import timed_generation

    steps: list[tuple[int, int]] = []
    before, heads.on_round = heads.on_round, lambda step: steps.append((len(step.token_ids()), step.num_drafted()))
    torch.manual_seed(seed)
    try:
        (token_ids,), seconds = timed_generation(target, inputs, assistant_model=heads, **generate_kwargs)
    finally:
        heads.on_round = before
    sample = Sample(inputs["input_ids"].shape[1], token_ids, seconds, heads.last_stats, steps)
    if compare:
        torch.manual_seed(seed)
        (sample.plain_token_ids,), sample.plain_seconds = timed_generation(target, inputs, **generate_kwargs)
    return sample


def warm_up(target: PreTrainedModel, heads: DraftHead, inputs: dict[str, torch.Tensor]) -> None:
    """Runs one short generation with heads and one plainly, so that first-call costs are not measured."""
    for assistant in ({"assistant_model": heads}, {}):
        target.generate(**inputs, max_new_tokens=8, do_sample=False, **assistant)
