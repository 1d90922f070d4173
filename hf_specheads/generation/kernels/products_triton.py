"""Triton kernel of [`products`]: a few rows by up to three weights, each read once, by the whole device together."""

# Triton kernels look like Python but are a language of their own, which mypy cannot check.
# mypy: ignore-errors
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .attention import AMPERE

SMALLEST = 16  # fewest rows that the device's matrix instructions take


@dataclass(frozen=True)
class How:
    """Block sizes of the kernel: a block reads `columns` outputs by `depth` inputs of a weight at a time, and has
    `stages` such tiles in its pipeline."""

    columns: int
    depth: int
    stages: int

    def fits(self, rows: int, width: int, columns: Sequence[int], memory: int) -> bool:
        """Whether the sizes divide weights [N, K] evenly and the tiles fit into a block's shared memory, in bytes."""
        needed = 2 * self.stages * self.depth * (self.columns + _padded(rows))
        return width % self.depth == 0 and needed <= memory and not any(size % self.columns for size in columns)


WAYS = (How(64, 128, 5), How(64, 128, 4), How(32, 256, 4))


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


def launch(rows: torch.Tensor, weights: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], how: How) -> None:
    """Writes the products of rows [M, K] with one to three weights [N, K], transposed, to the outputs [M, N]. All are
    contiguous and of a 16-bit dtype."""
    missing = 3 - len(weights)
    sizes = [len(weight) for weight in weights]
    _products[(sum(sizes) // how.columns,)](
        rows, *weights, *[weights[0]] * missing, *outputs, *[outputs[0]] * missing, len(rows), *sizes, *[0] * missing,
        rows.shape[1], ROWS=_padded(len(rows)), COLUMNS=how.columns, DEPTH=how.depth, num_warps=4,
        num_stages=how.stages,
    )  # fmt: skip


def _padded(rows: int) -> int:
    return max(SMALLEST, 1 << (rows - 1).bit_length())


# ---------------------------------------------------------------------- whether it pays
WORTH = 0.97  # the kernel must take less than this share of the time of torch's own products
UNCACHED = 160 * 2**20  # bytes of weights that exceed the cache of any device
TURNS = 5  # timed replays, of which the fastest counts


@functools.lru_cache(maxsize=256)
def quickest(device: torch.device, dtype: torch.dtype, rows: int, width: int, columns: tuple[int, ...]) -> How | None:
    """Block sizes with which the kernel is fastest on this device; `None` if torch's own products are as fast.

    All are timed as they will run: in a CUDA graph, with weights that are not in the cache.
    """
    properties = torch.cuda.get_device_properties(device)
    memory = properties.shared_memory_per_block_optin if properties.major >= AMPERE else 0
    ways = [how for how in WAYS if how.fits(rows, width, columns, memory)]
    if not ways:
        return None
    with torch.cuda.device(device), torch.no_grad():
        inputs = torch.ones(rows, width, dtype=dtype, device=device)
        outputs = [inputs.new_empty(rows, size) for size in columns]
        sets = -(-UNCACHED // (2 * sum(columns) * width))
        weights = [[inputs.new_zeros(size, width) for size in columns] for _ in range(sets)]
        calls: dict[How | None, Callable[[], None]] = {
            how: functools.partial(_all_by_kernel, inputs, weights, outputs, how) for how in ways
        }
        calls[None] = functools.partial(_all_by_torch, inputs, weights, outputs)
        spent = {how: _seconds_of_graph(call) for how, call in calls.items()}
    best = min(ways, key=spent.__getitem__)
    return best if spent[best] < WORTH * spent[None] else None


def _all_by_kernel(
    inputs: torch.Tensor, weights: list[list[torch.Tensor]], outputs: list[torch.Tensor], how: How
) -> None:
    for together in weights:
        launch(inputs, together, outputs, how)


def _all_by_torch(inputs: torch.Tensor, weights: list[list[torch.Tensor]], outputs: list[torch.Tensor]) -> None:
    for together in weights:
        for weight, output in zip(together, outputs, strict=True):
            torch.mm(inputs, weight.t(), out=output)


def _seconds_of_graph(call: Callable[[], None]) -> float:
    """Captures a call as a CUDA graph; returns the time of its fastest replay, for comparison only."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    times = []
    for _ in range(TURNS + 1):  # the first one warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return min(times[1:])
