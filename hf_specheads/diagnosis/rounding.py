"""The rounding of a target: by how much logits change when several tokens enter a forward instead of one.

A round verifies its nodes in one forward, plain decoding has a forward per token. Both are the same arithmetic, but
sums of other shapes are added up in another order, so logits agree up to rounding only. How much that is depends on
model, type and shape; here it is measured, with forwards of transformers alone.
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

POSITIONS = 64  # at the end of a text, at which both kinds of forwards are compared


@dataclass(frozen=True)
class Rounding:
    """What a forward over several tokens changes.

    Attributes:
        nodes: Tokens of that forward.
        positions: At how many positions it was compared with forwards of one token.
        gap: The most by which the distance between the two favourites changed, in logits.
        typical_gap: The median of these changes.
        logits: The largest root mean square of all logits' changes, less their mean.
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
        target: The target; only stock forwards with a stock cache are asked of it.
        token_ids: int64 [1, T], T at least 2.
        nodes: Tokens that enter together.

    Raises:
        ValueError: for a text of less than two tokens.
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
    """fp32 [Q, V], logits after every token [1, Q] that follows upon the `held` ones in the cache, `step` tokens a
    forward."""
    counted = is_recurrent(target) and "position_ids" in forward_parameters(target)
    pieces = []
    for tokens in token_ids.split(step, dim=1):
        # Caches of recurrent targets may not know how many tokens they hold.
        positions = torch.tensor([[held]], device=tokens.device) if counted else None
        pieces.append(read_on(target, name, cache, None, positions, tokens).logits[0].float())
        held += tokens.shape[1]
    return torch.cat(pieces)


def gap_changes(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """[T], by how much the distance between the two favourites of `expected` [T, V] is another one in `got`."""
    favourites = expected.topk(2, dim=-1).indices
    ours, theirs = (logits.gather(-1, favourites.to(logits.device)) for logits in (got, expected))
    return ((ours[:, 0] - ours[:, 1]).cpu() - (theirs[:, 0] - theirs[:, 1]).cpu()).abs()


def logit_shifts(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """[T], root mean square of `got` - `expected` [T, V] less its mean: what all tokens share changes no choice.
    Logits that processors have set to -inf in both are left out."""
    expected, got = expected.double().cpu(), got.double().cpu()
    shared = torch.isneginf(expected) & torch.isneginf(got)
    change = (got - expected).masked_fill(shared, 0.0)
    count = (~shared).sum(-1).clamp_min(1)
    change = (change - change.sum(-1, keepdim=True) / count[:, None]).masked_fill(shared, 0.0)
    return (change.square().sum(-1) / count).sqrt()
