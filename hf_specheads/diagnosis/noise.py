"""Tests whether prompts are text to the target, or noise, i.e. equally likely if their tokens are shuffled."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..bootstrap import Interval, careful, interval_of, ratio_draws
from .evidence import Evidence, capture

# Prose, code and dialogue: a target that was trained on text is familiar with at least one of them.
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
SHUFFLES = 3
LEAST_ORDER = 0.1


@dataclass(frozen=True)
class Noise:
    """Surprise of the target on several texts, in nats per token.

    Attributes:
        prompts, shuffled: Surprise of the prompts' tokens in their own order, and in random order.
        known, random: Surprise of the sample text that the target predicts best, and of random tokens.
        order: Share of the shuffled tokens' surprise that the prompts' own order saves.
        told: Whether the target surely predicts the sample better than random tokens, and better than by chance.
    """

    prompts: float
    shuffled: float
    known: float
    random: float
    order: Interval
    told: bool

    @property
    def found(self) -> bool:
        """Whether the prompts are noise: the target knows text, but hardly prefers these tokens in their own order."""
        return self.told and self.order.high < LEAST_ORDER

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON. Infinite ends of an interval, as for a single prompt, become `None`."""
        ends = {name: value if math.isfinite(value) else None for name, value in asdict(self.order).items()}
        return {**asdict(self), "order": ends}


def measure_noise(target: PreTrainedModel, evidence: Evidence, tokenizer: Any) -> Noise | None:
    """Measures the noise of an evidence's prompts.

    Returns `None` without a tokenizer, which is needed for the sample texts, or if all prompts are very short. Special
    tokens are removed from the prompts: a target that was trained only on answers may not predict users' messages in a
    chat, but it still finds their words likelier in their own order than shuffled.
    """
    if tokenizer is None:
        return None
    special = set(getattr(tokenizer, "all_special_ids", ()))
    prompts = [_without(special, ids[:start]) for ids, start in zip(evidence.token_ids, evidence.starts, strict=True)]
    prompts = [ids for ids in prompts if len(ids) >= LEAST_TOKENS]
    samples = [torch.tensor(tokenizer(text)["input_ids"]) for text in SAMPLES]
    samples = [ids for ids in samples if len(ids.unique()) > LEAST_TOKENS]  # drops samples of mostly unknown tokens
    if not prompts or not samples:
        return None
    known = min((_surprise(target, [ids])[0] for ids in samples), key=lambda one: sum(one) / len(one))
    random = [sum(one) for one in _surprise(target, _random_texts(target, special))]
    order, means = _order(target, prompts)
    draws = ratio_draws(known, [1.0] * len(known)), ratio_draws(random, [RANDOM_TOKENS - 1.0] * len(random))
    mean_known, mean_random = sum(known) / len(known), sum(random) / len(random) / (RANDOM_TOKENS - 1)
    told = careful(interval_of(draws[1] - draws[0], mean_random - mean_known), len(random)).low > 0
    # A target that knows no text predicts no sample surely better than a uniform distribution over the vocabulary.
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    knows = float(draws[0].quantile(0.975)) < math.log(vocabulary)
    return Noise(*means, mean_known, mean_random, order, told and knows)


def _order(target: PreTrainedModel, prompts: list[torch.Tensor]) -> tuple[Interval, tuple[float, float]]:
    """Share of surprise that the order of tokens saves, and nats per token in their own order and shuffled."""
    generator = torch.Generator().manual_seed(0)
    ordered = [sum(one) for one in _surprise(target, prompts)]
    shuffled = [0.0] * len(prompts)
    for _ in range(SHUFFLES):
        mixed = [ids[torch.randperm(len(ids), generator=generator)] for ids in prompts]
        sums = [sum(one) for one in _surprise(target, mixed)]
        shuffled = [so_far + one / SHUFFLES for so_far, one in zip(shuffled, sums, strict=True)]
    counts = [len(ids) - 1.0 for ids in prompts]
    saved = interval_of(1 - ratio_draws(ordered, shuffled), 1 - sum(ordered) / sum(shuffled))
    return careful(saved, len(prompts)), (sum(ordered) / sum(counts), sum(shuffled) / sum(counts))


def _surprise(target: PreTrainedModel, texts: list[torch.Tensor]) -> list[list[float]]:
    """Surprise of every token but the first, per text."""
    found = capture(target, texts, [0] * len(texts)).surprise
    return [row[1 : len(ids)].tolist() for row, ids in zip(found, texts, strict=True)]


def _without(special: set[int], ids: torch.Tensor) -> torch.Tensor:
    """Removes special tokens; int64 [T]."""
    return torch.tensor([token for token in ids.tolist() if token not in special], dtype=torch.long)


def _random_texts(target: PreTrainedModel, special: set[int]) -> list[torch.Tensor]:
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    plain = torch.tensor([token for token in range(vocabulary) if token not in special])
    generator = torch.Generator().manual_seed(0)
    return [plain[torch.randint(len(plain), (RANDOM_TOKENS,), generator=generator)] for _ in range(RANDOM_TEXTS)]
