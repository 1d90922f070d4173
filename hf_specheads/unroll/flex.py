"""Attention over feature streams as one fused kernel: flex attention with a block mask for streams and documents.

The keys of all streams are concatenated. A block of rows sees about half of the blocks of the first stream and one or
two blocks of every later stream; blocks that no row sees are never computed (Dong et al., arXiv 2412.05496). This is
for accelerators only: on CPUs the kernel has no backward, so the band is merged into a causal kernel there (see
[`attention`]).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

MULTIPLE = 128  # rows are padded to a multiple of the mask's block size, which also limits the compiled shapes
TOLERANCE = 0.02  # relative to the largest entry: above rounding to 16 bits, far below the effect of a wrong mask


def block_mask(ids: torch.Tensor, lag: int, lags: Sequence[int]) -> Any:
    """Returns flex attention's block mask, which says what rows of which streams each row sees.

    Args:
        ids: int64 [B, T], document of each row, -1 on padding.
        lag: Distance to the nearest visible row of stream 0; all earlier rows of the document are visible too.
        lags: Distance to the only visible row of each later stream.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    ids = nn.functional.pad(ids, (0, -ids.shape[1] % MULTIPLE), value=-1)
    batch, rows = ids.shape
    # These are tensors because numbers would be compiled into the kernel, one kernel for each shape and depth.
    row = torch.arange(rows, device=ids.device).repeat(1 + len(lags))
    shift = torch.tensor([lag, *lags], device=ids.device).repeat_interleave(rows)
    causal = torch.arange(len(row), device=ids.device) < rows

    def seen(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        behind = query - row[key] - shift[key]
        return (ids[b, query] == ids[b, row[key]]) & ((behind == 0) | (causal[key] & (behind > 0)))

    compiled = ids.device.type != "cpu"
    return create_block_mask(seen, batch, None, rows, len(row), device=ids.device, _compile=compiled)


def attend(
    mask: Any, scaling: float, query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Computes the attention of [`attention.StreamAttention`] without phantom columns and dropout.

    Args:
        mask: Result of [`block_mask`].
        scaling: Factor applied to the scores.
        query: [B, heads, T, head_dim].
        keys, values: [B, key-value heads, T, head_dim] each, of stream 0 and then of the later streams in the order of
            the mask's lags.

    Returns:
        [B, heads, T, head_dim].
    """
    rows = query.shape[2]
    key, value = (torch.cat([_padded(x) for x in part], dim=2) for part in (keys, values))
    grouped = query.shape[1] != key.shape[1]
    run = kernel(query.device.type)
    return run(_padded(query), key, value, block_mask=mask, scale=scaling, enable_gqa=grouped)[:, :, :rows]


def _padded(states: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(states, (0, 0, 0, -states.shape[2] % MULTIPLE))


@cache
def kernel(device: str) -> Callable[..., torch.Tensor]:
    """Returns flex attention, compiled on accelerators because uncompiled it allocates a tensor of all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device == "cpu" else torch.compile(flex_attention)  # type: ignore[return-value]


def problem(
    ours: Callable[..., torch.Tensor], plain: Callable[..., torch.Tensor], states: Sequence[torch.Tensor]
) -> str | None:
    """Compares the kernel with plain operations once, forward and backward, and says why it cannot be used.

    Args:
        ours, plain: The kernel and the plain operations, functions of the states with outputs of equal shape.
        states: Inputs of both functions.

    Returns:
        The reason, or `None` if the kernel can be used.
    """
    try:
        found, wanted = (_with_gradients(run, states) for run in (ours, plain))
    except Exception as error:  # e.g. there is no compiler, or no kernel for these sizes
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    for mine, theirs in zip(found, wanted, strict=True):
        difference = float((mine.float() - theirs.float()).abs().max() / theirs.float().abs().max())
        if not difference <= TOLERANCE:
            return f"it is off by {difference:.2g} of what it should be"
    return None


def _with_gradients(run: Callable[..., torch.Tensor], states: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for x in states]
        out = run(*leaves)
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)
