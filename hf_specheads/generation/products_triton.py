"""The kernel of [`products`]: a few rows by up to three weights, each weight read once and by all of the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

COLUMNS, DEPTH = 64, 128
SMALLEST = 16  # rows that the device's matrix instructions take
AHEAD = ((5, 120 * 1024), (4, 90 * 1024), (2, 0))  # parts of a weight on their way at once, by shared memory


@triton.jit
def _products(
    rows, w0, w1, w2, out0, out1, out2, num_rows, n0, n1, n2, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    parts0, parts1 = n0 // COLUMNS, n1 // COLUMNS
    weight, out, columns = w0, out0, n0
    if part >= parts0 + parts1:
        weight, out, columns = w2, out2, n2
        part -= parts0 + parts1
    elif part >= parts0:
        weight, out, columns = w1, out1, n1
        part -= parts0
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    from_weight = weight + column.to(tl.int64)[:, None] * width + tl.arange(0, DEPTH)[None, :]
    from_rows = rows + row[None, :] * width + tl.arange(0, DEPTH)[:, None]
    found = tl.zeros((COLUMNS, ROWS), tl.float32)
    for start in range(0, width, DEPTH):
        left = tl.load(from_weight + start, eviction_policy="evict_first")
        right = tl.load(from_rows + start, mask=row[None, :] < num_rows, other=0.0)
        found = tl.dot(left, right, found)
    where = out + row[None, :] * columns + column[:, None]
    tl.store(where, found.to(out.dtype.element_ty), mask=row[None, :] < num_rows)


def launch(rows: torch.Tensor, weights: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """Writes rows [M, K] by each of one to three weights [N, K], transposed, to the outputs [M, N].

    All are contiguous; [`COLUMNS`] divides every N, [`DEPTH`] divides K.
    """
    missing = 3 - len(weights)
    sizes = [len(weight) for weight in weights]
    grid = (sum(sizes) // COLUMNS,)
    _products[grid](
        rows, *weights, *[weights[0]] * missing, *outputs, *[outputs[0]] * missing, len(rows), *sizes, *[0] * missing,
        rows.shape[1], ROWS=max(SMALLEST, triton.next_power_of_2(len(rows))), COLUMNS=COLUMNS, DEPTH=DEPTH,
        num_warps=4, num_stages=_stages(rows.device),
    )  # fmt: skip


def _stages(device: torch.device) -> int:
    memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 0
    return next(stages for stages, needed in AHEAD if memory >= needed)
