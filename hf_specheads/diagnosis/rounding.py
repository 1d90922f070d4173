"""Measures the rounding of a target: how much logits change if several tokens enter a forward instead of one.

A round verifies its nodes in one forward, while plain decoding has one forward per token. Both compute the same sums,
but for other shapes the terms are added in another order, so logits agree only up to rounding. The size of this error
depends on model, dtype and shape. It is measured here with transformers' own forwards.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from ..cache.layers import read_on
from ..cache.names import cache_parameter
from ..target.recurrence import is_recurrent
from ..target.structure import forward_parameters

POSITIONS = 64  # number of positions at the end of a text at which both kinds of forwards are compared


@dataclass(frozen=True)
class Rounding:
    """Differences between a forward over several tokens and forwards over one token.

    Attributes:
        nodes: Number of tokens of the forward over several tokens.
        positions: Number of positions at which logits were compared.
        gap: Largest change of the difference between the two largest logits.
        typical_gap: Median of these changes.
        logits: Largest root mean square of the changes of all logits, after subtracting the mean change.
    """

    nodes: int
    positions: int
    gap: float
    typical_gap: float
    logits: float


@torch.no_grad()
def measure_rounding(target: PreTrainedModel, token_ids: torch.Tensor, nodes: int) -> Rounding:
    """Compares logits at the end of a text, from forwards of one token and of `nodes` tokens, after the same prefill.

    Args:
        target: The target; only its stock forward with a stock cache is used.
        token_ids: int64 [1, T], T at least 2.
        nodes: Number of tokens that enter a forward together.

    Raises:
        ValueError: If the text has fewer than two tokens, or there are several texts.
    """
    length = token_ids.shape[1]
    if token_ids.shape[0] != 1 or length < 2:
        raise ValueError(f"rounding is measured on one text of at least 2 tokens, got shape {list(token_ids.shape)}.")
    start = max(1, length - POSITIONS)
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    parameters = forward_parameters(target)
    name = cache_parameter(parameters)
    target(input_ids=token_ids[:, :start], use_cache=True, **{name: cache})
    single = _logits(target, name, copy.deepcopy(cache), token_ids[:, start:], start, 1)
    several = _logits(target, name, cache, token_ids[:, start:], start, max(nodes, 2))
    gaps, shifts = gap_changes(single, several), logit_shifts(single, several)
    return Rounding(nodes, length - start, float(gaps.max()), float(gaps.median()), float(shifts.max()))


def _logits(
    target: PreTrainedModel, name: str, cache: DynamicCache, token_ids: torch.Tensor, held: int, step: int
) -> torch.Tensor:
    """Computes the logits after tokens [1, Q], with `step` tokens per forward; fp32 [Q, V].

    The cache already holds `held` tokens.
    """
    counted = is_recurrent(target) and "position_ids" in forward_parameters(target)
    pieces = []
    for tokens in token_ids.split(step, dim=1):
        # Caches of recurrent targets may not know how many tokens they hold, so positions are passed explicitly.
        positions = torch.tensor([[held]], device=tokens.device) if counted else None
        pieces.append(read_on(target, name, cache, None, positions, tokens).logits[0].float())
        held += tokens.shape[1]
    return torch.cat(pieces)


def gap_changes(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """How much the difference between the two largest logits of `expected` [T, V] changes in `got`; [T]."""
    favourites = expected.topk(2, dim=-1).indices
    ours, theirs = (logits.gather(-1, favourites.to(logits.device)) for logits in (got, expected))
    return ((ours[:, 0] - ours[:, 1]).cpu() - (theirs[:, 0] - theirs[:, 1]).cpu()).abs()


def logit_shifts(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Root mean square of `got` - `expected` [T, V] after subtracting its mean over the vocabulary; [T].

    The mean is subtracted because a common shift of all logits changes no choice. Logits that are -inf in both, as set
    by processors, are left out.
    """
    expected, got = expected.double().cpu(), got.double().cpu()
    shared = torch.isneginf(expected) & torch.isneginf(got)
    change = (got - expected).masked_fill(shared, 0.0)
    count = (~shared).sum(-1).clamp_min(1)
    change = (change - change.sum(-1, keepdim=True) / count[:, None]).masked_fill(shared, 0.0)
    return (change.square().sum(-1) / count).sqrt()
