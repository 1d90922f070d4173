"""What transformers' Trainer does around loss and backward is done by our `training_step`, too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from hf_specheads import AutoDraftHead
from hf_specheads.trainer import DraftHeadTrainer, upkeep
from hf_specheads.trainer.unroll.target_features import FrozenTarget

from .conftest import make_examples, make_heads

SGD = {"optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant"}


class AveragingSGD(torch.optim.SGD):
    """Two sets of weights, as schedule-free optimizers keep them: steps move one, the mean of all is for use."""

    def __init__(self, params, lr: float):
        super().__init__(params, lr=lr)
        self.weights = [p for group in self.param_groups for p in group["params"]]
        self.other = [torch.zeros_like(p) for p in self.weights]
        self.training, self.steps = True, 0

    def _switch(self, training: bool) -> None:
        if self.steps and training != self.training:
            for weight, other in zip(self.weights, self.other, strict=True):
                kept = weight.detach().clone()
                weight.data.copy_(other)
                other.copy_(kept)
        self.training = training

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    def step(self, closure=None):
        if not self.training:
            raise RuntimeError("a step was taken on the weights for use")
        super().step(closure)
        self.steps += 1
        for weight, mean in zip(self.weights, self.other, strict=True):
            mean.lerp_(weight.detach(), 1 / self.steps)


class Trajectory(TrainerCallback):
    """The weights after every step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})

    def mean(self, steps: int) -> dict[str, torch.Tensor]:
        return {name: torch.stack([each[name] for each in self.weights[:steps]]).mean(0) for name in self.weights[0]}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_schedule_free_optimizers(make_trainer, target, tmp_path: Path) -> None:
    """Steps move the weights for training; evaluations, checkpoints and the result are the mean of all steps."""
    seen = Trajectory()
    plain = make_trainer(model=make_heads(target), folder="plain", max_steps=5, **SGD)
    plain.add_callback(seen)
    plain.train()
    held_out = Dataset.from_list(make_examples(4, seed=5))
    trainer = make_trainer(model=make_heads(target), max_steps=5, eval_data=held_out, eval_strategy="steps",
                           eval_steps=2, save_strategy="steps", save_steps=3, **SGD)  # fmt: skip
    trainer.optimizer = AveragingSGD(trainer.model.parameters(), lr=SGD["learning_rate"])
    trainer.train()
    assert_close(dict(trainer.model.named_parameters()), seen.mean(5))
    saved = AutoDraftHead.from_pretrained(tmp_path / "run" / "checkpoint-3")
    assert_close(dict(saved.named_parameters()), seen.mean(3))
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    mean = make_heads(target)
    mean.load_state_dict({**mean.state_dict(), **seen.mean(4)})
    assert losses[1] == pytest.approx(evaluate(make_trainer, mean, held_out), rel=1e-4)
    assert losses[1] != pytest.approx(evaluate(make_trainer, plain.model, held_out), rel=1e-4)


def evaluate(make_trainer, heads, held_out: Dataset) -> float:
    return make_trainer(model=heads, folder="other", eval_data=held_out).evaluate()["eval_loss"]


def test_cached_memory_is_given_back(make_trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer: DraftHeadTrainer = make_trainer(max_steps=5, torch_empty_cache_steps=2)
    cleared: list[int] = []
    monkeypatch.setattr(upkeep, "clear_device_cache", lambda: cleared.append(trainer.state.global_step))
    trainer.train()
    assert cleared == [0, 2, 4]


def test_torch_compile_compiles_the_targets_layers_for_steps_alone(make_trainer, target, tmp_path: Path) -> None:
    """By a backend that computes graphs as they are: the same weights in the end."""

    def graphs() -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    known = graphs()
    plain = make_trainer(model=make_heads(target), folder="plain", max_steps=2, **SGD)
    plain.train()
    trainer = make_trainer(model=make_heads(target), max_steps=2, torch_compile=True, torch_compile_backend="eager",
                           **SGD)  # fmt: skip
    assert graphs() == known
    trainer.train()
    assert graphs() > known
    trainer.save_model()
    saved = AutoDraftHead.from_pretrained(tmp_path / "run")
    for name, value in plain.model.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value), name
    known = graphs()
    target.generate(torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False)
    target.generate(torch.arange(3, 9)[None], max_new_tokens=4, do_sample=False, assistant_model=trainer.model)
    assert graphs() == known


def test_layers_nobody_finds_and_sharded_targets_are_not_compiled(target) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel keeps its decoder layers .* set torch_compile=False"):
        FrozenTarget(gpt2, {})
    args = SimpleNamespace(torch_compile=True, shard_target=True, upstream_masking=False)
    with pytest.warns(UserWarning, match="compiles no layers of a sharded target"):
        upkeep.warn_of_settings(args)
    assert upkeep.compiling(args) is None


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.01])
def test_gradients_are_clipped_by_value(make_trainer, target, max_grad_norm: float) -> None:
    """By one SGD step of rate 1, which moves every weight by its gradient."""
    before = dict(make_heads(target).named_parameters())
    common = {"max_steps": 1, "max_grad_norm": max_grad_norm, **SGD, "learning_rate": 1.0}

    def step(folder: str, **more) -> torch.Tensor:
        trainer = make_trainer(model=make_heads(target), folder=folder, **common, **more)
        trainer.train()
        return torch.cat([(p.detach() - before[name]).flatten() for name, p in trainer.model.named_parameters()])

    whole = step("whole").detach()
    limit = float(whole.abs().quantile(0.9))
    clipped = step("clipped", max_grad_value=limit).detach()
    torch.testing.assert_close(clipped, whole.clamp(-limit, limit), rtol=1e-3, atol=1e-6)
    assert (whole.abs() > 1.01 * limit).any()
