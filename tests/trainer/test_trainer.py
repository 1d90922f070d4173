"""Whole training runs on tiny models: what changes, what must not, and what must be equal."""

import copy

import pytest
import torch
from datasets import Dataset
from support.targets import own_target, training_target

from hf_specheads import AutoDraftHead, WrongTargetError, load_heads
from hf_specheads.trainer import DraftHeadTrainer, PackedCollator, PaddedCollator
from hf_specheads.trainer.unroll.target_features import FrozenTarget, unroll_inputs

from .conftest import make_examples, make_heads


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_weights(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if tolerance:
            torch.testing.assert_close(value, theirs[name], msg=name, **tolerance)
        else:
            assert torch.equal(value, theirs[name]), name


def test_heads_change_and_the_target_does_not(make_trainer, target, heads):
    before_target, before_heads = state(target), state(heads)
    trainer = make_trainer(feature_noise=0.1)
    trainer.train()
    assert_same_weights(state(target), before_target)
    for name, value in state(trainer.model).items():
        assert not torch.equal(value, before_heads[name]), name
    in_optimizer = sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"])
    assert in_optimizer == sum(p.numel() for p in heads.parameters())
    assert trainer.model.config.trained_positions == 4


def test_training_lowers_the_loss(make_trainer):
    trainer = make_trainer(max_steps=30, learning_rate=3e-3, lr_scheduler_type="constant")
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]


def test_components_are_logged_per_position_and_add_up(make_trainer):
    trainer = make_trainer(top_k_loss_weight=0.5, logging_steps=2, gradient_accumulation_steps=2)
    trainer.train()
    first = trainer.state.log_history[0]
    weights = {"feature_loss": 1.0, "token_loss": 0.1, "top_k_loss": 0.5}
    total = sum(weight * first[f"{name}_{i}"] for name, weight in weights.items() for i in range(1, 5))
    assert "feature_loss_5" not in first
    assert first["loss"] == pytest.approx(total, rel=1e-4)


def run(make_trainer, heads, folder, **arguments):
    trainer = make_trainer(model=copy.deepcopy(heads), folder=folder, **arguments)
    trainer.train()
    return state(trainer.model)


CLOSE = {"rtol": 1e-3, "atol": 2e-5}
STABLE = {
    "optim": "sgd",
    "learning_rate": 0.05,
    "max_steps": 3,
}  # Adam turns rounding of tiny gradients into sign flips


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"backward": "per_pass"}, {"backward": "summed"}),
        pytest.param({"packing": False}, {"packing": True, "packing_strategy": "batch"}, marks=pytest.mark.slow),
        pytest.param({}, {"activation_checkpointing": True}, marks=pytest.mark.slow),
        ({"per_device_train_batch_size": 4}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
        pytest.param(
            {"pass_reduction": "sum", "learning_rate": 0.01},
            {"pass_reduction": "mean", "learning_rate": 0.04},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["per_pass=summed", "padded=packed", "checkpointing", "accumulation", "mean=sum/passes"],
)
def test_runs_that_must_be_equal(make_trainer, heads, one, other):
    common = {**STABLE, "max_grad_norm": 0.0}
    ours = run(make_trainer, heads, "one", **{**common, **one})
    theirs = run(make_trainer, heads, "other", **{**common, **other})
    assert_same_weights(ours, theirs, **CLOSE)
    assert any(not torch.equal(value, heads.state_dict()[name]) for name, value in ours.items())


def test_bf16_stays_near_fp32(make_trainer, heads):
    ours = run(make_trainer, heads, "fp32", **STABLE)
    bf16 = run(make_trainer, heads, "bf16", bf16=True, **STABLE)
    before = state(heads)
    moved = torch.cat([(ours[n] - before[n]).flatten() for n in ours])
    moved_bf16 = torch.cat([(bf16[n] - before[n]).flatten() for n in ours])
    assert torch.cosine_similarity(moved, moved_bf16, dim=0) > 0.98


def test_batch_without_supervised_tokens_changes_nothing(make_trainer, heads):
    examples = [{"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 0, 0]}] * 4

    class Plain(torch.utils.data.Dataset):  # is not filtered as a `datasets.Dataset` would be
        def __len__(self):
            return len(examples)

        def __getitem__(self, index):
            return examples[index]

    after = run(make_trainer, heads, "run", data=Plain(), max_steps=1, weight_decay=0.0)
    assert_same_weights(after, state(heads))


def sliding_target():
    return own_target("mistral", sliding_window=6, initializer_range=0.02)


@pytest.mark.parametrize("build", [training_target, sliding_target], ids=["full attention", "sliding window"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_target_features_of_packed_rows_equal_those_of_padded_ones(build, attention):
    frozen = FrozenTarget(build())
    frozen.model.set_attn_implementation(attention)
    examples = make_examples(5)
    padded, packed = PaddedCollator(0, 64)(examples), PackedCollator(0, 64)(examples)
    assert packed["input_ids"].shape[0] < 5
    ours, theirs = frozen.features(padded)[0], frozen.features(packed)[0]
    torch.testing.assert_close(
        ours[padded["attention_mask"].bool()], theirs[packed["attention_mask"].bool()], rtol=1e-4, atol=1e-4
    )
    assert not ours.requires_grad


def test_packing_needs_a_target_with_positions(target):
    frozen = FrozenTarget(target)
    frozen._takes_position_ids = False
    with pytest.raises(ValueError, match="packing=False"):
        frozen.features(PackedCollator(0, 64)(make_examples(2)))


def test_every_specialist_must_have_a_pass(make_trainer):
    with pytest.raises(ValueError, match=r"num_passes=2 trains 1 of 2 specialists .* at least 3"):
        make_trainer(num_passes=2)


def test_upstream_masking_warns(make_trainer):
    with pytest.warns(UserWarning, match="parity experiments only"):
        make_trainer(upstream_masking=True)


def test_heads_of_another_target_are_refused(make_trainer):
    with pytest.raises(WrongTargetError):
        make_trainer(model=make_heads(training_target(seed=5)))


def test_unroll_inputs_lose_the_last_token(target):
    batch = PaddedCollator(0, 64)(make_examples(2))
    rows = unroll_inputs(batch, *FrozenTarget(target).features(batch))
    assert rows["features"].shape[1] == rows["next_token_ids"].shape[1] == batch["input_ids"].shape[1] - 1


# ---------------------------------------------------------------------- evaluation
def test_evaluation_reports_what_generate_accepts(make_trainer, target, heads):
    held_out = Dataset.from_list(make_examples(6, seed=9))
    trainer = make_trainer(eval_data=held_out, max_steps=20, eval_acceptance_prompts=6, eval_max_new_tokens=20,
                           learning_rate=3e-3)  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    accepted, offered = [], []
    for example in held_out:
        prompt = torch.tensor([example["input_ids"][:3]])  # the first three are not supervised
        plain = target.generate(prompt, do_sample=False, max_new_tokens=20)
        fast = target.generate(prompt, do_sample=False, max_new_tokens=20, assistant_model=trainer.model)
        assert torch.equal(plain, fast)
        accepted += trainer.model.last_stats.num_accepted[0]
        offered += trainer.model.last_stats.offered[0]
    tau = sum(n + 1 for n in accepted) / len(accepted)
    assert metrics["eval_acceptance_length"] == pytest.approx(tau, rel=0.02)
    first = sum(n >= 1 for n, d in zip(accepted, offered, strict=True) if d) / sum(d >= 1 for d in offered)
    assert metrics["eval_pos_acc_1"] == pytest.approx(first, rel=0.02)


def test_evaluation_loss_does_not_depend_on_the_batch_size(make_trainer, heads):
    held_out = Dataset.from_list(make_examples(7, seed=9))
    losses = [
        make_trainer(eval_data=held_out, per_device_eval_batch_size=size, feature_noise=0.5).evaluate()["eval_loss"]
        for size in (1, 3, 7)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_given_prompts_are_used(make_trainer, target, heads, monkeypatch):
    trainer = make_trainer(eval_data=Dataset.from_list(make_examples(2)), eval_acceptance_prompts=1)
    assert not any("pos_acc" in name for name in make_trainer(eval_data=trainer.eval_dataset).evaluate())
    asked = []
    kept = target.generate
    monkeypatch.setattr(target, "generate", lambda **inputs: [asked.append(inputs["input_ids"]), kept(**inputs)][1])
    trainer._acceptance.prompts = [[5, 6, 7], [8, 9]]
    assert "eval_acceptance_length" in trainer.evaluate()
    assert {tuple(ids[0].tolist()) for ids in asked} == {(5, 6, 7)}


# ---------------------------------------------------------------------- saving and warm starts
def test_saved_heads_hold_nothing_of_the_target(make_trainer, tmp_path, heads):
    trainer = make_trainer(max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "heads"))
    loaded = load_heads(str(tmp_path / "heads"))
    assert_same_weights(state(loaded), state(trainer.model))
    assert all(name.startswith(("fc.", "layers.")) for name in loaded.state_dict())
    assert loaded.config.trained_positions == 4 and loaded.config.train_max_length == 64


def test_warm_start_gives_every_specialist_the_eagle_layer(make_trainer, target):
    trainer = make_trainer(model=make_heads(target, "eagle"), num_passes=1)
    trainer.train()
    heads = AutoDraftHead.from_target(target, "poss", from_heads=trainer.model, num_specialists=3)
    for layer in heads.layers:
        assert_same_weights(state(layer), state(trainer.model.layers[0]))
    warm = make_trainer(model=heads, folder="warm", learning_rate=1e-4, logging_steps=1, max_steps=1)
    warm.train()
    assert isinstance(warm, DraftHeadTrainer) and warm.num_passes == 9
