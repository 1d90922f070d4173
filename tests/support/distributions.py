"""The target's distribution, computed naively, and tests of whether samples follow it."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import torch

from hf_specheads.generation.sampling import TokenSampler
from support.targets import shared_target

VOCAB = 5
PROMPT = torch.tensor([[3, 4, 3, 1, 2, 4]])


def five_token_target():
    return shared_target("llama", vocab_size=VOCAB, num_hidden_layers=1, seed=2)


def sample(target, heads=None, new_tokens: int = 3, **options: Any) -> torch.Tensor:
    """Returns the new tokens of one sampled generation. No logits warper is active unless the options ask for it."""
    options = {"top_k": 0, "do_sample": True, "max_new_tokens": new_tokens} | options
    mask = torch.ones_like(PROMPT)
    return target.generate(PROMPT, attention_mask=mask, assistant_model=heads, **options)[0, PROMPT.shape[1] :]


def processed(logits: torch.Tensor, ids: list[int], setting: dict[str, Any]) -> torch.Tensor:
    """Returns probabilities [V] after penalty, temperature, top-k and top-p, in this order, computed step by step."""
    logits = logits.clone()
    for token in set(ids):
        penalty = setting.get("repetition_penalty", 1.0)
        logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
    logits = logits / setting.get("temperature", 1.0)
    order = logits.argsort(descending=True)
    logits[order[setting.get("top_k") or VOCAB :]] = -torch.inf
    probabilities, before = logits.softmax(-1), 0.0
    for token in order.tolist():  # keep the smallest set of best tokens whose mass reaches top_p
        if before >= setting.get("top_p", 1.0) - 1e-9:
            logits[token] = -torch.inf
        before += probabilities[token].item()
    return logits.softmax(-1)


@torch.no_grad()
def target_distribution(target, setting: dict[str, Any], length: int) -> dict[tuple[int, ...], float]:
    """Returns the probability of every output of `length` tokens, from forwards without cache. The result must not be
    changed."""
    return _distribution(target, tuple(setting.items()), length)


@functools.cache
def _distribution(target, setting: tuple[tuple[str, Any], ...], length: int) -> dict[tuple[int, ...], float]:
    outputs = list(itertools.product(range(VOCAB), repeat=length))
    ids = torch.cat([PROMPT.expand(len(outputs), -1), torch.tensor(outputs)], dim=1)
    logits = target(ids).logits[:, PROMPT.shape[1] - 1 : -1]
    known: dict[tuple[int, ...], list[float]] = {}
    result = {}
    for row, output in enumerate(outputs):
        probability = 1.0
        for step, token in enumerate(output):
            if output[:step] not in known:
                context = PROMPT[0].tolist() + list(output[:step])
                known[output[:step]] = processed(logits[row, step], context, dict(setting)).tolist()
            probability *= known[output[:step]][token]
        result[output] = probability
    return result


def largest_error(a: dict, b: dict) -> float:
    return max(abs(a[output] - b[output]) for output in b)


def chi_square(counts: Counter, expected: dict[Any, float], samples: int) -> tuple[float, int]:
    """Returns the chi-square statistic and its degrees of freedom. Cells expected fewer than 5 times are pooled."""
    large = [cell for cell, probability in expected.items() if samples * probability >= 5]
    cells = [(counts[cell], samples * expected[cell]) for cell in large]
    cells.append((samples - sum(c for c, _ in cells), samples - sum(e for _, e in cells)))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells if mean > 1e-9)
    return statistic, len(large)


def critical_value(freedom: int, z: float = 4.0) -> float:
    """Returns Wilson and Hilferty's approximation of the critical value. With z = 4, a correct sampler exceeds it once
    in 30000 runs (the seed is fixed)."""
    return freedom * (1 - 2 / (9 * freedom) + z * (2 / (9 * freedom)) ** 0.5) ** 3


def script_draws(monkeypatch: Any, draw: Any) -> None:
    """Lets `draw(probabilities [rows, V], 1)` choose every sampled token; it returns int64 [rows, 1]."""

    def race(probs: torch.Tensor) -> torch.Tensor:
        return draw(probs.flatten(0, -2), 1).view(probs.shape[:-1])

    monkeypatch.setattr(torch, "multinomial", lambda probs, num_samples: draw(probs, num_samples))
    monkeypatch.setattr(TokenSampler, "race", staticmethod(race))
