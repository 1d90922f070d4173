"""Step time and peak memory of training, against a step with dense masks and full logits.

    python -m benchmarks step  # POSS at four lengths and three depths, EAGLE-3 at two lengths
    python -m benchmarks step --cells hass,2048,8 eagle,1024,1
    python -m benchmarks step --cells poss,2048,6 --vocab_size 131072 --bf16  # a large vocabulary, mixed precision

Both sides compute the same gradients of the same heads (`naive_step.py` is the other side): forward and backward of
one batch, alternating in one process. Peak memory is the growth of the resident set during one step, in a separate
process. That process returns freed memory to the system, so that memory kept by the allocator does not count.
"Products" are the matrix products that any step needs, timed alone. They bound what can be gained.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import resource
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_specheads import AutoDraftHead, DraftHead
from hf_specheads.trainer import Unroll

from ..results import Result, column_table, footnote, number, percent
from ..setup import random_llama
from ..sides import timed_in_turns
from .naive_step import dense_step

SOURCES = ("hf_specheads", "trainer")
FAMILIES = {"eagle": {}, "hass": {}, "poss": {"num_specialists": 2, "positions_per_specialist": 3}, "eagle3": {}}
SIZES = {"hidden_size": 256, "vocab_size": 8192}
WEIGHTS = {"feature": 1.0, "token": 0.1}
CHUNK = 256
MEMORY_SHARE = 0.7  # share of the machine's memory that a step may take
GRID = [("poss", rows, passes) for rows in (512, 1024, 2048, 4096) for passes in (1, 3, 6)]
GRID += [("eagle3", rows, 6) for rows in (1024, 2048)]

Cell = dict[str, Any]  # family, rows (T), passes (D), dtype, and the sizes of the target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that select the steps."""
    said = "heads, rows T of a batch and draft positions D (default: a grid)"
    parser.add_argument("--cells", nargs="+", type=cell_of, default=GRID, metavar="FAMILY,T,D", help=said)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="size of the target")
    said = "target in bf16, heads in fp32 under autocast, as `bf16=true` trains (default: fp32)"
    parser.add_argument("--bf16", action="store_true", help=said)
    parser.add_argument("--repeats", type=int, default=3)


def cell_of(word: str) -> tuple[str, int, int]:
    """Parses one cell as written on the command line."""
    family, rows, passes = word.split(",")
    return family, int(rows), int(passes)


# ---------------------------------------------------------------------- one step of each side
def make_pair(cell: Cell) -> tuple[PreTrainedModel, DraftHead]:
    """Makes a random target, of which a step needs only the embedding and `lm_head`, and draft heads for it."""
    width = cell["hidden_size"]
    sizes = {"num_hidden_layers": 8, "num_attention_heads": max(width // 64, 1), "intermediate_size": 8 * width // 3}
    target = random_llama(vocab_size=cell["vocab_size"], hidden_size=width, **sizes).requires_grad_(False)
    target.to(getattr(torch, cell["dtype"]))
    return target, AutoDraftHead.from_target(target, cell["family"], **FAMILIES[cell["family"]]).bind(target).train()


def make_steps(cell: Cell, target: PreTrainedModel, heads: DraftHead) -> dict[str, Callable[[], Any]]:
    """Returns one function per side that runs forward and backward: `dense`; `ours`; and `per_pass`, which is ours
    with one backward per pass."""
    rows, passes = cell["rows"], cell["passes"]
    generator = torch.Generator().manual_seed(1)
    width = target.config.hidden_size
    levels = 1 if heads.passes_are_detached else len(heads.feature_layers)
    batch = {
        "features": torch.randn(1, rows, levels * width, generator=generator),
        "next_token_ids": torch.randint(0, cell["vocab_size"], (1, rows), generator=generator),
        "target_features": torch.randn(1, rows, width, generator=generator).to(target.dtype),
        "embed_tokens": target.get_input_embeddings(),
        "lm_head": target.lm_head,
        "num_passes": passes,
    }
    steps = {
        "dense": partial(dense_step, heads, **batch, weights=WEIGHTS),
        "ours": partial(our_step, heads, batch, passes),
    }
    if heads.passes_are_detached:
        steps["per_pass"] = partial(our_step, heads, batch, 1)
    return {side: partial(_in_precision, cell, step) for side, step in steps.items()}


def _in_precision(cell: Cell, step: Callable[[], Any]) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=cell["dtype"] == "bfloat16"):
        step()


def our_step(heads: DraftHead, batch: dict[str, Any], together: int) -> None:
    """Runs a step as [`trainer.DraftHeadTrainer`] does, with `together` passes per backward."""
    rows = batch["next_token_ids"].shape[1]
    unroll = Unroll(
        heads, **batch, loss_mask=torch.ones(1, rows), attention_mask=None, losses=tuple(WEIGHTS),
        num_items=float(rows), separate_backward=together < batch["num_passes"],
    )  # fmt: skip
    for _ in range(0, batch["num_passes"], together):
        unroll.run_passes(together, lambda losses, _: losses.weighted(**WEIGHTS), chunk_rows=CHUNK)
    unroll.finish_backward()


def products_seconds(cell: Cell, target: PreTrainedModel, heads: DraftHead) -> float:
    """Measures the seconds of a step's matrix products alone.

    These are, once per pass, the forward and both gradients of every layer and of `lm_head` (only one gradient if it
    belongs to the target), and once the target's own logits.
    """
    layers = [module.weight for module in heads.layers[0].modules() if isinstance(module, nn.Linear)]
    own = getattr(heads, "lm_head", None)
    output = (target.lm_head if own is None else own).weight
    chunks = [min(CHUNK, cell["rows"] - at) for at in range(0, cell["rows"], CHUNK)]
    products = [(weight, cell["rows"], True) for weight in (*layers, heads.fc.weight)]
    products += [(output, chunk, own is not None) for chunk in chunks]
    dtype = target.dtype
    products = [(weight.to(dtype), *others) for weight, *others in products]
    rows = {size: torch.randn(cell["rows"], size, dtype=dtype) for weight, *_ in products for size in weight.shape}

    @torch.no_grad()
    def run() -> None:
        for weight, count, learns in products * cell["passes"]:
            outputs, inputs = (rows[size][:count] for size in weight.shape)
            _ = inputs @ weight.T, outputs @ weight, outputs.T @ inputs if learns else None
        for chunk in chunks:
            _ = rows[output.shape[1]][:chunk] @ output.T

    return statistics.median(timed_in_turns({"products": run}, 3, warm_ups=1)[0]["products"])


# ---------------------------------------------------------------------- measurement
def peak_bytes(cell: Cell, side: str, threads: int) -> int | None:
    """Returns the largest growth of the resident set during one step; `None` if the step needs too much memory.

    Must run in a process of its own. A step of a few rows runs before, to load everything that kernels keep in memory.
    """
    torch.set_num_threads(threads)
    limit = int(MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * resource.getpagesize())
    target, heads = make_pair(cell)
    make_steps({**cell, "rows": 16, "passes": 1}, target, heads)[side]()
    heads.zero_grad()
    step = make_steps(cell, target, heads)[side]
    gc.collect()
    before = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        step()
    except (RuntimeError, MemoryError):  # torch's allocator has no exception type of its own
        return None
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return max(grown, resource.getpagesize())  # the kernel updates its count with a delay, so growth can appear as 0


def peak_apart(cell: Cell, side: str) -> int | None:
    """Runs [`peak_bytes`] in a process of its own."""
    # malloc reads this at process start, so it affects only the new process
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(peak_bytes, cell, side, torch.get_num_threads()).result()


def measure_cell(cell: Cell, repeats: int) -> dict[str, Any]:
    """Measures every side: median and range of seconds, peak memory, and the ratios to the dense step."""
    target, heads = make_pair(cell)
    for warm_up in make_steps({**cell, "rows": 16, "passes": 1}, target, heads).values():
        warm_up()
    heads.zero_grad()

    def gradients(step: Callable[[], Any]) -> list[torch.Tensor]:
        step()
        found = [parameter.grad for parameter in heads.parameters() if parameter.grad is not None]
        heads.zero_grad()
        return found

    steps = make_steps(cell, target, heads)
    peaks = {side: peak_apart(cell, side) for side in steps}
    fitting = {side: partial(gradients, step) for side, step in steps.items() if peaks[side] is not None}
    seconds, found = timed_in_turns(fitting, repeats, before=gc.collect)
    sides = {side: {"seconds": None, "peak_bytes": peaks[side]} for side in steps}
    for side, spent in seconds.items():
        sides[side]["seconds"] = _median_and_range(spent)
    result = {**cell, "head_parameters": heads.num_parameters(), "sides": sides}
    if "dense" in fitting:
        # Largest difference of a parameter's gradients relative to their largest element, over all parameters.
        pairs = zip(found["dense"], found["ours"], strict=True)
        result["gradient_difference"] = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
        for side in fitting.keys() - {"dense"}:
            ratios = [dense / ours for dense, ours in zip(seconds["dense"], seconds[side], strict=True)]
            sides[side]["speed_up"] = _median_and_range(ratios)
            sides[side]["memory_share"] = peaks[side] / peaks["dense"]
    return {**result, "products_seconds": products_seconds(cell, target, heads)}


def _median_and_range(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all cells."""
    cells = []
    common = {"dtype": "bfloat16" if args.bf16 else "float32", **{name: getattr(args, name) for name in SIZES}}
    for family, rows, passes in args.cells:
        cells.append(measure_cell({"family": family, "rows": rows, "passes": passes, **common}, args.repeats))
        print(cells[-1], file=sys.stderr, flush=True)
    return {"batch": 1, "weights": WEIGHTS, "chunk_rows": CHUNK, "cells": cells}


def table(result: Result) -> str:
    """One row per family, length and depth, with seconds and peak memory of our step and the dense one."""
    columns = {
        "heads": lambda cell: cell["family"], "rows T": ("rows", 0), "passes D": ("passes", 0),
        "dense, s": lambda cell: _seconds(cell["sides"]["dense"]),
        "ours, s": lambda cell: _seconds(cell["sides"]["ours"]),
        "dense / ours (range)": lambda cell: _range(cell["sides"]["ours"]),
        "dense, MB": lambda cell: _megabytes(cell["sides"]["dense"]),
        "ours, MB": lambda cell: _megabytes(cell["sides"]["ours"]),
        "ours / dense": lambda cell: percent(cell["sides"]["ours"].get("memory_share")),
        "one backward per pass: dense / ours": lambda cell: _range(cell["sides"].get("per_pass", {})),
        "one backward per pass: ours / dense, memory":
            lambda cell: percent(cell["sides"].get("per_pass", {}).get("memory_share")),
        "products / ours": lambda cell: percent(cell["products_seconds"] / cell["sides"]["ours"]["seconds"]["median"]),
    }  # fmt: skip
    return column_table(columns, result["cells"]) + footnote(
        result, "Forward and backward, batch {batch}, {cells[0][dtype]}, hidden size {cells[0][hidden_size]}, "
        "vocabulary {cells[0][vocab_size]}, median of {repeats} interleaved repeats",
        "a dash: the dense step needs more memory than the machine has, or the heads have no backward per pass",
    )  # fmt: skip


def _seconds(side: Result) -> str:
    return number(side["seconds"] and side["seconds"]["median"])


def _range(side: Result) -> str:
    return "{median:.2f}x ({low:.2f}-{high:.2f})".format(**side["speed_up"]) if "speed_up" in side else "-"


def _megabytes(side: Result) -> str:
    return number(None if side["peak_bytes"] is None else side["peak_bytes"] / 1e6, 0)
