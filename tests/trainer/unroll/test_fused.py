"""Cross-entropy in blocks and compiled, against the formula in double precision."""

from __future__ import annotations

import pytest
import torch

from hf_specheads.trainer.unroll import fused
from hf_specheads.trainer.unroll.losses import TargetDistribution, token_and_top_k_loss


def rows(count: int, vocabulary: int, spread: float = 3.0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    logits, wanted = (torch.randn(count, vocabulary, generator=generator) * spread for _ in range(2))
    return logits, wanted.softmax(dim=-1), *(torch.rand(count, generator=generator) for _ in range(2))


def check(forward, backward, logits, probs, draft, target) -> None:
    wide = logits.double().requires_grad_()
    wanted = -(probs.double() * wide.log_softmax(dim=-1)).sum(dim=-1)
    token, normaliser = forward(logits, probs)
    torch.testing.assert_close(token.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    gradient = wide.detach().softmax(dim=-1) * draft[:, None] - probs * target[:, None]
    torch.testing.assert_close(
        backward(logits, normaliser, probs, draft, target).double(), gradient, atol=1e-6, rtol=1e-4
    )


@pytest.mark.parametrize("block", [1, 40, 100, 10_000])
@pytest.mark.parametrize("spread", [0.0, 3.0, 200.0])
def test_blocks_of_any_size(block: int, spread: float, monkeypatch) -> None:
    monkeypatch.setattr(fused, "BLOCK_ELEMENTS", block)
    check(fused.cross_entropy, fused.cross_entropy_gradient, *rows(7, 40, spread))
    check(fused._forward, fused._backward, *rows(7, 40, spread))


@pytest.mark.parametrize("block", [1, 100])
def test_logits_of_half_precision_are_computed_with_in_fp32(block: int, monkeypatch) -> None:
    """Loss and gradient are those of the same numbers in fp32, the gradient rounded once, top-k part included."""
    monkeypatch.setattr(fused, "BLOCK_ELEMENTS", block)
    half = rows(7, 40)[0].bfloat16()
    target = TargetDistribution.from_logits(rows(7, 40)[0].flip(0), 5)
    found, wanted = (logits.requires_grad_() for logits in (half.clone(), half.float()))
    losses = [token_and_top_k_loss(logits.clone(), target) for logits in (found, wanted)]
    for ours, theirs in zip(*losses, strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs)
    for token, top_k in losses:
        (0.3 * token + 0.7 * top_k).sum().backward()
    assert found.grad.dtype == torch.bfloat16 and torch.equal(found.grad, wanted.grad.bfloat16())


def test_no_rows() -> None:
    token, normaliser = fused.cross_entropy(torch.zeros(0, 40), torch.zeros(0, 40))
    assert token.shape == normaliser.shape == (0,)


def test_forbidden_tokens_cost_nothing() -> None:
    """A draft that forbids what the target forbids: 0 times infinity must not be NaN."""
    logits, probs, *_ = rows(3, 40)
    allowed = torch.arange(40) < 30
    probs = (probs * allowed) / (probs * allowed).sum(dim=-1, keepdim=True)
    low = torch.where(allowed, logits, torch.finfo(torch.float32).min)
    token, _ = fused.cross_entropy(low, probs)
    torch.testing.assert_close(token, fused.cross_entropy(logits[:, :30], probs[:, :30])[0])


def test_the_gradient_takes_the_place_of_the_logits() -> None:
    hidden = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(40, 8)
    target = TargetDistribution.from_logits(torch.randn(5, 40), 3)
    logits = hidden @ weight.T
    losses = token_and_top_k_loss(logits, target)
    place = logits.data_ptr()
    wanted = torch.autograd.grad(-(target.probs * (hidden @ weight.T).log_softmax(-1)).sum(), hidden)[0]
    found = torch.autograd.grad(losses[0].sum(), hidden, retain_graph=True)[0]
    torch.testing.assert_close(found, wanted)
    assert logits.data_ptr() == place and not torch.equal(logits, hidden @ weight.T)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(losses[0].sum(), hidden)


@pytest.mark.slow
def test_compiled_functions_agree() -> None:
    forward, backward = fused.compiled_or_plain("cpu")
    assert forward is not fused._forward
    for count, vocabulary in ((7, 40), (4, 1000)):
        check(forward, backward, *rows(count, vocabulary))


def test_without_a_compiler_the_plain_functions_are_taken(monkeypatch) -> None:
    def broken(*args, **kwargs):
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.warns(UserWarning, match="losses are not compiled on cpu, and slower: RuntimeError: no compiler here"):
        assert fused.compiled_or_plain("cpu") == (fused._forward, fused._backward)
