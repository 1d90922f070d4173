"""The authors' layout of Hydra heads: both kinds, what the keys tell, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, hydra_tensors
from support.checkpoints import HYDRA_PREFIX as PREFIX
from support.checkpoints import HYDRA_ROPE_TABLE as TABLE
from support.targets import own_target, plain, prompt

from hf_specheads import HydraHead, WrongTargetError, load_heads
from hf_specheads.errors import CheckpointKeysError, CheckpointShapeError, HeadConfigError, HeadLoadError

CONFIG: dict[str, Any] = {
    "base_model_name_or_path": "someone/target", "hydra_num_heads": 3, "hydra_num_layers": 3,
    "hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0,
}  # fmt: skip


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    torch.save(tensors, folder / "hydra_lm_head.pt")
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("grounded", [True, False])
@pytest.mark.parametrize("prefixed", [True, False])
def test_every_tensor_finds_its_place(tmp_path: Path, prefixed: bool, grounded: bool, tied: bool) -> None:
    tensors = hydra_tensors(prefixed=prefixed, grounded=grounded, tied=tied)
    heads = load_heads(write(tmp_path, tensors, grounded_heads=grounded))
    config = heads.config
    assert type(heads) is HydraHead and not heads.training
    assert (config.num_heads, config.num_blocks, config.tied_blocks, config.grounded) == (3, 3, tied, grounded)
    assert (config.head_arch, config.lm_head) == ("prefix-mlp" if prefixed else "mlp", "own")
    assert (config.vocab_size, config.hidden_size, config.embedding_size) == (VOCAB, HIDDEN, HIDDEN)
    assert heads.published_tree.kind == "static" and heads.published_tree.depth == 3
    state, (step, first) = heads.state_dict(), (2, 1) if prefixed else (1, 0)
    for head in range(3):
        for part in ("weight", "bias"):
            theirs = [tensors[f"hydra_mlp.{head}.{first + step * block}.linear.{part}"] for block in range(3)]
            blocks = heads.blocks[head]
            assert len(blocks) == ((2 if grounded else 1) if tied else 3)
            opening = blocks[0].linear if grounded else blocks[0]
            assert torch.equal(getattr(opening, part), theirs[0])
            assert all(torch.equal(getattr(ours, part), t) for ours, t in zip(blocks[1:], theirs[1:], strict=False))
            if grounded:
                residual = tensors[f"hydra_mlp.{head}.{first}.res_connection.{part}"]
                assert torch.equal(getattr(blocks[0].residual, part), residual)
            projection = tensors[f"hydra_lm_head.{head}{'.1' if prefixed else ''}.{part}"]
            assert torch.equal(state[f"lm_heads.{head}.{part}"], projection)
    if prefixed:
        assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
        for name in ("self_attn.k_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"):
            assert torch.equal(state[f"prefix.{name}.weight"], tensors[f"{PREFIX}layers.0.{name}.weight"])
        assert torch.equal(state["prefix.norm.weight"], tensors[f"{PREFIX}norm.weight"])


def test_the_copy_of_the_embedding_tells_the_target(tmp_path: Path) -> None:
    target, other = own_target("llama"), own_target("llama", seed=1)
    tensors = hydra_tensors(prefixed=True)
    # The embedding inside of the prefix layer is random and unused.
    tensors["input_embed_fn.weight"] = target.get_input_embeddings().weight.detach().half().float()
    heads = load_heads(write(tmp_path, tensors))
    assert heads.config.target["name"] == "someone/target"
    ids = prompt()
    assert torch.equal(plain(target, ids, 8, assistant_model=heads), plain(target, ids, 8))
    with pytest.raises(WrongTargetError, match="fingerprint"):
        heads.check_target(other)


def test_without_the_copy_only_the_name_is_known(tmp_path: Path) -> None:
    tensors = hydra_tensors()
    del tensors["input_embed_fn.weight"]
    assert load_heads(write(tmp_path, tensors)).config.target == {"name": "someone/target"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_rope_base_from_the_stored_table(tmp_path: Path, base: float, dtype: torch.dtype) -> None:
    tensors = {key: tensor.to(dtype) for key, tensor in hydra_tensors(prefixed=True, base=base).items()}
    heads = load_heads(write(tmp_path, tensors))
    assert heads.config.rope_parameters["rope_theta"] == pytest.approx(base, rel=0.02 if dtype.itemsize == 2 else 1e-6)
    assert heads.dtype == dtype


def test_a_table_of_no_base_is_refused(tmp_path: Path) -> None:
    tensors = hydra_tensors(prefixed=True)
    tensors[TABLE] = tensors[TABLE].flip(0)
    with pytest.raises(CheckpointShapeError, match="not a table of rotary frequencies"):
        load_heads(write(tmp_path, tensors))


def test_without_a_table_the_config_must_count_the_attention_heads(tmp_path: Path) -> None:
    tensors = hydra_tensors(prefixed=True)
    del tensors[TABLE]
    with pytest.raises(HeadConfigError, match="num_attention_heads"):
        load_heads(write(tmp_path / "a", tensors))
    heads = load_heads(write(tmp_path / "b", tensors, num_attention_heads=HEADS, rope_theta=20000.0))
    assert heads.config.head_dim == HEAD_DIM and heads.config.rope_parameters["rope_theta"] == 20000.0


def test_what_was_assumed_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path, hydra_tensors(prefixed=True), hydra_num_heads=5, hidden_state_offset=2)
    with caplog.at_level(logging.INFO, logger="hf_specheads"):
        heads = load_heads(folder)
    assert heads.feature_layers == (-3,)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "hf_specheads"]
    for words in ("hydra heads", "hydra_num_heads=3, as the weights say", "rms_norm_eps=1e-06"):
        assert words in line


# ------------------------------------------------------------------ damaged and contradicting files
@pytest.mark.parametrize(
    "missing",
    ["hydra_mlp.1.1.res_connection.bias", "hydra_mlp.2.3.linear.bias", "hydra_lm_head.0.1.bias",
     f"{PREFIX}norm.weight", f"{PREFIX}layers.0.input_layernorm.weight", "hydra_mlp.1.3.linear.weight",
     "hydra_lm_head.0.1.weight", "hydra_mlp.0.1.linear.weight", f"{PREFIX}layers.0.self_attn.q_proj.weight"],
)  # fmt: skip
def test_missing_keys_are_errors(tmp_path: Path, missing: str) -> None:
    tensors = hydra_tensors(prefixed=True)
    del tensors[missing]
    with pytest.raises(CheckpointKeysError):
        load_heads(write(tmp_path, tensors))


@pytest.mark.parametrize(
    "unknown", ["hydra_mlp.0.7.bias", f"{PREFIX}layers.1.input_layernorm.weight", "lm_head.weight"]
)
def test_unknown_keys_are_errors(tmp_path: Path, unknown: str) -> None:
    tensors = hydra_tensors(prefixed=True) | {unknown: torch.zeros(HIDDEN)}
    with pytest.raises(CheckpointKeysError, match=unknown.replace(".", r"\.")):
        load_heads(write(tmp_path, tensors))


def test_heads_are_numbered_without_gaps(tmp_path: Path) -> None:
    tensors = {key.replace(".2.", ".4."): tensor for key, tensor in hydra_tensors(num_blocks=1).items()}
    with pytest.raises(CheckpointKeysError, match=r"\[0, 1, 4\]"):
        load_heads(write(tmp_path, tensors))


@pytest.mark.parametrize(
    "key", ["hydra_mlp.1.1.linear.weight", "hydra_mlp.0.1.linear.weight", "hydra_lm_head.2.1.weight",
            f"{PREFIX}layers.0.mlp.gate_proj.weight", f"{PREFIX}layers.0.self_attn.q_proj.weight", TABLE,
            "input_embed_fn.weight"],
)  # fmt: skip
@pytest.mark.parametrize("damage", [lambda t: t[:-1], lambda t: t[None], lambda t: t.flatten()[0]])
def test_shapes_that_contradict_are_errors(tmp_path: Path, key: str, damage: Any) -> None:
    tensors = hydra_tensors(prefixed=True)
    tensors[key] = damage(tensors[key]).clone()
    with pytest.raises(HeadLoadError):
        load_heads(write(tmp_path, tensors))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"vocab_size": 98}, "vocab_size=98"),
        ({"hidden_state_offset": -1}, "hidden_state_offset"),
        ({"hidden_state_offset": "none"}, "hidden_state_offset"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ({"hidden_act": "magic"}, "magic"),
        ({"hydra_head_arch": "cross-attn"}, "cross-attn"),
    ],
)
def test_configs_that_contradict_are_errors(tmp_path: Path, config: dict, words: str) -> None:
    with pytest.raises(HeadLoadError, match=words):
        load_heads(write(tmp_path, hydra_tensors(prefixed=True), **config))
