"""Losses against their formulas, and their hand-written gradient against autograd's."""

import pytest
import torch
import torch.nn.functional as F

from hf_specheads.trainer.unroll.losses import TargetDistribution, feature_loss, masked_mean, token_and_top_k_loss


def rows(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [4 * torch.randn(6, 11, generator=generator).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("top_k", [1, 3, 50])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.1, 1.0)])
def test_gradient_is_that_of_the_formula(top_k, weights):
    draft, target_logits = rows()
    target = TargetDistribution.from_logits(target_logits, top_k)
    results = []
    for ours in (True, False):
        logits = draft.clone().requires_grad_()
        if ours:
            token, top = token_and_top_k_loss(logits, target)
        else:
            log_q = logits.log_softmax(-1)
            token = -(target_logits.softmax(-1) * log_q).sum(-1)
            top = -(target.top_k_probs * log_q.gather(-1, target.top_k_ids)).sum(-1)
        scale = torch.arange(1.0, 7.0)
        (weights[0] * (scale * token).sum() + weights[1] * (scale * top).sum()).backward()
        results.append((token.detach(), top.detach(), logits.grad))
    for mine, formula in zip(*results, strict=True):
        torch.testing.assert_close(mine, formula, rtol=1e-5, atol=1e-5)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    token, top_k = token_and_top_k_loss(logits, TargetDistribution.from_logits(torch.tensor([[0.0, 5.0, 0.0]]), 2))
    (token + top_k).sum().backward()
    assert torch.isfinite(token).all() and torch.isfinite(logits.grad).all()
    assert float(token.detach()) == pytest.approx(2e4, rel=0.05)


def test_top_k_is_not_renormalised():
    target = TargetDistribution.from_logits(torch.log(torch.tensor([[0.5, 0.3, 0.2]])), 2)
    assert target.top_k_probs[0].tolist() == pytest.approx([0.5, 0.3])
    _, top_k = token_and_top_k_loss(torch.zeros(1, 3), target)
    assert float(top_k) == pytest.approx(0.8 * torch.tensor(3.0).log().item())


def test_bfloat16_rows_are_computed_in_float32():
    draft, target_logits = rows(torch.bfloat16)
    target = TargetDistribution.from_logits(target_logits, 3)
    token, _ = token_and_top_k_loss(draft, target)
    assert token.dtype == target.probs.dtype == torch.float32
    wanted = F.cross_entropy(draft.float(), target_logits.float().softmax(-1), reduction="none")
    torch.testing.assert_close(token, wanted, rtol=1e-5, atol=1e-5)


def test_feature_loss_is_the_mean_over_the_width():
    drafted, wanted = torch.tensor([[0.5, 3.0]]), torch.zeros(1, 2)
    assert feature_loss(drafted, wanted).tolist() == [(0.125 + 2.5) / 2]


def test_masked_mean_of_nothing_is_zero():
    empty = torch.zeros(0, requires_grad=True)
    for num_items in (None, 0, torch.tensor(0.0)):
        assert float(masked_mean(empty, num_items).detach()) == 0.0
    masked_mean(empty).backward()
    assert float(masked_mean(torch.tensor([3.0, 5.0]), 4)) == 2.0
