"""Losses chunk by chunk against losses of all rows at once."""

from __future__ import annotations

import pytest
import torch
from support.tensors import Largest

from hf_specheads.trainer import Unroll
from hf_specheads.trainer.unroll.losses import LOSSES

from ..conftest import VOCAB, make_heads

PASSES = 4
METHODS = {
    "poss": {},
    "eagle3": {"draft_vocab_size": 50, "draft_token_ids": range(0, 99, 2), "feature_layers": (0, 1, -1)},
    "medusa": {"num_heads": PASSES},
    "hydra": {"num_heads": PASSES, "head_arch": "prefix-mlp"},
    "dflash": {"num_hidden_layers": 2, "block_size": PASSES + 1},
}


def make_unroll(heads, target, names, batch=2, rows=9, supervised=None, document_rows=6, **options):
    generator = torch.Generator().manual_seed(0)
    width = 32 * (3 if heads.config.method == "eagle3" else 1)
    documents = torch.arange(rows).expand(batch, -1) // document_rows
    mask = torch.rand(batch, rows, generator=generator) < 0.7 if supervised is None else supervised
    ids = torch.randint(3, VOCAB, (batch, rows + 1), generator=generator)
    return Unroll(
        heads,
        features=torch.randn(batch, rows, width, generator=generator),
        token_ids=ids[:, :-1],
        next_token_ids=ids[:, 1:],
        target_features=torch.randn(batch, rows, 32, generator=generator),
        loss_mask=mask,
        attention_mask=None,
        document_ids=documents,
        embed_tokens=target.get_input_embeddings(),
        lm_head=target.lm_head,
        num_passes=PASSES,
        losses=names,
        num_items=7.0,
        **options,
    )


def gradients(heads):
    found = {name: p.grad.clone() for name, p in heads.named_parameters() if p.grad is not None}
    heads.zero_grad()
    return found


def weigh(losses, position):
    return losses.weighted(**{name: 0.5 + index for index, name in enumerate(LOSSES)}) * 0.8**position


@pytest.fixture
def frozen(target):
    return target.requires_grad_(False)


@pytest.mark.covering(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk_rows", [1, 4, 1000])
@pytest.mark.parametrize("apart", [False, True])
def test_every_loss_and_gradient_is_that_of_all_rows_at_once(frozen, method, chunk_rows, apart):
    heads = make_heads(frozen, method, **METHODS[method]).bind(frozen)
    apart = apart and heads.passes_are_detached
    whole = make_unroll(heads, frozen, tuple(LOSSES))
    wanted = [whole.next_pass() for _ in range(PASSES)]
    sum(weigh(losses, position) for position, losses in enumerate(wanted)).backward()
    wanted_gradients = gradients(heads)

    unroll = make_unroll(heads, frozen, tuple(LOSSES), separate_backward=apart)
    together = 1 if apart else PASSES
    found = [
        losses
        for _ in range(0, PASSES, together)
        for losses in unroll.run_passes(together, weigh, chunk_rows=chunk_rows)
    ]
    unroll.finish_backward()
    for ours, theirs in zip(found, wanted, strict=True):
        assert set(ours.values) == set(theirs.values)
        for name, value in theirs.values.items():
            torch.testing.assert_close(ours.values[name], value.detach(), rtol=1e-5, atol=1e-5, msg=name)
    ours = gradients(heads)
    assert ours.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()), msg=name)


def test_losses_alone_leave_no_gradient(frozen, heads):
    unroll = make_unroll(heads, frozen, ("token",))
    with torch.no_grad():
        passes = unroll.run_passes(PASSES, chunk_rows=3)
    wanted = make_unroll(heads, frozen, ("token",))
    for losses in passes:
        torch.testing.assert_close(losses.token_loss, wanted.next_pass().token_loss.detach())
    assert not gradients(heads)


def test_no_supervised_row_gives_zero_gradients(frozen, heads):
    unroll = make_unroll(heads, frozen, ("feature", "token"), supervised=torch.zeros(2, 9))
    passes = unroll.run_passes(PASSES, weigh)
    assert [float(losses.token_loss) for losses in passes] == [0.0] * PASSES
    found = gradients(heads)
    assert found
    assert not any(gradient.any() for gradient in found.values())


@pytest.mark.parametrize("method", ["poss", "eagle3"])
def test_no_tensor_of_all_logits_nor_of_rows_by_rows(frozen, method):
    """The largest tensor of 512 rows, forward and backward; three levels of features make 512 x 96."""

    rows = 512
    heads = make_heads(frozen, method, **({"feature_layers": (0, 1, -1)} if method == "eagle3" else {})).bind(frozen)
    supervised = torch.ones(1, rows)
    unroll = make_unroll(heads, frozen, ("token",), batch=1, rows=rows, supervised=supervised, document_rows=rows)
    with Largest() as largest:
        unroll.run_passes(PASSES, lambda losses, _: losses.token_loss, chunk_rows=16)
    assert 0 < largest.elements < rows * VOCAB < rows * rows


@pytest.mark.parametrize(
    ("method", "apart"),
    [("eagle3", False), ("poss", True), ("hydra", False)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in (("eagle3", True), ("poss", False), ("hydra", True))],
)
def test_under_autocast(frozen, method, apart):
    """In bf16 chunks reuse one cast of every weight; gradients stay fp32, and near those without autocast."""
    heads = make_heads(frozen, method, **METHODS[method]).bind(frozen).train()
    apart = apart and heads.passes_are_detached
    found = []
    for enabled in (False, True):
        unroll = make_unroll(heads, frozen, ("token",), separate_backward=apart)
        together = 1 if apart else PASSES
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            for _ in range(0, PASSES, together):
                unroll.run_passes(together, lambda losses, _: losses.token_loss, chunk_rows=3)
            unroll.finish_backward()
        found.append(gradients(heads))
    for name, gradient in found[0].items():
        theirs = found[1][name]
        assert theirs.dtype == torch.float32
        assert torch.cosine_similarity(theirs.flatten(), gradient.flatten(), dim=0) > 0.98, name


def test_chunks_need_a_divisor(frozen, heads):
    unroll = make_unroll(heads, frozen, ("token",))
    unroll.num_items = None
    with pytest.raises(ValueError, match="give `num_items`"):
        unroll.run_passes(1)
