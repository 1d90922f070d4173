"""The layout of `speculators`: our draft logits against those that library had for our exports.

`tests/checkpoints/data/speculators/*` were written by `benchmarks/oracles/compare_speculators.py --record`: an export,
the rows it drafted on, and the logits of `speculators` 0.9.0, three teacher-forced passes of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.heads import scrambled_heads
from support.targets import VOCAB, deep_target, prompt

from hf_specheads import DraftHead, Eagle3Head, ExportError, export_heads, load_heads
from hf_specheads.unroll.rows import TrainingRows

RECORDED = Path(__file__).parents[1] / "data" / "speculators"


def recorded(name: str) -> tuple[Eagle3Head, TrainingRows, torch.Tensor]:
    """Heads read from an export, its rows, and the other library's logits fp32 [passes, T, Vd]."""
    heads, oracle = load_heads(RECORDED / name), load_file(RECORDED / name / "oracle.safetensors")
    features, embedding = oracle["features"], oracle["embedding"]
    rows = TrainingRows(
        features=features,
        token_ids=None,
        next_token_ids=oracle["next_token_ids"],
        documents=torch.zeros(features.shape[:2], dtype=torch.long),
        position_ids=torch.arange(features.shape[1])[None],
        embed=lambda ids: embedding[ids],
        lm_head=lambda hidden: hidden,
    )
    return heads, rows, oracle["logits"]


@torch.no_grad()
def draft_logits(heads: DraftHead, rows: TrainingRows, passes: int) -> torch.Tensor:
    return torch.stack([drafted.logits(drafted.hidden[0]) for drafted in heads.unroll(rows, passes)])


@pytest.mark.parametrize("name", ["plain", "variant"])
def test_draft_logits_are_those_of_speculators(name: str) -> None:
    heads, rows, theirs = recorded(name)
    passes, known = theirs.shape[0], theirs.shape[1] - theirs.shape[0]  # later tokens are padded differently
    ours = draft_logits(heads, rows, passes)
    torch.testing.assert_close(ours[:, :known], theirs[:, :known], atol=1e-5, rtol=0)
    assert passes == 3 and known >= 12 and float(theirs[:, :known].std()) > 0.5


@pytest.mark.parametrize("name", ["plain", "variant"])
def test_the_recordings_tell_variants_apart(name: str) -> None:
    """A flag read wrongly would be seen."""
    heads, rows, theirs = recorded(name)
    for layer in heads.layers:
        layer.norm_before_residual = not layer.norm_before_residual
    assert float((draft_logits(heads, rows, 3)[:, :12] - theirs[:, :12]).abs().max()) > 0.1


@pytest.mark.parametrize("name", ["plain", "variant"])
def test_the_recorded_export_is_still_what_we_write(tmp_path: Path, name: str) -> None:
    heads = load_heads(RECORDED / name)
    folder = export_heads(heads, tmp_path / "again", to="speculators").folder
    before, after = load_file(RECORDED / name / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    configs = [json.loads((path / "config.json").read_text(encoding="utf-8")) for path in (RECORDED / name, folder)]
    for config in configs:
        del config["transformers_version"], config["transformer_layer_config"]["transformers_version"]
        del config["transformer_layer_config"]["initializer_range"]  # of the random start, not kept by readers
        del config["speculators_config"]["proposal_methods"]  # the tree is ours, the layout does not have it
    assert configs[0] == configs[1]


def test_fields(tmp_path: Path) -> None:
    heads = scrambled_heads(
        deep_target(), "eagle3", draft_token_ids=range(0, VOCAB, 3), tree_config={"kind": "chain", "depth": 5}
    )
    folder = export_heads(heads, tmp_path / "heads", to="speculators", target="org/target").folder
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    inner = config["speculators_config"]
    assert config["speculators_model_type"] == inner["algorithm"] == "eagle3"
    assert inner["verifier"] == {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
    assert inner["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["norm_before_residual"] is False and config["draft_vocab_size"] == VOCAB // 3
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert "bias" not in config["transformer_layer_config"]
    assert load_heads(folder).config.target["name"] == "org/target"


def test_the_target_must_be_named(tmp_path: Path) -> None:
    heads = scrambled_heads(deep_target(), "eagle3")
    assert heads.config.target["name"] is None
    with pytest.raises(ExportError, match=r"do not store the name of theirs; pass its name"):
        export_heads(heads, tmp_path / "a", to="speculators")
    heads.config.target["name"] = "org/remembered"
    folder = export_heads(heads, tmp_path / "b", to="speculators").folder
    assert load_heads(folder).config.target["name"] == "org/remembered"
    target = deep_target(own=True)
    target.config.name_or_path = "org/loaded"
    folder = export_heads(heads, tmp_path / "c", to="speculators", target=target).folder
    again = load_heads(folder)
    assert again.config.target["name"] == "org/loaded"
    out = target.generate(prompt(), max_new_tokens=4, do_sample=False, assistant_model=again)
    assert torch.equal(out, target.generate(prompt(), max_new_tokens=4, do_sample=False))
