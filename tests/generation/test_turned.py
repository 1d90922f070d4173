"""Compiled graphs in which the weight is multiplied by the rows: the same numbers, and only where that is faster."""

from __future__ import annotations

import itertools

import pytest
import torch
from generation.test_products import Layer
from support.heads import random_heads
from support.targets import own_target, plain, prompt

from hf_specheads.generation import few_rows, guards, turned
from hf_specheads.generation.products import OneKernelForSiblings


@pytest.fixture
def asked(monkeypatch):
    """Sizes that were looked at; it pays for all of them."""
    sizes = []
    monkeypatch.setattr(turned, "pays", lambda *size: sizes.append(size[:3]) or True)
    torch._dynamo.reset()
    return sizes


def compiled(layer, rows, dynamic=False):
    with torch._inductor.config.patch(post_grad_custom_pre_pass=turned.TurnedProducts(), fx_graph_cache=False):
        return torch.compile(layer, fullgraph=True, dynamic=dynamic)(rows)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_same_numbers(bias, dynamic, asked):
    layer, rows = Layer(torch.float32, bias=bias), torch.randn(1, 7, 64)
    torch.testing.assert_close(compiled(layer, rows, dynamic), layer(rows))
    sizes = [(7, 48, 64), (7, 16, 64), (7, 16, 64), (7, 96, 64), (7, 96, 64), (7, 64, 96)]
    assert sorted(asked) == sorted(sizes)


@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.bfloat16, 7), (torch.float32, 1), (torch.float32, few_rows.MOST_ROWS + 1)], ids=str
)
def test_others_are_left_as_they_are(dtype, rows, asked):
    layer, rows = Layer(dtype), torch.randn(1, rows, 64, dtype=dtype)
    compiled(layer, rows)
    assert not asked


@pytest.mark.parametrize(("slow", "expected"), [("rows first", True), ("weight first", False)])
def test_the_faster_way_is_taken(slow, expected, monkeypatch):
    clock, multiply = [0.0], torch.mm

    def timed(left, right):
        weight_first = left.shape[0] > right.shape[1]
        clock[0] += 1.0 + (weight_first == (slow == "weight first"))
        return multiply(left, right)

    monkeypatch.setattr(turned.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch, "mm", timed)
    assert turned.pays.__wrapped__(3, 40, 24, 1) is expected


def test_weights_that_take_turns_are_not_in_a_cache(monkeypatch):
    """No weight is multiplied in one way right after it was in the other."""
    seen, multiply = [], torch.mm

    def watched(left, right):
        weight = max(left, right, key=torch.Tensor.numel)
        seen.append(weight.untyped_storage().data_ptr())
        return multiply(left, right)

    monkeypatch.setattr(torch, "mm", watched)
    turned.pays.__wrapped__(3, 40, 24, 1)
    assert all(one != other for one, other in itertools.pairwise(seen)) and len(set(seen)) > 2


def test_the_pass_is_on_while_steps_are_compiled_and_leaves_others_alone():
    settings = torch._inductor.config
    with guards.quick_compiler():
        assert isinstance(settings.post_grad_custom_pre_pass, turned.TurnedProducts)
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
    assert {rows for rows, *_ in asked} & {3, 4}
