"""Compiled graphs in which products of few rows use other kernels: the same numbers, and the fastest kernel."""

from __future__ import annotations

import collections
import itertools
from functools import partial

import pytest
import torch
from support.heads import random_heads
from support.targets import own_target, plain, prompt

from hf_specheads.generation.compiled import guards
from hf_specheads.generation.kernels import few_rows, few_rows_compiled
from hf_specheads.generation.kernels.few_rows_compiled import BY_KERNEL, ROWS_FIRST, WEIGHT_FIRST
from hf_specheads.generation.kernels.products import OneKernelForSiblings

from .test_products import Layer


@pytest.fixture(params=[WEIGHT_FIRST, BY_KERNEL], ids=["weight first", "kernel"])
def asked(request, monkeypatch):
    """Records the rows, sizes and dtypes that are looked up. Another way than torch's is the fastest for all sizes it
    supports."""
    asked_for = []

    def way_for(rows, sizes, dtype, threads):
        asked_for.append((rows, sizes, dtype))
        by_kernel = all(few_rows.few_rows_native.fits(*size) for size in sizes)
        return request.param if by_kernel or request.param == WEIGHT_FIRST else ROWS_FIRST

    monkeypatch.setattr(few_rows_compiled, "way_for", way_for)
    for dtype in few_rows.few_rows_native.KINDS:
        few_rows.kernel_for(torch.Size([16, 16]), dtype)
    few_rows.few_rows_native.WORKSHOP.wait()
    torch._dynamo.reset()
    way_for.kernel = request.param == BY_KERNEL
    return asked_for


def compiled(layer, rows, dynamic=False):
    with torch._inductor.config.patch(
        post_grad_custom_pre_pass=few_rows_compiled.FewRowsProducts(), fx_graph_cache=False
    ):
        return torch.compile(layer, fullgraph=True, dynamic=dynamic)(rows)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_the_same_numbers(bias, dynamic, dtype, asked):
    layer, rows = Layer(dtype, bias=bias), torch.randn(1, 7, 64, dtype=dtype)
    near = {} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 5e-3}
    torch.testing.assert_close(compiled(layer, rows, dynamic), layer(rows), **near)
    number = few_rows_compiled.MIDDLING if dynamic else 7
    groups = [((48, 64), (16, 64), (16, 64)), ((96, 64), (96, 64)), ((64, 96),)]
    assert sorted(asked) == sorted((number, sizes, dtype) for sizes in groups)


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float64, 7), (torch.float32, few_rows.MOST_ROWS + 1)], ids=str)
def test_others_are_left_as_they_are(dtype, rows, asked):
    layer, rows = Layer(dtype), torch.randn(1, rows, 64, dtype=dtype)
    compiled(layer, rows)
    assert not asked


@pytest.mark.parametrize("fastest", [ROWS_FIRST, WEIGHT_FIRST, BY_KERNEL])
def test_the_fastest_way_is_taken(fastest, ways):
    clock, number = ways
    clock.fastest = fastest
    assert few_rows_compiled.way_for.__wrapped__(3, ((40, 24), (16, 24)), torch.float32, 1) == fastest
    assert len(number) == 3 and len(set(number.values())) == 1


def test_weights_that_take_turns_are_not_in_a_cache(ways):
    """No weight is multiplied in one way right after another way, because it would still be in a cache."""
    clock, _ = ways
    few_rows_compiled.way_for.__wrapped__(3, ((40, 24), (16, 24)), torch.float32, 1)
    assert all(set(one).isdisjoint(other) for one, other in itertools.pairwise(clock.seen))
    assert len(set(map(tuple, clock.seen))) > 2


class Clock:
    """Simulates the times of ways: the way `fastest` takes less than the others."""

    def __init__(self):
        self.now, self.fastest, self.seen = 0.0, 0, []

    def perf_counter(self):
        return self.now


@pytest.fixture
def ways(monkeypatch):
    """A simulated clock, and the number of times each of three ways was used."""
    clock, number = Clock(), collections.Counter()

    def way(which, rows, weights):
        number[which] += 1
        clock.now += 1.0 + (which != clock.fastest)
        clock.seen.append([weight.untyped_storage().data_ptr() for weight in weights])

    monkeypatch.setattr(few_rows_compiled, "time", clock)
    monkeypatch.setattr(few_rows_compiled, "_ways", lambda weights: [partial(way, which) for which in range(3)])
    return clock, number


def test_ways_are_the_same_products():
    torch.manual_seed(0)
    for dtype in few_rows.few_rows_native.KINDS:
        rows = torch.randn(3, 32, dtype=dtype)
        weights = [torch.randn(outputs, 32, dtype=dtype) for outputs in (48, 16)]
        first, *others = few_rows_compiled._ways(weights)
        assert others
        for way in others:
            torch.testing.assert_close(way(rows, weights), first(rows, weights))
    assert len(few_rows_compiled._ways([*weights, weights[0][:, :17]])) == 2, "no kernel reads such a weight"


@torch.no_grad()
def test_a_graph_that_another_process_compiled_orders_its_kernel(monkeypatch):
    """A graph from the compiler's cache comes without any trial of ways in this process."""
    workshop = few_rows.few_rows_native._Workshop()
    monkeypatch.setattr(few_rows.few_rows_native, "WORKSHOP", workshop)
    rows, weight = torch.randn(3, 32, dtype=torch.float32), torch.randn(48, 32, dtype=torch.float32)
    first = torch.ops.specheads.few_rows(rows, [weight], [None])[0]
    assert torch.float32 in workshop.threads
    workshop.wait()
    torch.testing.assert_close(torch.ops.specheads.few_rows(rows, [weight], [None])[0], first)


@pytest.mark.skipif(not hasattr(few_rows_compiled, "CustomCodegen"), reason="this torch's graphs call the operator")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_graphs_call_the_kernel_itself(dtype, asked, monkeypatch):
    """All but the first group of weights call the C function directly, because dispatching an operator through torch
    takes as long as a small product."""
    calls, into = [], few_rows_compiled.Into(dtype)
    monkeypatch.setattr(torch.ops.specheads.few_rows, into.name, lambda *call: calls.append(call) or into(*call))
    layer, rows = Layer(dtype), torch.randn(1, 7, 64, dtype=dtype)
    near = {} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 5e-3}
    torch.testing.assert_close(compiled(layer, rows), layer(rows), **near)
    assert [len(weights) for *_, weights, _, _, _ in calls] == ([3] if few_rows_compiled.way_for.kernel else [])
    if calls:
        kernel = few_rows.few_rows_native.WORKSHOP.kernels[dtype]
        assert getattr(torch.ops.specheads.few_rows, into.name) is kernel.function


@torch.no_grad()
def test_graphs_compute_without_a_kernel(asked, monkeypatch):
    """The kernel may not be built in this process, or may be impossible to build."""
    for kernel in (None, few_rows.few_rows_native.WORKSHOP.kernels[torch.float32]):
        monkeypatch.setattr(few_rows_compiled, "kernel_for", lambda *size, kernel=kernel: kernel)
        into = few_rows_compiled.Into(torch.float32)
        monkeypatch.setattr(torch.ops.specheads.few_rows, into.name, into)
        layer, rows = Layer(torch.float32, bias=True), torch.randn(1, 7, 64, dtype=torch.float32)
        torch._dynamo.reset()
        torch.testing.assert_close(compiled(layer, rows), layer(rows))


@torch.no_grad()
def test_the_last_row_of_one_is_the_row(asked):
    """Heads query with the last row only, and attend to all rows."""

    class LastAndAll(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.all = (torch.nn.Linear(32, 16, bias=False, dtype=torch.float32) for _ in range(2))

        def forward(self, rows):
            return self.last(rows[:, -1:]), self.all(rows)

    compiled(LastAndAll(), torch.randn(1, 1, 32, dtype=torch.float32))
    assert [sizes for _, sizes, _ in asked] == [((16, 32), (16, 32))]
    asked.clear()
    compiled(LastAndAll(), torch.randn(1, 3, 32, dtype=torch.float32))
    assert sorted(asked) == [(1, ((16, 32),), torch.float32), (3, ((16, 32),), torch.float32)]


def test_the_pass_is_on_while_steps_are_compiled_and_leaves_others_alone():
    settings = torch._inductor.config
    with guards.quick_compiler():
        assert isinstance(settings.post_grad_custom_pre_pass, few_rows_compiled.FewRowsProducts)
    own = OneKernelForSiblings()
    with settings.patch(post_grad_custom_pre_pass=own), guards.quick_compiler():
        assert settings.post_grad_custom_pre_pass is own
    assert settings.post_grad_custom_pre_pass is None


@pytest.mark.parametrize("method", ["eagle", "poss"])
def test_compiled_rounds_are_of_such_products(method, asked):
    target, ids = own_target(), prompt()
    heads = random_heads(target, method).with_tree(kind="chain", depth=3)
    heads.compiled, heads.adaptive = True, False
    fresh = torch._functorch.config.patch(enable_autograd_cache=False)
    with torch._inductor.config.patch(fx_graph_cache=False), fresh:
        text = plain(target, ids, 12, assistant_model=heads)
    assert torch.equal(text, plain(target, ids, 12))
    assert {rows for rows, *_ in asked} & {3, 4, few_rows_compiled.MIDDLING}
