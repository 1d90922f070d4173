"""Cross-entropy over large vocabularies with few passes over [R, V], and without [R, V] tensors of its own.

Over a large vocabulary, a loss whose every operation reads and writes [R, V] costs as much as `lm_head`. CPUs process
the rows in blocks that fit their cache and reuse one scratch block, because touching the fresh pages of new tensors
costs more than the arithmetic. Accelerators run the same formulas as one compiled kernel per direction. Logits in half
precision stay in half precision in memory; the arithmetic is fp32, a block at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

BLOCK_ELEMENTS = 2**17  # half a megabyte of fp32, which fits the second-level cache of a core


def cross_entropy(logits: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns -sum_x p(x) log q(x) of every row, fp32 [R], and the logarithm of q's normaliser, fp32 [R].

    Args:
        logits: Logits of q, [R, V] of any float dtype.
        probs: Probabilities p, fp32 [R, V].
    """
    return _of_device(logits.device.type)[0](logits, probs)


def cross_entropy_gradient(
    logits: torch.Tensor,
    normaliser: torch.Tensor,
    probs: torch.Tensor,
    draft_grad: torch.Tensor,
    target_grad: torch.Tensor,
) -> torch.Tensor:
    """Overwrites the logits with `draft_grad` q - `target_grad` p, in their dtype.

    Args:
        logits: Logits of q, [R, V] of any float dtype; **changed in place**.
        normaliser: Logarithm of q's normaliser, fp32 [R], from [`cross_entropy`].
        probs: Probabilities p, fp32 [R, V].
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
        # The largest probability is 1 / sum(exp(logits - max)), so its log gives the normaliser without another exp.
        normaliser[at] = block.amax(dim=-1) - draft.amax(dim=-1).log()
        token[at] = normaliser[at] - torch.mul(probs[at], block, out=draft).sum(dim=-1)
    return token, normaliser


def _backward_in_blocks(
    logits: torch.Tensor, normaliser: torch.Tensor, probs: torch.Tensor, draft: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    rows = max(BLOCK_ELEMENTS // max(logits.shape[1], 1), 1)
    for first in range(0, logits.shape[0], rows):
        at = slice(first, first + rows)
        block = logits[at].float()  # a view of fp32 logits, a copy for other dtypes
        block.sub_(normaliser[at, None]).exp_().mul_(draft[at, None])
        block.addcmul_(probs[at], target[at, None], value=-1)
        if block.dtype != logits.dtype:
            logits[at] = block
    return logits


@cache
def _of_device(kind: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns forward and gradient functions for a device type: in blocks on CPUs, otherwise compiled if possible."""
    if kind == "cpu":
        return _forward_in_blocks, _backward_in_blocks
    return compiled_or_plain(kind)


def compiled_or_plain(kind: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compiles forward and gradient and compares them with the plain functions on a few rows; returns the plain
    functions, with a warning, if either step fails."""
    values = torch.randn(3, 40, dtype=torch.float32, device=kind)
    probs = torch.rand(3, 40, dtype=torch.float32, device=kind).softmax(dim=-1)
    plain = _forward, _backward
    try:
        compiled = torch.compile(_forward, dynamic=True), torch.compile(_backward, dynamic=True)
        for dtype in (torch.float32, torch.bfloat16):
            wanted, found = (_on_rows(both, values.to(dtype, copy=True), probs) for both in (plain, compiled))
            torch.testing.assert_close(found, wanted, rtol=1e-3 if dtype == torch.float32 else 1e-2, atol=1e-4)
    except Exception as error:  # compilers may be missing, and fail with errors of any class
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
