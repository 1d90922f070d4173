"""Cross-entropy over large vocabularies with few passes over [R, V], and none of its own kept.

Over a large vocabulary a loss costs as much as `lm_head` when every operation reads and writes [R, V]. Processors go
through the rows in blocks that stay in their cache, with one scratch block instead of tensors (whose fresh pages cost
more than what is computed in them); accelerators run the same formulas as one compiled kernel in each direction.
Logits of half precision stay so in memory: what is computed of them is computed in fp32, a block at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

BLOCK_ELEMENTS = 2**17  # fp32, half a megabyte: in a core's second-level cache


def cross_entropy(logits: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-sum_x p(x) log q(x) of every row, fp32 [R], and the logarithm of q's normaliser, fp32 [R].

    Args:
        logits: Of q, [R, V] of any float dtype.
        probs: p, fp32 [R, V].
    """
    return _of_device(logits.device.type)[0](logits, probs)


def cross_entropy_gradient(
    logits: torch.Tensor,
    normaliser: torch.Tensor,
    probs: torch.Tensor,
    draft_grad: torch.Tensor,
    target_grad: torch.Tensor,
) -> torch.Tensor:
    """`draft_grad` q - `target_grad` p, written over the logits, in their dtype.

    Args:
        logits: Of q, [R, V] of any float dtype; **changed**.
        normaliser: As [`cross_entropy`] returns it.
        probs: p, fp32 [R, V].
        draft_grad, target_grad: Factors of each row, fp32 [R].

    Returns:
        `logits`.
    """
    return _of_device(logits.device.type)[1](logits, normaliser, probs, draft_grad, target_grad)


def _forward(logits: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.float()
    highest = logits.amax(dim=-1, keepdim=True)
    normaliser = (logits - highest).exp().sum(dim=-1).log() + highest[:, 0]
    return normaliser - (probs * logits).sum(dim=-1), normaliser


def _backward(
    logits: torch.Tensor, normaliser: torch.Tensor, probs: torch.Tensor, draft: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    grad = (logits.float() - normaliser[:, None]).exp() * draft[:, None] - probs * target[:, None]
    return logits.copy_(grad)


def _forward_in_blocks(logits: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = max(BLOCK_ELEMENTS // max(logits.shape[1], 1), 1)
    scratch = torch.empty_like(probs[:rows])
    token, normaliser = (probs.new_empty(logits.shape[0]) for _ in range(2))
    for first in range(0, logits.shape[0], rows):
        at = slice(first, first + rows)
        block = logits[at].float()
        draft = torch.softmax(block, dim=-1, out=scratch[: len(block)])
        # The largest probability is 1 / sum(exp(logits - max)): its log gives the normaliser without an exponential.
        normaliser[at] = block.amax(dim=-1) - draft.amax(dim=-1).log()
        token[at] = normaliser[at] - torch.mul(probs[at], block, out=draft).sum(dim=-1)
    return token, normaliser


def _backward_in_blocks(
    logits: torch.Tensor, normaliser: torch.Tensor, probs: torch.Tensor, draft: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    rows = max(BLOCK_ELEMENTS // max(logits.shape[1], 1), 1)
    for first in range(0, logits.shape[0], rows):
        at = slice(first, first + rows)
        block = logits[at].float()  # fp32 logits themselves, a copy of others
        block.sub_(normaliser[at, None]).exp_().mul_(draft[at, None])
        block.addcmul_(probs[at], target[at, None], value=-1)
        if block.dtype != logits.dtype:
            logits[at] = block
    return logits


@cache
def _of_device(kind: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and gradient for a type of device: blocks on processors, elsewhere compiled if that works."""
    if kind == "cpu":
        return _forward_in_blocks, _backward_in_blocks
    return compiled_or_plain(kind)


def compiled_or_plain(kind: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Both functions compiled, after they have agreed with the plain ones on a few rows; the plain ones otherwise."""
    values = torch.randn(3, 40, dtype=torch.float32, device=kind)
    probs = torch.rand(3, 40, dtype=torch.float32, device=kind).softmax(dim=-1)
    plain = _forward, _backward
    try:
        compiled = torch.compile(_forward, dynamic=True), torch.compile(_backward, dynamic=True)
        for dtype in (torch.float32, torch.bfloat16):
            wanted, found = (_on_rows(both, values.to(dtype, copy=True), probs) for both in (plain, compiled))
            torch.testing.assert_close(found, wanted, rtol=1e-3 if dtype == torch.float32 else 1e-2, atol=1e-4)
    except Exception as error:  # no compiler, or one that fails in its own way
        reason = " ".join(str(error).split())[:200]
        warnings.warn(f"losses are not compiled on {kind}, and slower: {type(error).__name__}: {reason}", stacklevel=2)
        return plain
    return compiled


def _on_rows(
    both: tuple[Callable[..., Any], Callable[..., Any]], logits: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    forward, backward = both
    token, normaliser = forward(logits, probs)
    return token, normaliser, backward(logits, normaliser, probs, token, normaliser)
