"""What `generate` refuses is known when training begins: chains instead of trees, or losses alone, never a crash."""

from __future__ import annotations

import warnings

import pytest
import torch
from datasets import Dataset
from support.families import tiny_target
from support.targets import VOCAB

from hf_specheads import AutoDraftHead, DraftHead, DraftTreeConfig
from hf_specheads.trainer import DraftHeadTrainer

from .conftest import make_examples

TREE = DraftTreeConfig(kind="dynamic", depth=3, top_k=2, total_tokens=6)
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "eval_acceptance_prompts": 2, "eval_max_new_tokens": 8,
             "max_steps": 4}  # fmt: skip


def heads_for(target, tree: DraftTreeConfig | None = TREE) -> DraftHead:
    torch.manual_seed(1)
    heads = AutoDraftHead.from_target(target, "eagle")
    if tree is not None:
        heads.tree_config = tree
    return heads


def evaluations(trainer: DraftHeadTrainer) -> list[dict]:
    return [entry for entry in trainer.state.log_history if "eval_loss" in entry]


@pytest.fixture
def trained(make_trainer):
    """A trainer on another target, after training, and what it warned of before its first step."""

    def train(target, tree: DraftTreeConfig | None = TREE, **options):
        assert target.config.get_text_config().vocab_size >= VOCAB
        held_out = Dataset.from_list(make_examples(4, seed=5))
        heads = heads_for(target, tree)
        trainer = make_trainer(model=heads, of=target, eval_data=held_out, **{**EVALUATED, **options})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        return trainer, [str(w.message) for w in caught if str(w.message).startswith("evaluation ")]

    return train


def test_a_target_that_takes_no_trees_is_measured_with_chains(trained) -> None:
    trainer, said = trained(tiny_target("lfm2"))
    assert len(said) == 1 and said[0].startswith("evaluation drafts chains instead of trees: draft trees are not")
    assert trainer.model.tree_config == TREE  # which is what is saved
    assert len(evaluations(trainer)) == 2
    assert all(1 <= entry["eval_acceptance_length"] <= TREE.depth + 1 for entry in evaluations(trainer))


def test_nobody_is_warned_where_nothing_is_refused(trained, target) -> None:
    trainer, said = trained(target)
    assert not said and all("eval_acceptance_length" in entry for entry in evaluations(trainer))


@pytest.mark.parametrize("tree", [TREE, None])
def test_a_target_whose_cache_is_refused_is_trained_on_losses_alone(trained, tree) -> None:
    trainer, said = trained(tiny_target("jamba"), tree)
    assert len(said) == 1 and "leaves out acceptance_length and pos_acc" in said[0] and "recurrent target" in said[0]
    assert trainer.state.global_step == 4 and len(evaluations(trainer)) == 2
    assert not any(
        "acceptance_length" in name for entry in evaluations(trainer) for name in entry if "expect" not in name
    )


def test_a_best_checkpoint_by_what_cannot_be_measured_is_refused(trained) -> None:
    with pytest.raises(ValueError, match=r"metric_for_best_model='eval_acceptance_length' cannot be measured .*=loss"):
        trained(tiny_target("jamba"), metric_for_best_model="eval_acceptance_length")


def test_generation_that_fails_later_costs_its_numbers_only(make_trainer, target, monkeypatch) -> None:
    trainer = make_trainer(eval_data=Dataset.from_list(make_examples(4, seed=5)), **EVALUATED)
    kept, calls = target.generate, []

    def fails_after_the_rehearsal(**inputs):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory for a cache")
        return kept(**inputs)

    monkeypatch.setattr(target, "generate", fails_after_the_rehearsal)
    with pytest.warns(UserWarning, match="this evaluation leaves out .* OutOfMemoryError: no memory for a cache"):
        trainer.train()
    first, second = evaluations(trainer)
    assert "eval_acceptance_length" not in first and second["eval_acceptance_length"] >= 1


def test_the_rehearsal_is_short(make_trainer, target, monkeypatch) -> None:
    texts = []
    kept = target.generate
    monkeypatch.setattr(target, "generate", lambda **inputs: texts.append(kept(**inputs)))
    options = {**EVALUATED, "eval_max_new_tokens": 100, "max_steps": 1, "eval_strategy": "no"}
    trainer = make_trainer(eval_data=Dataset.from_list(make_examples(4, seed=5)), **options)
    trainer.train()
    assert len(texts) == 1 and texts[0].shape[1] < 3 + 12  # prompts are three tokens long
