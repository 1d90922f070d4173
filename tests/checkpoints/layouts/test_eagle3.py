"""The authors' layout of EAGLE-3 heads in its spellings: sizes and vocabulary from the tensors, all else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import (
    EAGLE3_CONFIG as CONFIG,
)
from support.checkpoints import (
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    TOKENS,
    VOCAB,
    eagle3_tensors,
    write_checkpoint,
)
from support.checkpoints import (
    MODELOPT_CONFIG as NESTED,
)
from support.targets import plain, prompt, shared_target

from hf_specheads import Eagle3Head, load_heads
from hf_specheads.errors import CheckpointKeysError, CheckpointShapeError, CheckpointValueError, HeadConfigError


def load(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Eagle3Head:
    heads = load_heads(write_checkpoint(folder, tensors, {**CONFIG, **config}))
    assert type(heads) is Eagle3Head and not heads.training
    return heads


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."], ids=["SafeAILab", "ModelOpt"])
@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
def test_spellings(tmp_path: Path, layer: str, pickled: bool) -> None:
    tensors = eagle3_tensors(layer)
    heads = load_heads(write_checkpoint(tmp_path, tensors, CONFIG, pickled=pickled))
    config, state = heads.config, heads.state_dict()
    assert (config.method, config.num_key_value_heads, config.head_dim) == ("eagle3", KV_HEADS, HEAD_DIM)
    assert (config.vocab_size, config.draft_vocab_size, config.feature_size) == (VOCAB, len(TOKENS), HIDDEN)
    assert config.rope_parameters["rope_theta"] == 20000.0 and config.rms_norm_eps == 1e-5
    assert heads.draft_vocabulary.tolist() == TOKENS.tolist()
    assert state.keys() == {key.replace("midlayer.", "layers.0.") for key in tensors}
    for key, tensor in tensors.items():
        assert torch.equal(state[key.replace("midlayer.", "layers.0.")], tensor), key


def test_generation_saving_and_an_unknown_depth(tmp_path: Path) -> None:
    """The file does not say which levels; the target's depth does, again after the heads were saved in our layout."""
    target, ids = shared_target("llama", num_hidden_layers=8), prompt()
    heads = load(tmp_path / "theirs", eagle3_tensors())
    assert heads.config.feature_layers is None and heads.config.target is None
    expected = plain(target, ids, 16)
    assert torch.equal(plain(target, ids, 16, assistant_model=heads), expected)
    assert heads.feature_layers == (2, 4, 5)
    heads.save_pretrained(tmp_path / "ours")
    again = load_heads(tmp_path / "ours")
    assert torch.equal(plain(target, ids, 16, assistant_model=again), expected)
    assert again.last_stats.num_accepted == heads.last_stats.num_accepted


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8], ids=str)
def test_t2d_types_and_a_missing_t2d(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = eagle3_tensors()
    tensors["t2d"] = tensors["t2d"].to(dtype)
    tensors["d2t"] = tensors["d2t"].int()
    assert load(tmp_path / "with", tensors).draft_vocabulary.tolist() == TOKENS.tolist()
    del tensors["t2d"]  # as ModelOpt saves
    heads = load(tmp_path / "without", tensors)
    assert torch.equal(heads.t2d, torch.isin(torch.arange(VOCAB), TOKENS)) and heads.d2t.dtype == torch.long


@pytest.mark.parametrize("mapping", [False, True], ids=["no mapping", "zeros and ones"])
def test_the_whole_vocabulary(tmp_path: Path, mapping: bool) -> None:
    tensors = eagle3_tensors() | {"lm_head.weight": torch.randn(VOCAB, HIDDEN)}
    del tensors["d2t"], tensors["t2d"]
    if mapping:
        tensors |= {"d2t": torch.zeros(VOCAB, dtype=torch.long), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    heads = load(tmp_path, tensors, draft_vocab_size=VOCAB)
    assert heads.draft_vocabulary is None and "d2t" not in heads.state_dict()


def test_heads_narrower_than_their_target(tmp_path: Path) -> None:
    tensors = eagle3_tensors(hidden=24, embedding=True)
    sizes = {"hidden_size": 24, "target_hidden_size": HIDDEN, "head_dim": HEAD_DIM}
    heads = load(tmp_path / "own", tensors, **sizes)
    assert torch.equal(heads.embed_tokens.weight, tensors["embed_tokens.weight"])
    assert (heads.config.hidden_size, heads.config.feature_size) == (24, HIDDEN)
    target, ids = shared_target("llama", num_hidden_layers=8), prompt()
    assert torch.equal(plain(target, ids, 12, assistant_model=heads), plain(target, ids, 12))
    del tensors["embed_tokens.weight"]
    with pytest.raises(CheckpointKeysError, match=r"24 wide and the target is 32 wide.*embed_tokens"):
        load(tmp_path / "none", tensors, **sizes)


def test_an_embedding_in_the_file_is_the_heads_own(tmp_path: Path) -> None:
    heads = load(tmp_path, eagle3_tensors(embedding=True))
    assert heads.config.own_embedding and heads.embed_tokens.weight.shape == (VOCAB, HIDDEN)


@pytest.mark.parametrize(
    ("config", "levels"),
    [
        ({}, None),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
        ({"eagle_config": NESTED}, (2, 4, 5)),
        ({"eagle_config": NESTED, "eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, None),
    ],
    ids=["open", "entering layers", "ModelOpt's outputs of layers", "both", "empty"],
)
def test_levels(tmp_path: Path, config: dict, levels: tuple | None) -> None:
    assert load(tmp_path, eagle3_tensors(), **config).config.feature_layers == levels


def test_variants(tmp_path: Path) -> None:
    norms = {f"aux_norm_{name}.weight": torch.rand(HIDDEN) for name in ("low", "mid", "high")}
    heads = load(tmp_path / "old names", eagle3_tensors() | norms, fc_norm=True, norm_output=True)
    assert torch.equal(heads.fc_norm[2].weight, norms["aux_norm_high.weight"]) and heads.config.norm_output
    one = {"input_norm.weight": torch.rand(3 * HIDDEN)}
    heads = load(tmp_path / "one norm", eagle3_tensors() | one, norm_before_fc=True, norm_before_residual=True)
    assert torch.equal(heads.input_norm.weight, one["input_norm.weight"]) and heads.config.norm_before_residual


def test_scaled_ropes(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    heads = load(tmp_path, eagle3_tensors(), rope_scaling=scaling)
    assert heads.config.rope_parameters == {**scaling, "rope_theta": 20000.0}
    plain_rope = load(tmp_path / "plain", eagle3_tensors())
    assert not torch.equal(heads.rotary_emb.inv_freq, plain_rope.rotary_emb.inv_freq)


def changed(**changes: Any) -> dict[str, torch.Tensor]:
    """The tensors with some replaced, or left out where the change is `None`; `__` stands for a dot."""
    tensors = eagle3_tensors() | {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in tensors.items() if value is not None}


OFFSETS = eagle3_tensors()["d2t"]
DRAFTED = eagle3_tensors()["t2d"]


@pytest.mark.parametrize(
    ("tensors", "config", "error", "words"),
    [
        (changed(d2t=None), {}, CheckpointKeysError, "66 of 99 tokens, but `d2t`"),
        (changed(d2t=None, t2d=None), {}, CheckpointKeysError, "66 of 99 tokens, but `d2t`"),
        (changed(d2t=OFFSETS[:-1].clone()), {}, CheckpointShapeError, "expected 66 integers"),
        (changed(d2t=OFFSETS.float()), {}, CheckpointShapeError, "`d2t` is torch.float32"),
        (changed(d2t=OFFSETS.flip(0)), {}, CheckpointValueError, "must be ascending"),
        (changed(d2t=OFFSETS + 1), {}, CheckpointValueError, "token id 99"),
        (changed(d2t=OFFSETS.flip(0), t2d=None), {}, CheckpointValueError, "ascend"),
        (changed(d2t=TOKENS, t2d=None), {}, CheckpointValueError, "the target's ids are 0 to 98"),
        (changed(t2d=~DRAFTED), {}, CheckpointValueError, "marks 33 tokens, and `d2t` has 66"),
        (changed(t2d=DRAFTED.roll(1)), {}, CheckpointValueError, "disagree about which tokens"),
        (changed(t2d=DRAFTED.float()), {}, CheckpointShapeError, "one truth value per token"),
        (changed(t2d=DRAFTED[:90].clone()), {}, CheckpointShapeError, "vocab_size=99, but the weights say 90"),
        (changed(), {"draft_vocab_size": 50}, CheckpointShapeError, "draft_vocab_size=50, but the weights say 66"),
        (changed(), {"eagle_config": {"use_aux_hidden_state": False}}, HeadConfigError, "as EAGLE-1 does"),
        (changed(), {"eagle_config": 3}, HeadConfigError, "expected an object"),
        (changed(), {"eagle_aux_hidden_state_layer_ids": [1, 2]}, CheckpointShapeError, "names 2 hidden states"),
        (changed(), {"eagle_aux_hidden_state_layer_ids": "1,2,3"}, HeadConfigError, "list of integers"),
        (changed(), {"eagle_aux_hidden_state_layer_ids": [2, 2, 5]}, HeadConfigError, "must be different"),
        (changed(), {"norm_output": "yes"}, HeadConfigError, "expected true or false"),
        (changed(), {"fc_norm": True}, CheckpointKeysError, "missing.*fc_norm"),
        (changed(), {"norm_before_fc": True}, CheckpointKeysError, "missing.*input_norm"),
        (changed(fc_norm__0__weight=torch.rand(HIDDEN)), {}, HeadConfigError, "does not say fc_norm=true"),
        (changed(aux_norm_low__weight=torch.rand(HIDDEN)), {}, HeadConfigError, "does not say fc_norm=true"),
        (changed(input_norm__weight=torch.rand(96)), {}, HeadConfigError, "does not say norm_before_fc=true"),
        (changed(fc__bias=torch.rand(HIDDEN)), {}, CheckpointKeysError, "unknown.*fc.bias"),
        (changed(layers__1__mlp__up_proj__weight=torch.rand(1, 1)), {}, CheckpointKeysError, "consecutive layers"),
        (changed(midlayer__self_attn__q_norm__weight=torch.rand(8)), {}, CheckpointKeysError, "missing.*k_norm"),
        (changed(lm_head__weight=None), {}, CheckpointKeysError, "missing.*lm_head"),
        (changed(midlayer__hidden_norm__weight=None), {}, CheckpointKeysError, "missing.*hidden_norm"),
        (
            changed(fc__weight=torch.rand(HIDDEN, 100)), {}, CheckpointShapeError,
            "not a multiple of the target's width",
        ),
        (changed(fc__weight=torch.rand(HIDDEN, 64)), {}, HeadConfigError, "reads 2 hidden states"),
        (changed(norm__weight=torch.rand(5)), {}, CheckpointShapeError, r"norm.weight has shape \[5\]"),
        (
            changed(midlayer__self_attn__q_proj__weight=torch.rand(32, 32)), {}, CheckpointShapeError,
            r"q_proj.weight has shape \[32, 32\], expected \[32, 64\]",
        ),
        (changed(), {"num_attention_heads": 5}, CheckpointShapeError, "num_attention_heads=5"),
        (changed(), {"intermediate_size": 38}, CheckpointShapeError, "intermediate_size=38, but the weights say 37"),
        (changed(), {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, HeadConfigError, "'yarn'"),
        (changed(), {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, HeadConfigError, "low_freq_factor"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], config: dict, error: type, words: str
) -> None:
    with pytest.raises(error, match=words):
        load(tmp_path, tensors, **config)
