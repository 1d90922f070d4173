"""Whether prompts are text to the target, or noise: between a text it must know and tokens drawn at random."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..bootstrap import Interval, careful, interval_of, ratio_draws
from .evidence import Evidence, capture

# Prose, code and talk; a target that was trained on text knows at least one of them.
SAMPLES = (
    "The river rises in the hills to the north of the town and flows past the old mill before it reaches the sea. "
    "In spring, when the snow melts, the water is high, and nobody who lives near it is surprised when the fields "
    "are wet until the first days of May.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n\n\nclass Counter:\n    def __init__(self):\n        self.count = 0\n\n"
    "    def add(self, number=1):\n        self.count += number\n        return self.count\n",
    "Hello! How can I help you today?\nI would like to know how to cook rice. What do I have to do first?\nSure. "
    "First, wash the rice in cold water. Then put it into a pot with twice as much water and let it cook for about "
    "twenty minutes.",
)
RANDOM_TEXTS, RANDOM_TOKENS, LEAST_TOKENS = 8, 48, 8


@dataclass(frozen=True)
class Noise:
    """Surprise in nats a token.

    Attributes:
        prompts, known, random: Of the prompts, of the sample that the target knows best, and of random tokens.
        share: Where the prompts stand between both, from 0 to 1.
        told: Whether the target surely tells the sample from random tokens.
    """

    prompts: float
    known: float
    random: float
    share: Interval
    told: bool

    @property
    def found(self) -> bool:
        """Whether prompts are surely nearer to random tokens, for a target that knows text at all."""
        return self.told and self.share.low > 0.5

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which has no infinity: of a single prompt no interval is known."""
        ends = {name: value if math.isfinite(value) else None for name, value in asdict(self.share).items()}
        return {**asdict(self), "share": ends}


def measure_noise(target: PreTrainedModel, evidence: Evidence, tokenizer: Any) -> Noise | None:
    """Of the prompts of an evidence; `None` without a tokenizer, since no text is known then, or without prompts of
    more than a few tokens."""
    places = torch.arange(evidence.token_ids.shape[1], device=evidence.token_ids.device)[None]
    starts = torch.tensor(evidence.starts, device=places.device)[:, None]
    given = (places >= 1) & (places < starts)
    if tokenizer is None or int(given.sum()) < LEAST_TOKENS * len(evidence.starts):
        return None
    prompts = (evidence.surprise * given).sum(-1).tolist(), given.sum(-1).tolist()
    random = _surprise(target, _random_texts(target, tokenizer))
    samples = [torch.tensor(tokenizer(text)["input_ids"]) for text in SAMPLES]
    samples = [ids for ids in samples if len(ids.unique()) > LEAST_TOKENS]  # and not unknown words
    known = min((_surprise(target, [ids]) for ids in samples), key=lambda one: float(one.mean()), default=None)
    if known is None:
        return None
    by_token = known[0].tolist()
    sides = [(prompts[0], prompts[1]), (by_token, [1.0] * len(by_token)),
             (random.sum(-1).tolist(), [float(random.shape[1])] * len(random))]  # fmt: skip
    draws = [ratio_draws(sums, counts) for sums, counts in sides]
    means = [sum(sums) / sum(counts) for sums, counts in sides]
    between = interval_of(draws[2] - draws[1], means[2] - means[1])
    units = min(len(prompts[0]), len(random))
    share = (draws[0] - draws[1]) / (draws[2] - draws[1]).clamp_min(1e-6)
    mean = (means[0] - means[1]) / max(means[2] - means[1], 1e-6)
    # Who knows no text finds none surely likelier than if all tokens were alike.
    knows = float(draws[1].quantile(0.975)) < math.log(target.config.get_text_config(decoder=True).vocab_size)
    stands, told = careful(interval_of(share, mean), units), careful(between, units).low > 0
    return Noise(means[0], means[1], means[2], stands, told and knows)


def _surprise(target: PreTrainedModel, texts: list[torch.Tensor]) -> torch.Tensor:
    """fp32 [B, T - 1], of texts of one length."""
    return capture(target, texts, [0] * len(texts)).surprise[:, 1:]


def _random_texts(target: PreTrainedModel, tokenizer: Any) -> list[torch.Tensor]:
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    special = set(getattr(tokenizer, "all_special_ids", ()))
    plain = torch.tensor([token for token in range(vocabulary) if token not in special])
    generator = torch.Generator().manual_seed(0)
    return [plain[torch.randint(len(plain), (RANDOM_TOKENS,), generator=generator)] for _ in range(RANDOM_TEXTS)]
