"""What once went wrong without a word: each is refused, counted or printed."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from support.families import tiny_target
from support.targets import _LLAMA_LIKE, own_target
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from hf_specheads import AutoDraftHead
from hf_specheads.target.borrowed import BorrowedModules
from hf_specheads.target.projection import output_weight
from hf_specheads.trainer import JointTrainingArguments
from hf_specheads.trainer.__main__ import main
from hf_specheads.trainer.arguments import DraftHeadTrainingArguments
from hf_specheads.trainer.building import training_arguments
from hf_specheads.trainer.guards import NonFiniteError
from hf_specheads.trainer.identity import OtherRunError
from hf_specheads.trainer.methods import complete_arguments
from hf_specheads.trainer.probes import ProbeError, packing_problem, refuse_other_logits
from hf_specheads.trainer.recipe import read_recipe, shipped_recipes
from hf_specheads.trainer.unroll.target_features import FrozenTarget

from .conftest import make_examples, make_heads

IDS = torch.arange(3, 40, 4)[None]


# ---------------------------------------------------------------------- the logit function
def build(model_type: str, **options):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(_LLAMA_LIKE | options))).eval()


SCALED = {
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.25},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0},
    "nanochat": {"final_logit_softcapping": 3.0},
    "hyperclovax": {"logits_scaling": 3.0},
}


@torch.no_grad()
@pytest.mark.parametrize("model_type", SCALED)
def test_heads_and_losses_see_the_targets_own_logits(model_type: str) -> None:
    target = build(model_type, **SCALED[model_type])
    outputs = target(IDS, output_hidden_states=-1)
    features, logits = outputs.hidden_states[-1], outputs.logits
    alone = target.get_output_embeddings()(features)
    assert (alone - logits).abs().max() > 0.1  # what was compared with before
    for lm_head in (BorrowedModules.of(target).lm_head, FrozenTarget(target).lm_head):
        torch.testing.assert_close(lm_head(features), logits)
    heads = AutoDraftHead.from_target(target, "eagle").bind(target)
    torch.testing.assert_close(heads.draft_logits(features), logits)
    pruned = heads.prune_draft_vocabulary([5, 9, 60])
    torch.testing.assert_close(pruned.draft_logits(features), logits[..., [5, 9, 60]])
    if "final_logit_softcapping" not in SCALED[model_type]:  # heads with a projection of their own start from these
        torch.testing.assert_close(features @ output_weight(target).T, logits)


class Sharper(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * 1.5
        return outputs


@pytest.mark.parametrize("model_type", ["reformer", "dory"])
def test_a_target_that_tells_no_last_hidden_state_is_refused(model_type: str) -> None:
    with pytest.raises(ProbeError, match="does not return the hidden state"):
        refuse_other_logits(FrozenTarget(tiny_target(model_type)))


@pytest.mark.parametrize("model_type", ["deepseek_v4", "qwen4_exp_text"])
def test_a_target_whose_states_between_layers_are_no_features_is_refused(model_type: str, make_trainer) -> None:
    target = tiny_target(model_type)
    with pytest.raises(ProbeError, match=r"ForCausalLM: hidden state 2 has shape \[.*(128|4, 32)\]"):
        make_trainer(model=AutoDraftHead.from_target(target, "dflash"), of=target)
    make_trainer(model=AutoDraftHead.from_target(target, "eagle"), of=target)


def test_a_target_with_fewer_states_than_its_config_says_is_refused(make_trainer) -> None:
    target = tiny_target("longcat_flash")
    with pytest.raises(ProbeError, match=r"no hidden state 5 of the 5 it has.*feature_layers"):
        make_trainer(model=AutoDraftHead.from_target(target, "dflash"), of=target)
    heads = AutoDraftHead.from_target(target, "dflash", feature_layers=[1, 2, 3])
    make_trainer(model=heads, of=target)


def test_a_logit_function_nobody_knows_is_refused(target, heads, make_trainer) -> None:
    refuse_other_logits(FrozenTarget(target))
    target.__class__ = Sharper
    with pytest.raises(ProbeError, match="logits of Sharper are not those that its `lm_head` computes"):
        make_trainer(model=heads)


# ---------------------------------------------------------------------- packing
@pytest.mark.parametrize("family", ["gpt-oss", "lfm2", "opt"])
def test_targets_that_mix_documents_are_refused_packed_rows(family: str) -> None:
    target = own_target(family)
    assert "another one stands in the same sequence" in packing_problem(FrozenTarget(target))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_targets_that_keep_documents_apart_are_not(family: str) -> None:
    assert packing_problem(FrozenTarget(own_target(family))) is None


def test_rounding_is_no_other_document(monkeypatch) -> None:
    """Of many layers in 16 bits: it depends on the shape of a batch, and on nothing else of the other documents."""
    exact = FrozenTarget.features

    def rounded(self, batch, layers=(-1,)):
        states = exact(self, batch, layers)[1]
        noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(states[..., 0].numel()))
        return states, states + 0.03 * states.std() * noise

    monkeypatch.setattr(FrozenTarget, "features", rounded)
    assert packing_problem(FrozenTarget(own_target("llama"))) is None
    assert "another one stands in the same sequence" in packing_problem(FrozenTarget(own_target("lfm2")))


def test_the_trainer_tries_it(make_trainer, monkeypatch) -> None:
    make_trainer(packing=True)
    monkeypatch.setattr(FrozenTarget, "features", lambda self, batch, layers=(-1,): (
        (states := self.model(batch["input_ids"], output_hidden_states=-1).hidden_states[-1]), states))  # fmt: skip
    make_trainer(packing=False)
    with pytest.raises(ProbeError, match="packing=True cannot be used with LlamaForCausalLM"):
        make_trainer(packing=True)


# ---------------------------------------------------------------------- another recipe in the same folder
def test_another_recipe_does_not_go_on(workspace, tmp_path: Path, capsys) -> None:
    options = [*workspace.options, f"output_dir={tmp_path / 'run'}", "save_strategy=steps", "save_steps=2"]
    workspace.run(*options, "max_steps=2")
    workspace.run(*options, "max_steps=4")  # longer is the same
    assert "trained 4 steps" in capsys.readouterr().out
    assert main([*options, "max_steps=4", "learning_rate=0.01", "num_passes=3"]) == 2
    said = capsys.readouterr().err
    assert "num_passes was 4 and is now 3" in said and "learning_rate was 0.05 and is now 0.01" in said
    assert "resume=false" in said
    (tmp_path / "run" / "checkpoint-4" / "run_identity.json").unlink()
    assert main(options) == 2
    assert "does not say which recipe" in capsys.readouterr().err


def test_other_data_does_not_go_on(make_trainer, tmp_path: Path) -> None:
    make_trainer(save_strategy="steps", save_steps=2, max_steps=2).train()
    other = make_trainer(data=Dataset.from_list(make_examples(seed=8)), max_steps=4)
    with pytest.raises(OtherRunError, match="data was '16 examples"):
        other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))


# ---------------------------------------------------------------------- steps that are no numbers
def poisoned(trainer, steps: set[int], monkeypatch):
    """The trainer, with a loss that is no number in some steps."""
    kept = trainer.weighted_loss

    def weigh(losses, position):
        loss = kept(losses, position)
        return loss * float("nan") if trainer.state.global_step in steps else loss

    monkeypatch.setattr(trainer, "weighted_loss", weigh)
    return trainer


def test_a_step_that_is_no_number_is_skipped_and_counted(make_trainer, heads, monkeypatch) -> None:
    options = {"max_steps": 3, "optim": "sgd", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    trainer = poisoned(make_trainer(model=copy.deepcopy(heads), **options), {1}, monkeypatch)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry.get("skipped_steps") for entry in logs] == [None, 1, 1]
    assert logs[1]["token_loss_1"] == 0.0 and logs[2]["token_loss_1"] > 0
    plain = make_trainer(model=copy.deepcopy(heads), **options)
    plain.train()
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    assert any(
        not torch.equal(a, b) for a, b in zip(trainer.model.parameters(), plain.model.parameters(), strict=True)
    )


def test_it_gives_up_before_a_good_checkpoint_is_rotated_away(make_trainer, tmp_path: Path, monkeypatch) -> None:
    options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 9}
    trainer = poisoned(make_trainer(max_nonfinite_steps=3, **options), set(range(2, 9)), monkeypatch)
    with pytest.raises(NonFiniteError, match=r"3 steps in a row, the last of them step 5"):
        trainer.train()
    [left] = (tmp_path / "run").glob("checkpoint-*")
    saved = AutoDraftHead.from_pretrained(left)
    assert all(bool(p.isfinite().all()) for p in saved.parameters())


def test_weights_that_are_no_numbers_are_not_saved(make_trainer, tmp_path: Path, monkeypatch) -> None:
    trainer = make_trainer(save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=2)
    kept = trainer.training_step

    def spoil(model, *args, **kwargs):
        loss = kept(model, *args, **kwargs)
        if trainer.state.global_step == 1:
            next(model.parameters()).data.fill_(float("inf"))
        return loss

    monkeypatch.setattr(trainer, "training_step", spoil)
    with pytest.raises(NonFiniteError, match="no checkpoint is written and none is deleted"):
        trainer.train()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]


# ---------------------------------------------------------------------- defaults
@pytest.mark.parametrize("name", sorted(set(shipped_recipes()) - {"draft_lm", "mtp"}))
def test_a_method_by_arguments_alone_trains_as_its_recipe(name: str, tmp_path: Path) -> None:
    recipe = read_recipe(name, ["target=org/model", f"output_dir={tmp_path}", "use_cpu=true"])
    target = own_target("llama", num_hidden_layers=8)
    options = {k: v for k, v in recipe.heads.items() if k != "draft_vocab_size"}
    heads = make_heads(target, recipe.method, **options)
    written = training_arguments(recipe)
    kind = JointTrainingArguments if recipe.trains_target else DraftHeadTrainingArguments
    alone = kind(output_dir=str(tmp_path), use_cpu=True)
    for args in (written, alone):
        complete_arguments(args, heads, joint=recipe.trains_target)
    assert alone.loss_weights == written.loss_weights
    assert alone.pass_decay == written.pass_decay
    assert (alone.num_passes or heads.default_passes) == (written.num_passes or heads.default_passes)


# ---------------------------------------------------------------------- what became of the data
def test_what_is_cut_and_left_out_is_printed(workspace, tmp_path: Path, capsys) -> None:
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    rows = [{"prompt": "w0 w1", "completion": entry["text"]} for entry in lines]
    rows += [{"prompt": "w0 " * 40, "completion": "w1"}, {"prompt": None, "completion": "w2"}]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    workspace.run(*workspace.options, f"output_dir={tmp_path / 'run'}", f"train_data={tmp_path / 'pairs.jsonl'}",
                  "max_length=16", "max_steps=1")  # fmt: skip
    said = capsys.readouterr().out
    cut = sum(len(entry["text"].split()) + 3 > 16 for entry in lines[4:])
    assert f"18 rows, 16 examples, {cut} cut at max_length, left out 1 without supervised tokens and 1" in said
    assert "`prompt` and `completion` must be two texts" in said
    example = next(line for line in said.splitlines() if line.strip().startswith("example:"))
    assert "w0" in example.split("[[")[0] and "[[" in example and example.rstrip().endswith("]]")
