"""What is planted in heads is named, by evidence; nothing is said of sound ones."""

from __future__ import annotations

import copy
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.diagnosis.tiny import LEVELS, tiny_prompts
from hf_specheads import AutoDraftHead, DraftHead, WrongTargetError, diagnose, load_heads
from hf_specheads.cli import main
from hf_specheads.diagnosis.alternative import put_into_force
from hf_specheads.diagnosis.diagnosis import Diagnosis
from hf_specheads.diagnosis.doctor import _statistics_differ, measured_statistics
from hf_specheads.diagnosis.evidence import capture
from hf_specheads.diagnosis.teacher_forced import own_text
from hf_specheads.heads.layers import rotary_embedding

PROMPTS = tiny_prompts()


def examine(target: Any, heads: DraftHead, prompts: Any = None, **options: Any) -> Diagnosis:
    options = {"max_new_tokens": 24, "positions": 2, "speed": False, **options}
    return diagnose(target, heads, PROMPTS if prompts is None else prompts, **options)


def test_nothing_is_said_of_sound_heads(deep, learnt) -> None:
    found = examine(deep, learnt(), speed=True)
    assert found.sound, str(found)
    assert found.facts.score.position_1 > 0.6 and found.changes == {}
    assert "Verdict  accepts as trained" in str(found)
    chain = found.chain
    assert chain["tau of the tree in force"] == chain["free-running tau (chain)"]  # the tree is that chain
    assert chain["free-running tau (chain)"] == pytest.approx(found.facts.forced, abs=0.5)
    assert chain["speed-up"] > 0 and chain["draft vocabulary coverage"] == 1
    json.dumps(found.to_dict())


@pytest.mark.parametrize(
    "planted", [(1, 3, 5), *(pytest.param(levels, marks=pytest.mark.slow) for levels in [(3, 5, 7), (6, 4, 2)])]
)
def test_other_hidden_states(deep, learnt, planted: tuple[int, ...]) -> None:
    heads = learnt()
    heads.config.feature_layers = planted
    found = examine(deep, heads)
    assert found.findings[0].cause == "taps" and found.changes == {"feature_layers": LEVELS}, str(found)
    assert found.findings[0].after > found.findings[0].before
    assert "set `heads.config.feature_layers = (2, 4, 6)`" in found.findings[0].mend
    assert heads.config.feature_layers == planted  # left as they were


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_norm_flags(deep, learnt, flag: str, tmp_path: Path) -> None:
    heads = learnt(scale=8.0)
    setattr(heads.config, flag, True)
    if flag == "norm_before_residual":
        heads.layers[0].norm_before_residual = True
    found = examine(deep, heads)
    assert found.findings[0].cause == "norm flags" and found.changes == {flag: False}, str(found)
    found.write(tmp_path / "mended")
    mended = load_heads(tmp_path / "mended")
    assert getattr(mended.config, flag) is False
    assert examine(deep, mended).sound
    with pytest.raises(ValueError, match="nothing to write"):
        examine(deep, mended).write(tmp_path / "again")


@pytest.mark.parametrize(
    "planted",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        pytest.param({"rope_type": "default", "rope_theta": 10.0}, marks=pytest.mark.slow),
    ],
)
def test_rope(deep, learnt, planted: dict[str, Any]) -> None:
    heads = learnt()
    heads.config.rope_parameters = planted
    heads.rotary_emb = rotary_embedding(heads.config)
    found = examine(deep, heads)
    assert found.findings[0].cause == "rope", str(found)
    assert found.changes["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.slow
def test_a_map_that_should_be_the_identity(deep, learnt) -> None:
    options = {"draft_vocab_size": 90, "draft_token_ids": list(range(90))}
    heads = learnt("eagle3", options)
    heads.d2t += torch.arange(90) // 45  # of another slice
    found = examine(deep, heads)
    assert found.findings[0].cause == "draft vocabulary" and "identity" in found.findings[0].said, str(found)


def test_what_is_put_into_force_stays(deep, learnt) -> None:
    """Also what was built of the config: the heads as they are, not only the files written of them."""
    heads = learnt()
    right = heads.rotary_emb.inv_freq.clone()
    for base in (100.0, 10000.0):
        put_into_force(heads, {"rope_parameters": {"rope_type": "default", "rope_theta": base}})
        gc.collect()
        assert torch.equal(heads.rotary_emb.inv_freq, right) is (base == 10000.0)
    put_into_force(heads, {"norm_before_residual": True})
    gc.collect()
    assert heads.layers[0].norm_before_residual and heads.config.norm_before_residual


def test_a_random_lm_head(deep, learnt) -> None:
    heads = learnt()
    with torch.no_grad():
        own = heads.lm_head.weight
        own.copy_(own[torch.randperm(len(own))])
    assert not examine(deep, heads).sound


@pytest.mark.slow
def test_tokens_paired_with_another_feature(deep, learnt) -> None:
    found = examine(deep, learnt(shift=1))
    assert found.findings[0].cause == "token shift" and found.changes == {}, str(found)
    assert "train anew" in found.findings[0].mend


def test_another_target(deep, learnt, evidence) -> None:
    heads = learnt()
    heads.config.feature_statistics = measured_statistics(evidence, heads.feature_layers)
    assert examine(deep, heads).sound
    rotated = copy.deepcopy(deep)
    with torch.no_grad():
        for layer in rotated.model.layers:
            layer.self_attn.o_proj.weight.mul_(-3)
            layer.mlp.down_proj.weight.mul_(4)
    found = examine(rotated, heads)
    assert found.findings[0].cause == "another target" and "not those of the training" in found.verdict, str(found)
    texts = [ids[:length] for ids, length in zip(evidence.token_ids, evidence.lengths, strict=True)]
    strange = capture(rotated, texts, list(evidence.starts))
    assert "not those of the training" in _statistics_differ(heads, [strange, strange])
    assert _statistics_differ(heads, [strange, evidence]) is None, "in one form they are"
    heads.config.feature_layers = heads.config.feature_layers[::-1]
    assert _statistics_differ(heads, [evidence]) is None, "the target is the same, whatever is read of it"
    heads.config.feature_statistics["levels"] = [2, 5, 40]
    assert "trained on hidden state 40, but the target has 8 layers" in _statistics_differ(heads, [evidence])


@pytest.mark.slow
def test_another_target_by_its_fingerprint(deep, learnt) -> None:
    heads = learnt()
    heads.remember_target(deep)
    other = copy.deepcopy(deep)
    with torch.no_grad():
        other.model.embed_tokens.weight.copy_(other.model.embed_tokens.weight.flip(0))
    with pytest.raises(WrongTargetError):
        heads.bind(other)
    found = examine(other, heads)
    assert found.findings[0].cause == "another target" and "fingerprint" in found.verdict
    assert heads.config.target["fingerprint"]  # left as it was


def test_untrained_heads(deep) -> None:
    torch.manual_seed(0)
    heads = AutoDraftHead.from_target(deep, "eagle3", feature_layers=LEVELS)
    found = examine(deep, heads)
    assert [one.cause for one in found.findings] == ["under-trained"], str(found)


@pytest.mark.slow
def test_numbers_that_were_better_in_training(deep, tmp_path: Path) -> None:
    torch.manual_seed(0)
    heads = AutoDraftHead.from_target(deep, "eagle3", feature_layers=LEVELS)
    heads.save_pretrained(tmp_path)
    facts = {"metrics": {"eval_pos_acc_1": 0.8, "eval_acceptance_length": 3.1}}
    (tmp_path / "training_facts.json").write_text(json.dumps(facts))
    found = examine(deep, load_heads(tmp_path))
    assert found.findings[0].cause == "training gap" and "says 80%" in found.verdict, str(found)


@pytest.mark.slow
def test_a_vocabulary_that_is_too_small(deep, learnt, evidence) -> None:
    tokens = evidence.token_ids[own_text(evidence, 0)].bincount(minlength=99).argsort(descending=True)[:6]
    options = {"draft_vocab_size": 6, "draft_token_ids": tokens.sort().values.tolist()}
    found = examine(deep, learnt("eagle3", options))
    assert "coverage" in [one.cause for one in found.findings], str(found)
    assert found.chain["draft vocabulary coverage"] < 0.85


def test_wrong_input(deep, learnt) -> None:
    with pytest.raises(ValueError, match="at least one, got none"):
        examine(deep, learnt(), [])


@pytest.mark.slow
def test_the_command(deep, learnt, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capsys) -> None:
    deep.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    heads = learnt()
    heads.save_pretrained(tmp_path / "sound")
    heads.config.feature_layers = (3, 5, 7)
    heads.save_pretrained(tmp_path / "planted")
    lines = [json.dumps({"text": " ".join(f"w{token}" for token in ids[0].tolist())}) for ids in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    common = ["--target", str(tmp_path / "target"), "--prompts", str(tmp_path / "prompts.jsonl"), "--no-speed",
              "--max-new-tokens", "24"]  # fmt: skip
    assert main(["doctor", "--heads", str(tmp_path / "sound"), *common]) == 0
    assert "accepts as trained" in capsys.readouterr().out
    mended = tmp_path / "mended"
    assert main(["doctor", "--heads", str(tmp_path / "planted"), *common, "--json", "--write", str(mended)]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["findings"][0]["cause"] == "taps" and facts["written"] == str(mended)
    assert load_heads(mended).config.feature_layers == LEVELS
    assert main(["doctor", "--heads", str(mended), *common]) == 0
