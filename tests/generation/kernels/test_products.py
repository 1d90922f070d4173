"""Graphs in which one kernel computes products with weights: the same numbers, and only where this is allowed."""

from __future__ import annotations

import pytest
import torch
from torch import library, nn

from hf_specheads.generation.compiled import guards
from hf_specheads.generation.kernels import products

HOW = [64, 128, 5]


class Layer(nn.Module):
    """The products of a decoder layer: three that read the same rows, two more, and a single one."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, bias: bool = False):
        super().__init__()
        sizes = {"q": (64, 48), "k": (64, 16), "v": (64, 16), "gate": (64, 96), "up": (64, 96), "down": (96, 64)}
        for name, (width, columns) in sizes.items():
            setattr(self, name, nn.Linear(width, columns, bias=bias and name in "qkv"))
        self.norm = nn.RMSNorm(64)
        self.to(dtype).requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        read = self.norm(rows)
        rows = self.norm(rows + torch.cat([self.q(read), self.k(read)], -1) * self.v(read).mean(-1, keepdim=True))
        return self.down(nn.functional.silu(self.gate(rows)) * self.up(rows))


@pytest.fixture
def asked(monkeypatch):
    """Records the cases that were examined. The kernel pays in all of them."""
    cases = []
    monkeypatch.setattr(products, "DEVICES", ("cpu",))
    monkeypatch.setattr(products, "how_it_pays", lambda *case: cases.append(case[2:]) or HOW)
    torch._dynamo.reset()
    return cases


@pytest.fixture
def taken(monkeypatch):
    """Records the number of weights in every call of the operator."""
    calls = []

    def count(rows, weights, how):
        assert how == HOW
        calls.append(len(weights))
        return [rows @ weight.t() for weight in weights]

    with library._scoped_library("specheads", "IMPL") as own:
        own.impl("products", count, "CPU")
        yield calls


def compiled(layer, rows):
    with torch._inductor.config.patch(post_grad_custom_pre_pass=products.OneKernelForSiblings(), fx_graph_cache=False):
        return torch.compile(layer, fullgraph=True, dynamic=False)(rows)


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_the_same_rows_are_taken_together(bias, asked, taken):
    layer, rows = Layer(bias=bias), torch.randn(1, 7, 64).bfloat16()
    torch.testing.assert_close(compiled(layer, rows), layer(rows), rtol=0.1, atol=0.02)
    assert asked == [(7, 64, (48, 16, 16)), (7, 64, (96, 96)), (7, 96, (64,))]
    assert taken == [3, 2, 1]


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 7), (torch.bfloat16, products.MOST_ROWS + 1)], ids=str)
def test_others_are_left_as_they_are(dtype, rows, asked):
    layer, rows = Layer(dtype), torch.randn(1, rows, 64, dtype=dtype)
    compiled(layer, rows)
    assert not asked


def test_large_weights_are_left_as_they_are(asked, monkeypatch):
    monkeypatch.setattr(products, "LARGEST", 2 * 64 * 64)
    compiled(Layer(), torch.randn(1, 7, 64).bfloat16())
    assert asked == [(7, 64, (48, 16, 16))], "of the others each is larger"


def test_where_it_does_not_pay_nothing_changes(monkeypatch, taken):
    monkeypatch.setattr(products, "DEVICES", ("cpu",))
    monkeypatch.setattr(products, "how_it_pays", lambda *case: None)
    torch._dynamo.reset()
    layer, rows = Layer(), torch.randn(1, 7, 64).bfloat16()
    torch.testing.assert_close(compiled(layer, rows), layer(rows), rtol=0.1, atol=0.02)
    assert not taken


def test_the_pass_is_on_while_steps_are_compiled_and_leaves_others_alone(monkeypatch):
    settings = torch._inductor.config
    with guards.quick_compiler():
        assert not isinstance(settings.post_grad_custom_pre_pass, products.OneKernelForSiblings), "no CUDA here"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(products, "HAS_TRITON", True)
    with guards.quick_compiler():
        assert isinstance(settings.post_grad_custom_pre_pass, products.OneKernelForSiblings)
    own = products.OneKernelForSiblings()
    with settings.patch(post_grad_custom_pre_pass=own), guards.quick_compiler():
        assert settings.post_grad_custom_pre_pass is own
    assert settings.post_grad_custom_pre_pass is None
    monkeypatch.setattr(products, "HAS_TRITON", False)
    with guards.quick_compiler():
        assert settings.post_grad_custom_pre_pass is None, "there is no Triton"
