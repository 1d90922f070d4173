"""What the compiler makes of writes into slots: they stay in place, no cache is copied in a round.

Slow: to load the compiler alone takes longer than any test.
"""

from __future__ import annotations

import re

import pytest
import torch
from support.batches import batch_of, greedy
from support.heads import random_heads
from support.targets import own_target, prompt
from support.trees import TREES
from torch._inductor.utils import get_code, run_and_get_code

from hf_specheads.cache.slots import write_rows

HEADS, CAPACITY, WIDTH = 2, 256, 8
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def cache_sized(codes: list[str], batch: int) -> list[str]:
    """Buffers of the generated code as large as keys or values of one layer, whatever their order of dimensions."""
    shapes = [
        [int(size) for size in re.findall(r"\d+", shape)]
        for code in codes
        for shape in re.findall(r"= empty_strided_cpu\(\(([\d, ]+)\)", code)
    ]
    size = batch * HEADS * CAPACITY * WIDTH
    return [str(shape) for shape in shapes if torch.Size(shape).numel() >= size]


def scattered(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """What `write_rows` must not do."""
    index = slots[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
    buffer.scatter_(2, index, rows)


def generated(write, batch: int) -> list[str]:
    """Code of one write and a look at what is in the buffer then, which is not compiled or run here."""

    def step(buffer, slots, rows):
        write(buffer, slots, rows)
        return rows @ buffer.mT

    buffer, rows = torch.zeros(batch, HEADS, CAPACITY, WIDTH), torch.ones(batch, HEADS, 3, WIDTH)
    slots = torch.arange(3).expand(batch, 3) + 5
    codes = get_code(torch.compile(step, fullgraph=True, dynamic=False), buffer, slots, rows)
    assert codes
    return codes


@pytest.mark.parametrize("batch", [1, 2])
def test_a_write_copies_no_cache(batch):
    assert not cache_sized(generated(write_rows, batch), batch)


def test_a_copy_would_be_found():
    assert cache_sized(generated(scattered, 2), 2)


@pytest.mark.parametrize("lengths", [(9,), (9, 4)])
@pytest.mark.parametrize("tree", ["dynamic", "chain"])
def test_a_round_copies_no_cache(tree, lengths):
    target = own_target("llama")
    config = target.config
    assert (config.num_key_value_heads, config.hidden_size // config.num_attention_heads) == (HEADS, WIDTH)
    heads = random_heads(target, "poss" if tree == "chain" else "eagle", TREES[tree])
    heads.compiled, heads.adaptive = True, False
    inputs = {"input_ids": prompt(9)} if len(lengths) == 1 else batch_of(lengths)[0]
    _, codes = run_and_get_code(lambda: greedy(target, inputs, assistant_model=heads))
    assert len(codes) >= 2, "one draft step, one verifying forward, and others once a sequence of a batch has ended"
    assert f", {CAPACITY}, {WIDTH})" in "".join(codes), "other caches than looked for"
    assert not cache_sized(codes, len(lengths))


def test_longer_chains_need_no_more_kernels():
    """Links are alike to the compiler, whatever their number."""
    target, kernels = own_target("llama"), []
    for depth in (6, 9):
        torch._dynamo.reset()
        heads = random_heads(target, "poss", TREES["chain"].replace(depth=depth))
        heads.compiled, heads.adaptive = True, False
        _, codes = run_and_get_code(lambda: greedy(target, {"input_ids": prompt(9)}, assistant_model=heads))  # noqa: B023
        kernels.append([len(re.findall(r"= async_compile.cpp_pybinding", code)) for code in codes])
    # Where drafts start, a link, and the verifying forward.
    assert len(kernels[0]) == len(kernels[1]) == 3 and sum(kernels[1]) <= sum(kernels[0]), kernels
