"""Joint training of heads and an adapter of their target: what moves, what must not, and what is saved."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from support.targets import VOCAB, training_target
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, set_seed

from hf_specheads import AutoDraftHead, DraftHead, load_heads
from hf_specheads.cli.arguments import add_model_arguments, load_pair
from hf_specheads.target.adapter import adapter_parameters, add_adapter, without_adapter
from hf_specheads.trainer import (
    DraftHeadTrainer,
    DraftHeadTrainingArguments,
    JointTrainer,
    JointTrainingArguments,
    PackedCollator,
    PaddedCollator,
)

from .conftest import make_examples

LOSSES = {
    "feature_loss_weight": 0.0, "token_loss_weight": 0.0, "top_k_loss_weight": 0.0, "next_token_loss_weight": 0.5,
    "pass_decay": 0.8,
}  # fmt: skip
CLOSE = {"rtol": 1e-3, "atol": 2e-5}


@pytest.fixture
def make_joint(tmp_path: Path) -> Callable[..., JointTrainer]:
    """A joint trainer on a tiny target of its own; keyword arguments go to the training arguments."""

    def make(
        folder: str = "run", *, target: PreTrainedModel | None = None, model: DraftHead | None = None,
        eval_data: Any = None, data: Any = None, **arguments: Any,
    ) -> JointTrainer:  # fmt: skip
        target = target or training_target()
        if model is None:
            model = AutoDraftHead.from_target(target, "medusa", num_heads=3, lm_head="target")
        defaults = {
            "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "logging_steps": 1,
            "save_strategy": "no", "eval_acceptance_prompts": 0, "max_length": 64, "target_lora_rank": 4,
            "target_lora_alpha": 8, **LOSSES,
        }  # fmt: skip
        args = JointTrainingArguments(
            output_dir=str(tmp_path / folder), use_cpu=True, disable_tqdm=True, report_to=[],
            **{**defaults, **arguments},
        )  # fmt: skip
        train = Dataset.from_list(make_examples()) if data is None else data
        torch.manual_seed(11)
        return JointTrainer(model=model, target=target, args=args, train_dataset=train, eval_dataset=eval_data)

    return make


def target_of(trainer: JointTrainer) -> PreTrainedModel:
    return trainer.frozen_target.model


def weights(trainer: JointTrainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in [*trainer.model.parameters(), *trainer.adapter]]


def randomise(trainer: JointTrainer) -> None:
    """An adapter and heads that are not at their start, where half of the gradients are zero."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in [*trainer.adapter, *trainer.model.parameters()]:
            parameter.add_(torch.randn_like(parameter) * 0.1)


def text(target: PreTrainedModel, **options: Any) -> list[int]:
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    return target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, **options
    )[0].tolist()  # fmt: skip


# ---------------------------------------------------------------------- the loss
def naive_loss(trainer: JointTrainer, examples: list[dict[str, list[int]]]) -> torch.Tensor:
    """Document by document, position by position: the target's loss plus the heads' next-token losses."""
    target, args = target_of(trainer), trainer.args
    count = sum(sum(example["loss_mask"][1:]) for example in examples)
    total = torch.zeros(())
    for example in examples:
        ids, mask = example["input_ids"], example["loss_mask"]
        rows = torch.tensor([ids])
        features = target(rows, output_hidden_states=True).hidden_states[-1][0]
        with torch.no_grad(), without_adapter(target):
            base = target(rows).logits[0].log_softmax(-1)
        logits = target.lm_head(features)
        for t in range(1, len(ids)):
            if not mask[t]:
                continue
            own = logits[t - 1].log_softmax(-1)
            kl = (base[t - 1].exp() * (base[t - 1] - own)).sum()
            loss = args.target_loss_weight * (kl if args.self_distillation else -own[ids[t]])
            for head in range(3):
                row = t - 1 - head  # drafts the token at t + 1
                if row < 0 or t + 1 >= len(ids):
                    continue
                drafted = target.lm_head(trainer.model(features[row], head)).log_softmax(-1)
                loss = loss - args.next_token_loss_weight * args.pass_decay**head * drafted[ids[t + 1]]
            total = total + loss / count
    return total


@pytest.mark.covering(2)
@pytest.mark.parametrize("collator", [PaddedCollator, PackedCollator])
@pytest.mark.parametrize("self_distillation", [True, False])
@pytest.mark.parametrize("again", [True, False])
def test_loss_and_gradients_against_a_naive_version(
    make_joint, collator, self_distillation: bool, again: bool
) -> None:
    trainer = make_joint(self_distillation=self_distillation, target_loss_weight=0.7, loss_chunk_rows=4,
                         target_gradient_checkpointing=again)  # fmt: skip
    randomise(trainer)
    examples = make_examples(3, longest=10)
    loss = trainer.training_step(trainer.model, collator(0, 64)(examples))
    ours = [p.grad.clone() for p in [*trainer.model.parameters(), *trainer.adapter]]
    trainer.model.zero_grad()
    for parameter in trainer.adapter:
        parameter.grad = None
    expected = naive_loss(trainer, examples)
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-4)
    for mine, parameter in zip(ours, [*trainer.model.parameters(), *trainer.adapter], strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-5)
        assert mine.abs().max() > 1e-6


class Largest(TorchDispatchMode):
    """Elements of the largest tensor over the vocabulary that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.stride()[-2:] == (VOCAB, 1):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_logits_of_all_rows_never_exist(make_joint) -> None:
    largest = {}
    for chunk_rows in (4, 1000):
        trainer = make_joint(loss_chunk_rows=chunk_rows, max_length=128)
        batch = PaddedCollator(0, 128)(make_examples(8, longest=90))
        rows = int(batch["loss_mask"][:, 1:].count_nonzero())
        with Largest() as seen:
            trainer.training_step(trainer.model, batch)
        largest[chunk_rows] = seen.elements
    assert largest[1000] >= rows * VOCAB > 5 * largest[4]


def test_layers_that_are_computed_again_are_not_kept(make_joint) -> None:
    kept = {}
    for again in (False, True):
        trainer = make_joint(target_gradient_checkpointing=again)
        batch = PaddedCollator(0, 64)(make_examples(4))
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=sizes: [s.append(x.numel()), x][1], lambda x: x):
            features, _ = trainer.features_of(batch, 1.0, True)
        kept[again] = sum(sizes)
        assert features.requires_grad and not target_of(trainer).training
        assert text(target_of(trainer)) == text(target_of(make_joint()))
    assert kept[True] < kept[False] / 4


def test_the_heads_losses_alone_move_the_adapter(make_joint) -> None:
    trainer = make_joint(target_loss_weight=0.0)
    before = weights(trainer)
    trainer.train()
    assert all(not torch.equal(a, b) for a, b in zip(weights(trainer), before, strict=True))


def test_batch_without_supervised_tokens(make_joint) -> None:
    trainer = make_joint(weight_decay=0.0)
    batch = PaddedCollator(0, 64)([{"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 0, 0]}] * 2)
    assert float(trainer.training_step(trainer.model, batch)) == 0
    assert all(p.grad is None or not p.grad.any() for p in trainer.adapter)


# ---------------------------------------------------------------------- whole runs
@pytest.mark.parametrize("self_distillation", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_training_lowers_the_loss_and_leaves_the_base_alone(make_joint, tmp_path, self_distillation: bool) -> None:
    target = training_target()
    before, plain = {n: p.clone() for n, p in target.state_dict().items()}, text(target)
    held_out = Dataset.from_list(make_examples(4))
    trainer = make_joint(target=target, max_steps=12, eval_data=held_out, lr_scheduler_type="constant",
                         learning_rate=1e-2, target_learning_rate=1e-2, self_distillation=self_distillation,
                         eval_acceptance_prompts=1, eval_max_new_tokens=5)  # fmt: skip
    first = trainer.evaluate()
    assert (first["eval_target_loss"] < 1e-6) == self_distillation
    trainer.train()
    last = trainer.evaluate()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0] and last["eval_loss"] < first["eval_loss"]
    assert last["eval_acceptance_length"] >= 1
    if not self_distillation:
        assert last["eval_target_loss"] < 0.95 * first["eval_target_loss"]
    now = target.state_dict()
    for name, value in before.items():
        assert torch.equal(now.get(name, now.get(name.replace(".weight", ".base_layer.weight"))), value), name
    with without_adapter(target):
        assert text(target) == plain
    adapted = text(target)
    assert adapted != plain, "the adapter changes nothing; the rest could not fail"
    assert text(target, assistant_model=trainer.model) == adapted
    trainer.save_model(str(tmp_path / "heads"))
    heads, fresh = load_heads(tmp_path / "heads"), training_target()
    heads.load_target_adapter(fresh)
    assert text(fresh) == text(fresh, assistant_model=heads) == adapted


def test_logged_parts_add_up(make_joint) -> None:
    trainer = make_joint(logging_steps=2, gradient_accumulation_steps=2, target_loss_weight=0.7)
    randomise(trainer)
    trainer.train()
    first = trainer.state.log_history[0]
    heads = sum(0.5 * 0.8 ** (i - 1) * first[f"next_token_loss_{i}"] for i in (1, 2, 3))
    assert first["target_loss"] > 0
    assert first["loss"] == pytest.approx(heads + 0.7 * first["target_loss"], rel=1e-4)


def test_a_step_does_not_depend_on_how_it_is_split(make_joint) -> None:
    common = {"optim": "sgd", "learning_rate": 0.05, "target_learning_rate": 0.05, "max_grad_norm": 0.0}
    runs = []
    for folder, options in (
        ("one", {}),
        ("two", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
        ("packed", {"packing": True, "packing_strategy": "batch"}),
    ):
        trainer = make_joint(folder, **common, **options)
        trainer.train()
        runs.append(weights(trainer))
    for run in runs[1:]:
        for mine, theirs in zip(run, runs[0], strict=True):
            torch.testing.assert_close(mine, theirs, **CLOSE)


def test_gradients_of_heads_and_adapter_are_clipped_together(make_joint) -> None:
    trainer = make_joint(max_steps=1, optim="sgd", learning_rate=1.0, target_learning_rate=1.0, max_grad_norm=0.01,
                         lr_scheduler_type="constant")  # fmt: skip
    before = weights(trainer)
    trainer.train()
    moved = torch.stack([(a - b).norm() for a, b in zip(weights(trainer), before, strict=True)]).norm()
    assert float(moved) == pytest.approx(0.01, rel=1e-2)


def test_the_heads_warm_up_alone(make_joint) -> None:
    """Until then as if the target had no adapter; its first step is the one after."""
    trainer = make_joint(heads_warmup_steps=3, max_steps=3)
    before = weights(trainer)
    trainer.train()
    count = len(list(trainer.model.parameters()))
    after = weights(trainer)
    assert all(torch.equal(a, b) for a, b in zip(after[count:], before[count:], strict=True))
    assert "target_loss" not in trainer.state.log_history[0]
    target = training_target()
    alone = DraftHeadTrainer(
        model=AutoDraftHead.from_target(target, "medusa", num_heads=3, lm_head="target"),
        target=target,
        args=DraftHeadTrainingArguments(
            output_dir=trainer.args.output_dir, max_steps=3, per_device_train_batch_size=4, learning_rate=3e-3,
            save_strategy="no", max_length=64, use_cpu=True, disable_tqdm=True, report_to=[], **LOSSES,
        ),
        train_dataset=Dataset.from_list(make_examples()),
    )  # fmt: skip
    alone.train()
    for mine, theirs in zip(after[:count], alone.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    longer = make_joint(heads_warmup_steps=2, max_steps=3)
    longer.train()
    assert any(not torch.equal(a, b) for a, b in zip(weights(longer)[count:], before[count:], strict=True))


def test_a_resumed_run_is_an_uninterrupted_one(make_joint) -> None:
    common = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "heads_warmup_steps": 1}
    whole = make_joint("whole", **common)
    whole.train()
    checkpoint = Path(whole.args.output_dir) / "checkpoint-2"
    assert (checkpoint / "target_adapter" / "adapter_model.safetensors").exists()
    again = make_joint("again", **common)
    randomise(again)  # everything must come from the checkpoint
    set_seed(again.args.seed)  # of the order of the data
    again.train(resume_from_checkpoint=str(checkpoint))
    for mine, theirs in zip(weights(again), weights(whole), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_the_best_adapter_is_kept(make_joint) -> None:
    trainer = make_joint(max_steps=2, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
                         load_best_model_at_end=True, learning_rate=0.5,
                         eval_data=Dataset.from_list(make_examples(2)))  # fmt: skip
    trainer.train()
    best = trainer.state.best_model_checkpoint
    heads, target = load_heads(best), training_target()
    heads.load_target_adapter(target)
    for mine, theirs in zip(adapter_parameters(target), trainer.adapter, strict=True):
        assert torch.equal(mine, theirs)


def test_saved_heads_go_on_with_their_adapter(make_joint, tmp_path: Path) -> None:
    trainer = make_joint()
    trainer.train()
    trainer.save_model(str(tmp_path / "heads"))
    heads, target = load_heads(tmp_path / "heads"), training_target()
    heads.load_target_adapter(target)
    more = make_joint("more", target=target, model=heads)
    for mine, theirs in zip(weights(more), weights(trainer), strict=True):
        assert torch.equal(mine, theirs)
    more.train()
    assert not torch.equal(more.adapter[1], trainer.adapter[1])


@pytest.mark.parametrize("method", ["eagle", pytest.param("hass", marks=pytest.mark.slow)])
def test_heads_of_other_families(make_joint, method: str) -> None:
    target = training_target()
    heads = AutoDraftHead.from_target(target, method)
    trainer = make_joint(target=target, model=heads, num_passes=2, max_steps=1, feature_loss_weight=1.0)
    before = weights(trainer)
    trainer.train()
    assert any(not torch.equal(a, b) for a, b in zip(weights(trainer), before, strict=True))
    assert text(target, assistant_model=heads.with_tree(depth=2)) == text(target)


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_lora_rank": 0}, "`target_lora_rank` must be at least 1, got 0"),
        ({"target_lora_alpha": 0.0}, "`target_lora_alpha` must be above 0"),
        ({"target_loss_weight": -1.0}, "`target_loss_weight` must be at least 0"),
        ({"heads_warmup_steps": -1}, "`heads_warmup_steps` must be at least 0"),
        ({"backward": "per_pass"}, "`backward` must be 'summed'"),
    ],
)
def test_impossible_arguments_are_refused(make_joint, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_joint(**options)


def test_the_adapter_learns_a_quarter_as_fast_unless_told(make_joint) -> None:
    trainer = make_joint(learning_rate=4e-3)
    assert trainer.create_optimizer().param_groups[-1]["lr"] == 1e-3
    assert sum(len(group["params"]) for group in trainer.optimizer.param_groups) == len(weights(trainer))


def test_what_cannot_be_trained_jointly_is_refused(make_joint, make_trainer) -> None:
    target = training_target()
    add_adapter(target, 4, 8, "all-linear")
    heads = AutoDraftHead.from_target(training_target(), "medusa")
    with pytest.raises(ValueError, match="has LoRA adapters already"):
        make_joint(target=target, model=heads)
    with pytest.raises(ValueError, match="takes JointTrainingArguments, got DraftHeadTrainingArguments"):
        JointTrainer(heads, target, make_trainer().args)
    trainer = make_joint()
    batch = PaddedCollator(0, 64)(make_examples(2))
    features = trainer.frozen_target.features(batch)
    with pytest.raises(ValueError, match="without stored features"):
        trainer.start_unroll({**batch, "features": features[0], "final_features": features[1]})


# ---------------------------------------------------------------------- command line
def test_a_recipe_trains_and_the_command_line_loads(workspace, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "heads"
    losses = [f"{name}={value}" for name, value in LOSSES.items()]
    workspace.run(*workspace.options, "method=medusa", "heads={num_heads: 2, lm_head: target}", *losses,
                  "target_lora_rank=2", "target_learning_rate=0.5", f"output_dir={folder}")  # fmt: skip
    assert "adapter: rank 2, learning rate 0.5, from step 0, of the target" in capsys.readouterr().out
    facts = json.loads((folder / "training_facts.json").read_text())
    assert facts["method"] == "medusa" and "eval_target_loss" in facts["metrics"]
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    parser.set_defaults(quiet=True)  # an option of every command
    target, _, heads = load_pair(parser.parse_args(["--target", str(tmp_path / "target"), "--heads", str(folder)]))
    assert adapter_parameters(target) and text(target, assistant_model=heads) == text(target)
    more = tmp_path / "more"
    workspace.run(*workspace.options, "method=medusa", "heads={}", *losses, f"from_heads={folder}", "max_steps=1",
                  "eval_examples=0", f"output_dir={more}")  # fmt: skip
    assert load_heads(more).config.target_adapter == load_heads(folder).config.target_adapter


def test_kl_is_what_self_distillation_says() -> None:
    """`F.kl_div` takes its arguments the other way round."""
    p, q = torch.randn(4, 9).log_softmax(-1), torch.randn(4, 9).log_softmax(-1)
    expected = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(F.kl_div(q, p, reduction="none", log_target=True).sum(-1), expected)


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_losses_in_chunks_have_the_gradients_of_one_graph(make_joint, method):
    """Of the heads and of the adapter, whose graph the target's own loss shares with every pass."""
    target = training_target()
    options = {"num_heads": 3} if method == "medusa" else {}
    heads = AutoDraftHead.from_target(target, method, **options)
    trainer = make_joint(target=target, model=heads, num_passes=3, feature_loss_weight=1.0, loss_chunk_rows=5)
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(3)])
    items = torch.tensor(20.0)
    with torch.no_grad():
        for parameter in trainer.adapter:
            parameter.normal_(std=0.2)  # a fresh adapter has zeros that stop its gradient
    found = []
    for backward in (lambda: trainer.compute_loss(heads, batch, num_items_in_batch=items).backward(),
                     lambda: trainer.backward_batch(batch, items)):  # fmt: skip
        for parameter in trainer.trained_parameters():
            parameter.grad = None
        backward()
        found.append([parameter.grad.clone() for parameter in trainer.trained_parameters()])
    for whole, chunks in zip(*found, strict=True):
        assert whole.any()
        torch.testing.assert_close(chunks, whole, rtol=1e-4, atol=1e-6)
