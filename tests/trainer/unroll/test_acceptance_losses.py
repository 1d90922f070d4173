"""Losses on acceptance and on labels against float64 formulas and autograd, at the edges, and through the unroll."""

import pytest
import torch

from hf_specheads.trainer import Unroll
from hf_specheads.trainer.unroll.losses import IGNORED, LOSSES, DraftedRows, TargetDistribution, mean_loss

from ..conftest import make_heads

NEW = ("next_token", "total_variation", "acceptance", "lk")
ROWS, VOCAB = 9, 13


def random_logits(seed=0, vocab=VOCAB, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(ROWS, vocab, generator=generator) for _ in range(2)]


def labels_of(seed=5):
    labels = torch.randint(0, VOCAB, (ROWS,), generator=torch.Generator().manual_seed(seed))
    labels[2] = IGNORED
    return labels


def naive(name, draft, target_logits, labels, vocabulary=None, decay=3.0):
    """The formula as written, in float64, row weights of a draft vocabulary included; [S]."""
    draft, whole = draft.double(), target_logits.double().softmax(-1)
    ids = torch.arange(VOCAB) if vocabulary is None else vocabulary
    q, p = draft.softmax(-1), whole[:, ids]
    accepted = torch.minimum(p, q).sum(-1)
    divergence = ((p / p.sum(-1, keepdim=True)) * (p / p.sum(-1, keepdim=True) / q).log()).sum(-1)
    weight = torch.exp(-decay * accepted.detach())
    position = [(ids == label).nonzero() for label in labels]
    values = {
        "next_token": torch.stack(
            [-q[i, at[0, 0]].log() if len(at) else 0 * q[i, 0] for i, at in enumerate(position)]
        ),
        "total_variation": 1 - accepted,
        "acceptance": -accepted.log(),
        "lk": weight * divergence + (1 - weight) * (1 - accepted),
    }[name]
    if vocabulary is None or name == "next_token":
        return values
    return values * torch.isin(target_logits.argmax(-1), vocabulary)


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("vocabulary", [None, torch.tensor([0, 2, 3, 7, 8, 11])], ids=["whole", "draft_vocabulary"])
def test_values_and_gradients_are_those_of_the_formula(name, vocabulary):
    draft, target_logits = random_logits(vocab=VOCAB)
    draft = draft if vocabulary is None else draft[:, : len(vocabulary)].contiguous()
    labels = labels_of()
    target = TargetDistribution.from_logits(target_logits, 3, labels=labels, vocabulary=vocabulary)
    assert vocabulary is None or 0 < target.weight.sum() < ROWS  # rows of both kinds
    scale = torch.linspace(0.5, 2, ROWS)

    logits = draft.clone().requires_grad_()
    ours = LOSSES[name](DraftedRows(logits, target))
    ours = ours if name == "next_token" else ours * (1 if target.weight is None else target.weight)
    (scale * ours).sum().backward()
    exact = draft.double().requires_grad_()
    wanted = naive(name, exact, target_logits, labels, vocabulary)
    (scale * wanted).sum().backward()

    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


def test_both_overlap_gradients_at_once():
    draft, target_logits = random_logits(seed=3)
    target = TargetDistribution.from_logits(target_logits, 3)
    gradients = []
    for names in (("total_variation",), ("acceptance",), ("total_variation", "acceptance")):
        logits = draft.clone().requires_grad_()
        rows = DraftedRows(logits, target)
        sum(LOSSES[name](rows).sum() for name in names).backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(gradients[0] + gradients[1], gradients[2])


def test_acceptance_of_a_sure_target_is_cross_entropy_however_small_the_overlap():
    """1 - a has no gradient left at q = e^-300, and -log a has that of the cross-entropy."""
    logits = torch.tensor([[0.0, 300.0, 1.0]], requires_grad=True)
    target = TargetDistribution.from_logits(torch.tensor([[500.0, -500.0, -500.0]]), 2)
    assert float(target.probs[0, 1]) == 0.0  # p is 0 there, and must make no NaN
    rows = DraftedRows(logits, target)
    distance, negative_log = rows.overlap_losses
    assert float(distance.detach()) == 1.0
    assert float(negative_log.detach()) == pytest.approx(300.0)
    (gradient,) = torch.autograd.grad(negative_log.sum(), logits, retain_graph=True)
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, 1.0, 0.0]]))
    (gradient,) = torch.autograd.grad(distance.sum(), logits)
    assert torch.equal(gradient, torch.zeros(1, 3))


@pytest.mark.parametrize("name", NEW)
def test_extreme_rows_stay_finite(name):
    """One-hot drafts on another token than a one-hot target, forbidden tokens, and a perfect draft."""
    inf = float("inf")
    draft = torch.tensor([[1e4, -1e4, 0.0], [-inf, 0.0, 1.0], [2.0, 1.0, 0.0]], requires_grad=True)
    target_logits = torch.tensor([[-1e4, 1e4, 0.0], [1.0, 0.0, 2.0], [2.0, 1.0, 0.0]])
    target = TargetDistribution.from_logits(target_logits, 2, labels=torch.tensor([2, 1, 0]))
    rows = DraftedRows(draft, target)
    values = LOSSES[name](rows)
    if name == "lk":  # its KL part is infinite where the draft forbids what the target may say
        values = values[[0, 2]]
    values.sum().backward()
    assert torch.isfinite(values).all()
    if name != "lk":
        assert torch.isfinite(draft.grad).all()
    if name != "next_token":
        assert abs(float(values[-1].detach())) < 1e-6
        torch.testing.assert_close(draft.grad[2], torch.zeros(3), atol=1e-6, rtol=0)


def test_nothing_of_the_draft_vocabulary_in_the_target_is_finite():
    """The target is sure of a token the heads cannot draft: the row counts nothing, and nothing becomes NaN."""
    logits = torch.zeros(1, 2, requires_grad=True)
    target = TargetDistribution.from_logits(torch.tensor([[0.0, 0.0, 1e4]]), 1, vocabulary=torch.tensor([0, 1]))
    assert float(target.mass) == 0 == float(target.weight)
    rows = DraftedRows(logits, target)
    loss = sum(mean_loss(name, rows) for name in NEW)
    loss.backward()
    assert float(loss.detach()) == 0
    assert torch.equal(logits.grad, torch.zeros(1, 2))


def test_lk_turns_from_divergence_to_acceptance():
    draft, target_logits = random_logits(seed=4)
    target = TargetDistribution.from_logits(target_logits, 3)
    rows = [DraftedRows(draft, target, lk_decay=decay) for decay in (0.0, 1e6)]
    divergence = rows[0].cross_entropies[0] - target.entropy
    torch.testing.assert_close(LOSSES["lk"](rows[0]), divergence)
    torch.testing.assert_close(LOSSES["lk"](rows[1]), rows[1].overlap_losses[0])


def test_labels_outside_count_in_no_mean():
    draft, target_logits = random_logits()
    labels = labels_of()
    rows = DraftedRows(draft, TargetDistribution.from_logits(target_logits, 1, labels=labels))
    known = labels != IGNORED
    wanted = torch.nn.functional.cross_entropy(draft[known], labels[known])
    torch.testing.assert_close(mean_loss("next_token", rows), wanted)
    torch.testing.assert_close(mean_loss("next_token", rows, 4.0), wanted * known.sum() / 4)


@pytest.mark.parametrize("labels", [None, torch.full((ROWS,), IGNORED)])
def test_no_label_at_all_is_a_zero_loss(labels):
    draft, target_logits = random_logits()
    draft.requires_grad_()
    target = TargetDistribution.from_logits(target_logits, 1, labels=labels)
    loss = mean_loss("next_token", DraftedRows(draft, target))
    loss.backward()
    assert float(loss.detach()) == 0
    assert torch.equal(draft.grad, torch.zeros_like(draft))


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_a_batch_without_supervised_rows_has_zero_losses_and_gradients(target, method):
    heads = make_heads(target, method).bind(target)
    ids = torch.randint(3, 99, (2, 7))
    features = torch.randn(2, 7, 32)
    unroll = Unroll(
        heads,
        features=features,
        next_token_ids=ids,
        token_ids=ids,
        target_features=features,
        loss_mask=torch.zeros(2, 7),
        attention_mask=None,
        embed_tokens=target.get_input_embeddings(),
        lm_head=target.lm_head,
        num_passes=heads.default_passes,
        losses=tuple(LOSSES),
    )
    passes = [unroll.next_pass() for _ in range(heads.default_passes)]
    loss = sum(losses.weighted(**dict.fromkeys(LOSSES, 1.0)) for losses in passes)
    loss.backward()
    assert float(loss.detach()) == 0
    of_block_drafters = {"confidence", "selector", "base"}
    expected = set(LOSSES) - of_block_drafters - (set() if method == "eagle" else {"feature"})
    assert set(passes[0].values) == expected
    gradients = [parameter.grad for parameter in heads.parameters() if parameter.grad is not None]
    assert gradients and not any(gradient.any() for gradient in gradients)


def test_labels_are_the_tokens_that_follow(target):
    """Row t knows token t + 1 and drafts token t + 2; document ends have no label."""
    heads = make_heads(target, "eagle").bind(target)
    ids = torch.randint(3, 99, (1, 8), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    features = torch.randn(1, 7, 32)
    unroll = Unroll(
        heads,
        features=features,
        next_token_ids=ids[:, 1:],
        target_features=features,
        loss_mask=torch.ones(1, 7),
        attention_mask=None,
        embed_tokens=target.get_input_embeddings(),
        lm_head=target.lm_head,
        num_passes=1,
        document_ids=documents,
    )
    wanted = [*ids[0, 2:4].tolist(), IGNORED, *ids[0, 5:8].tolist(), IGNORED]
    assert unroll.target.labels.tolist() == wanted


def test_a_weight_of_zero_leaves_the_graph():
    """An infinite loss that is only logged must not spoil the gradient."""
    from hf_specheads.trainer import PassLosses

    x = torch.tensor(2.0, requires_grad=True)
    losses = PassLosses({"token": x * float("inf"), "acceptance": 3 * x}, None)
    losses.weighted(token=0.0, acceptance=1.0).backward()
    assert float(x.grad) == 3.0
    with pytest.raises(ValueError, match=r"none of the losses these heads have, \['token', 'acceptance'\]"):
        losses.weighted(feature=1.0)


def test_training_logs_the_losses_it_weights(make_trainer):
    weights = dict.fromkeys((f"{name}_loss_weight" for name in NEW), 0.5)
    trainer = make_trainer(max_steps=2, num_passes=3, lk_decay=1.0, **weights)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    wanted = {f"{name}_loss_{position}" for name in (*NEW, "feature", "token", "top_k") for position in (1, 2, 3)}
    assert wanted <= set(logs[0])
    weighted = trainer.args.loss_weights
    total = sum(weighted[name.rpartition("_loss_")[0]] * logs[0][name] for name in wanted)
    assert logs[0]["loss"] == pytest.approx(total, rel=1e-4)
    assert 0 < logs[0]["total_variation_loss_1"] < 1
