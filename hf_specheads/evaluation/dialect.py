"""Acceptance by the definitions of several projects, all computed from the same rounds.

| name | definition, and who uses it |
|---|---|
| `acceptance_length` | micro average: 1 + accepted / rounds over all rounds (vLLM, SGLang, DeepSpec, our tau) |
| `acceptance_length_macro` | mean of the acceptance lengths of prompts (ModelOpt's specdec_bench, z-lab) |
| `acceptance_length_without_bonus` | `acceptance_length` - 1 (EAGLE's scripts) |
| `draft_acceptance_rate` | accepted / drafted tokens (vLLM) |
| `acceptance_at_pos_i` | survival: rounds that accepted i or more tokens / rounds (vLLM, speculators) |
| `conditional_acceptance_at_pos_i` | acceptance given that all earlier positions were (EAGLE, ModelOpt, our pos-acc) |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..bootstrap import Interval, difference_interval, interval_of, ratio_draws, ratio_interval
from ..metrics import GenerationStats, position_acceptance


@dataclass(frozen=True)
class PromptRounds:
    """Rounds of one prompt.

    Attributes:
        accepted: Number of accepted draft tokens of every round, bonus token not counted.
        offered: Number of draft positions that every round could have accepted.
    """

    accepted: tuple[int, ...]
    offered: tuple[int, ...]

    @classmethod
    def of(cls, stats: GenerationStats) -> list[PromptRounds]:
        """Returns the rounds of every sequence of a call."""
        rows = zip(stats.num_accepted, stats.offered, strict=True)
        return [cls(tuple(accepted), tuple(offered)) for accepted, offered in rows]


def tau_interval(prompts: Sequence[PromptRounds]) -> Interval:
    """Micro-averaged acceptance length, with its 95 % interval over prompts."""
    return ratio_interval(*_tokens_and_rounds(prompts))


def tau_difference(ours: Sequence[PromptRounds], theirs: Sequence[PromptRounds]) -> Interval:
    """Micro-averaged acceptance length of `ours` minus that of `theirs`, paired by prompt.

    Raises:
        ValueError: If the numbers of prompts differ.
    """
    if len(ours) != len(theirs):
        raise ValueError(
            f"differences are paired by prompt, got {len(ours)} and {len(theirs)} prompts; use the same ones."
        )
    return difference_interval(_tokens_and_rounds(ours), _tokens_and_rounds(theirs))


def _tokens_and_rounds(prompts: Sequence[PromptRounds]) -> tuple[list[float], list[float]]:
    rounds = [float(len(one.accepted)) for one in prompts]
    return [sum(one.accepted) + count for one, count in zip(prompts, rounds, strict=True)], rounds


def field_metrics(prompts: Sequence[PromptRounds]) -> dict[str, Any]:
    """Computes acceptance by all definitions, under the names of vLLM's metrics where these exist.

    Args:
        prompts: Rounds of every prompt; prompts without rounds are ignored.

    Returns:
        Plain values; empty without rounds. `histogram` counts rounds by their number of tokens, bonus token included.
    """
    prompts = [one for one in prompts if one.accepted]
    if not prompts:
        return {}
    accepted = [count for one in prompts for count in one.accepted]
    offered = [count for one in prompts for count in one.offered]
    depth = max(offered, default=0)
    each = [1 + sum(one.accepted) / len(one.accepted) for one in prompts]
    micro, macro = tau_interval(prompts), sum(each) / len(each)
    macro_draws = interval_of(ratio_draws(each, [1.0] * len(each)), macro)
    conditional = position_acceptance([list(one.accepted) for one in prompts], [list(one.offered) for one in prompts])
    return {
        "num_drafts": len(accepted),
        "num_draft_tokens": sum(offered),
        "num_accepted_tokens": sum(accepted),
        "num_accepted_tokens_per_pos": [sum(count >= i for count in accepted) for i in range(1, depth + 1)],
        "acceptance_length": micro.mean,
        "acceptance_length_interval": [micro.low, micro.high],
        "acceptance_length_macro": macro,
        "acceptance_length_macro_interval": [macro_draws.low, macro_draws.high],
        "acceptance_length_without_bonus": micro.mean - 1,
        "draft_acceptance_rate": sum(accepted) / max(sum(offered), 1),
        **{f"acceptance_at_pos_{i}": sum(count >= i for count in accepted) / len(accepted)
           for i in range(1, depth + 1)},
        **{f"conditional_acceptance_at_pos_{i}": value for i, value in enumerate(conditional, start=1)},
        "histogram": {str(tokens): count for tokens, count in sorted(Counter(n + 1 for n in accepted).items())},
    }  # fmt: skip
