"""Triton kernels of [`attention.attend_by_kernel`]: few rows attend to many slots, distributed over the device."""

# Triton kernels look like Python but are a language of their own, which mypy cannot check.
# mypy: ignore-errors
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

SLOTS, NARROW = 64, 128  # slots per step; half as many for heads wider than NARROW, as shared memory is limited
SMALLEST = 16  # fewest rows that the device's matrix instructions take
MOST_PARTS = 32  # most parts that the slots are divided into
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _attend(
    query, key, value, mask, output, found, highest, mass,
    q_batch, q_head, q_row, k_batch, k_head, k_slot, v_batch, v_head, v_slot, m_batch, m_row, m_slot,
    rows, slots, per_part, scaling, heads,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Attention of all rows of a group's heads over one part of its slots. Writes the sum of values `found`, weighted
    relative to the `highest` score and not yet divided by `mass`. If there is a single part, writes the output."""
    pair, part = tl.program_id(0), tl.program_id(1)
    key_heads = heads // GROUPS
    batch, group = pair // key_heads, pair % key_heads
    each, across = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    row, head, real = each % rows, group * GROUPS + each // rows, each < GROUPS * rows
    asked = query + batch * q_batch + head[:, None] * q_head + row[:, None] * q_row + across[None, :]
    ask = tl.load(asked, mask=real[:, None], other=0.0)
    best = tl.full((ROWS,), -1.0e38, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(part * per_part, (part + 1) * per_part, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        there = slot < slots
        of_slot = slot.to(tl.int64)
        keys = tl.load(key + batch * k_batch + group * k_head + of_slot[None, :] * k_slot + across[:, None],
                       mask=there[None, :], other=0.0)  # fmt: skip
        added = tl.load(mask + batch * m_batch + row[:, None] * m_row + slot[None, :] * m_slot,
                        mask=real[:, None] & there[None, :], other=-1.0e38)  # fmt: skip
        scores = tl.dot(ask, keys) * scaling + added.to(tl.float32) * LOG2_E
        scores = tl.where(there[None, :], tl.maximum(scores, -1.0e38), -1.0e38)
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.where(there[None, :], tl.exp2(scores - higher[:, None]), 0.0)
        less = tl.exp2(best - higher)
        values = tl.load(value + batch * v_batch + group * v_head + of_slot[:, None] * v_slot + across[None, :],
                         mask=there[:, None], other=0.0)  # fmt: skip
        sums = sums * less[:, None] + tl.dot(weights.to(values.dtype), values)
        total = total * less + tl.sum(weights, 1)
        best = higher
    if PARTS == 1:
        where = output + ((batch * rows + row[:, None]) * heads + head[:, None]) * WIDTH + across[None, :]
        tl.store(where, (sums / total[:, None]).to(output.dtype.element_ty), mask=real[:, None])
    else:
        place = ((batch * rows + row) * heads + head) * PARTS + part
        tl.store(found + place[:, None] * WIDTH + across[None, :], sums, mask=real[:, None])
        tl.store(highest + place, best, mask=real)
        tl.store(mass + place, total, mask=real)


@triton.jit
def _join(found, highest, mass, output, WIDTH: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """Joins what the parts found for one row of one head."""
    one = tl.program_id(0)
    part, across = tl.arange(0, PADDED), tl.arange(0, WIDTH)
    real = part < PARTS
    best = tl.load(highest + one * PARTS + part, mask=real, other=-1.0e38)
    share = tl.exp2(best - tl.max(best, 0))
    total = tl.sum(share * tl.load(mass + one * PARTS + part, mask=real, other=0.0), 0)
    sums = tl.load(found + (one * PARTS + part[:, None]) * WIDTH + across[None, :], mask=real[:, None], other=0.0)
    joined = tl.sum(sums * share[:, None], 0) / total
    tl.store(output + one * WIDTH + across, joined.to(output.dtype.element_ty))


def launch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float,
    output: torch.Tensor, processors: int,
) -> None:  # fmt: skip
    """Writes the attention of query [B, heads, N, width] over key and value [B, key heads, slots, width], under an
    additive mask [B, 1, N, slots], to the output [B, N, heads, width].

    Query, key, value and output are contiguous in their last dimension, and the width is a power of two. `processors`
    is the number of multiprocessors that the work is distributed over.
    """
    (batch, heads, rows, width), (key_heads, slots) = query.shape, key.shape[1:3]
    at_once = SLOTS if width <= NARROW else SLOTS // 2
    blocks = triton.cdiv(slots, at_once)
    parts = max(1, min(processors // (batch * key_heads), blocks, MOST_PARTS))
    per_part = triton.cdiv(blocks, parts) * at_once
    parts = triton.cdiv(slots, per_part)
    many = (batch * rows * heads, parts)
    found, (highest, mass) = (
        query.new_empty(*many, width, dtype=torch.float32),
        (query.new_empty(many, dtype=torch.float32) for _ in range(2)),
    )
    padded = max(SMALLEST, triton.next_power_of_2(rows * heads // key_heads))
    _attend[(batch * key_heads, parts)](
        query, key, value, mask, output, found, highest, mass, *query.stride()[:3], *key.stride()[:3],
        *value.stride()[:3], mask.stride(0), *mask.stride()[2:], rows, slots, per_part, scaling * LOG2_E.value, heads,
        GROUPS=heads // key_heads, ROWS=padded, SLOTS=at_once, WIDTH=width, PARTS=parts, num_warps=4,
        num_stages=2 if width <= NARROW else 1,
    )  # fmt: skip
    if parts > 1:
        _join[(batch * rows * heads,)](
            found, highest, mass, output, WIDTH=width, PARTS=parts, PADDED=triton.next_power_of_2(parts), num_warps=1
        )
