"""NEFTune noise on the token embeddings that heads read: its width, what it leaves alone, and its seed."""

import copy

import pytest
import torch
from torch import nn

from hf_specheads.trainer import PackedCollator, PaddedCollator
from hf_specheads.trainer.unroll.noise import document_lengths, feature_noise, noisy_embedding

from ..conftest import make_examples, make_heads


@pytest.mark.parametrize("collator", [PaddedCollator, PackedCollator])
def test_noise_is_as_wide_as_the_document_is_short(collator):
    batch = collator(0, 64)(make_examples(5))
    embed = nn.Embedding(99, 4096).requires_grad_(False)
    ids = batch["input_ids"][:, 1:]
    noisy = noisy_embedding(embed, batch, 3.0, torch.Generator().manual_seed(0))
    noise = noisy(ids) - embed(ids)
    bound = 3.0 / (document_lengths(batch)[:, :-1] * 4096).sqrt()
    largest = noise.abs().amax(dim=-1)
    assert (largest <= bound + 1e-6).all() and (largest > 0.99 * bound).all()
    assert noise.mean().abs() < 0.01 * bound.max()
    assert not torch.equal(noisy(ids) - embed(ids), noise), "the same noise at every call"


def test_the_same_scaling_for_features():
    batch = PaddedCollator(0, 64)(make_examples(3))
    features = torch.zeros(*batch["input_ids"].shape, 4096)
    noise = feature_noise(features, batch, 3.0, "neftune", torch.Generator().manual_seed(0))
    bound = 3.0 / (document_lengths(batch) * 4096).sqrt()
    assert (noise.abs().amax(dim=-1) <= bound + 1e-6).all() and (noise.abs().amax(dim=-1) > 0.99 * bound).all()


def trained(make_trainer, target, heads, folder, **arguments):
    model = copy.deepcopy(heads).bind(target)
    trainer = make_trainer(model=model, folder=folder, max_steps=2, num_passes=4, **arguments)
    trainer.train()
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def test_training_with_noise_repeats_itself_and_evaluates_without(make_trainer, target):
    from datasets import Dataset

    heads = make_heads(target, "hydra")
    quiet = trained(make_trainer, target, heads, "quiet")
    noisy = trained(make_trainer, target, heads, "noisy", embedding_noise=5.0)
    assert not torch.equal(quiet, noisy)
    assert torch.equal(noisy, trained(make_trainer, target, heads, "again", embedding_noise=5.0))
    held_out = Dataset.from_list(make_examples(4, seed=9))
    losses = [
        make_trainer(model=heads, eval_data=held_out, embedding_noise=alpha).evaluate()["eval_loss"]
        for alpha in (0.0, 50.0)
    ]
    assert losses[0] == losses[1]


def test_embedding_and_feature_noise_are_drawn_apart(make_trainer, target):
    trainer = make_trainer(model=make_heads(target, "hydra"), feature_noise=0.1, embedding_noise=1.0)
    draws = [torch.rand(8, generator=trainer._noise_generator(torch.device("cpu"), *kind)) for kind in ((), (1,))]
    assert not torch.equal(*draws)


@pytest.mark.slow  # by default step by step: gradients of Hydra heads in test_chunks.py, whole runs in test_trainer.py
def test_hydra_runs_that_must_be_equal(make_trainer, target):
    """One backward per pass or for all, padded or packed rows; SGD, because Adam turns rounding into sign flips."""
    heads = make_heads(target, "hydra", head_arch="prefix-mlp", num_blocks=2)
    stable = {"optim": "sgd", "learning_rate": 0.01, "max_grad_norm": 0.0}
    ours = trained(make_trainer, target, heads, "one", **stable)
    for other in ({"backward": "summed"}, {"packing": True, "packing_strategy": "batch"}):
        theirs = trained(make_trainer, target, heads, "other", **stable, **other)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-5)
    before = torch.cat([parameter.detach().flatten() for parameter in heads.parameters()])
    assert (ours - before).abs().max() > 1e-4
