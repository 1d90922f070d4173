"""The layouts of speculators, and the norms one of them shares with a variant of HASS: arithmetic and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import HEAD_DIM, HIDDEN, LLAMA_CONFIG, VOCAB, eagle3_tensors, eagle_tensors, write_checkpoint
from support.layouts import (
    LAYOUTS,
    SPECULATORS_EAGLE3,
    hass_norms,
    qk_norms,
    speculators_config,
    speculators_eagle,
    target,
)
from torch.nn.functional import linear, rms_norm
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from hf_specheads import load_heads
from hf_specheads.cache.draft import DraftCache
from hf_specheads.errors import CheckpointKeysError, CheckpointShapeError, HeadConfigError
from hf_specheads.unroll.rows import TrainingRows

EPS = LLAMA_CONFIG["rms_norm_eps"]
EAGLE3_LAYER = SPECULATORS_EAGLE3["transformer_layer_config"]


def causal(rows: int) -> torch.Tensor:
    return torch.full((rows, rows), torch.finfo(torch.float32).min).triu(1)[None, None]


def test_the_norms_of_the_hass_variant(tmp_path: Path) -> None:
    """Against transformers' own decoder layer, which has the norm before attention."""
    tensors = eagle_tensors(embedding=False) | hass_norms()
    heads = load_heads(write_checkpoint(tmp_path, tensors)).bind(target())
    layer = LlamaDecoderLayer(LlamaConfig(**LLAMA_CONFIG, head_dim=HEAD_DIM, attn_implementation="eager"), 0).eval()
    state = {key.removeprefix("layers.0."): tensor for key, tensor in tensors.items() if key.startswith("layers.")}
    layer.load_state_dict(state | {"input_layernorm.weight": tensors["hidden_layernorm.weight"]})
    tokens, features = torch.randint(3, VOCAB, (1, 7)), torch.randn(1, 6, HIDDEN)
    embeddings = target().get_input_embeddings()(tokens[:, 1:])
    normed = rms_norm(embeddings, (HIDDEN,), tensors["embed_layernorm.weight"], EPS)
    fused = linear(torch.cat([normed, features], -1), tensors["fc.weight"], tensors["fc.bias"])
    rotary = heads.rotary_emb(fused, torch.arange(6)[None])
    outputs = layer(fused, attention_mask=causal(6), position_embeddings=rotary)
    drafted = (outputs[0] if isinstance(outputs, tuple) else outputs)[:, -1:]
    logits = target().lm_head(rms_norm(drafted, (HIDDEN,), tensors["lm_head_layernorm.weight"], EPS))
    state, ours = heads.start_draft(DraftCache(1), tokens, features)
    torch.testing.assert_close(ours, logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(state, drafted, atol=1e-5, rtol=1e-4)  # fed back before its norm


def test_norms_of_queries_and_keys(tmp_path: Path) -> None:
    """Against transformers' Qwen 3 attention over the same normed rows."""
    tensors = qk_norms(eagle3_tensors("layers.0."))
    folder = write_checkpoint(tmp_path, tensors, SPECULATORS_EAGLE3)
    heads = load_heads(folder)
    ours = heads.layers[0].self_attn
    layer = {key: value for key, value in EAGLE3_LAYER.items() if key != "model_type"}
    theirs = Qwen3Attention(Qwen3Config(**layer, attn_implementation="eager"), 0).eval()
    for name in ("q_proj", "k_proj", "v_proj"):  # as wide as embedding and feature
        setattr(theirs, name, torch.nn.Linear(2 * HIDDEN, getattr(theirs, name).out_features, bias=False))
    theirs.load_state_dict({key[19:]: tensor for key, tensor in tensors.items() if "self_attn" in key})
    rows = torch.randn(1, 6, 2 * HIDDEN)
    rotary = LlamaRotaryEmbedding(heads.config)(rows, torch.arange(6)[None])
    expected, _ = theirs(rows, position_embeddings=rotary, attention_mask=causal(6))
    torch.testing.assert_close(ours(rows, rotary, causal(6), None, 6), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("norms", [True, False])
def test_the_old_layout_is_the_authors_under_other_names(tmp_path: Path, norms: bool) -> None:
    config = speculators_config("eagle", layernorms=norms, fusion_bias=True)
    theirs = load_heads(write_checkpoint(tmp_path / "speculators", speculators_eagle(norms), config))
    tensors = eagle_tensors(embedding=False) | (hass_norms() if norms else {})
    authors = load_heads(write_checkpoint(tmp_path / "authors", tensors))
    assert theirs.config.target == {"name": "org/target"} and theirs.config.extra_norms == norms
    assert theirs.config.rope_parameters == authors.config.rope_parameters
    assert all(torch.equal(theirs.state_dict()[key], tensor) for key, tensor in authors.state_dict().items())


@pytest.mark.parametrize("value", [True, False])
def test_flags_of_eagle3(tmp_path: Path, value: bool) -> None:
    config = SPECULATORS_EAGLE3 | {"norm_before_residual": value, "eagle_aux_hidden_state_layer_ids": [1, 4, 6]}
    heads = load_heads(write_checkpoint(tmp_path, eagle3_tensors("layers.0."), config))
    assert heads.config.norm_before_residual == heads.layers[0].norm_before_residual == value
    assert heads.config.feature_layers == (1, 4, 6) and heads.config.target == {"name": "org/target"}


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 20000.0}, {"rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"}},
             {"rope_theta": 20000.0, "rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"}}],
    ids=["flat", "nested", "both"],
)  # fmt: skip
@pytest.mark.parametrize("inside", [True, False], ids=["in the layer", "beside it"])
def test_rope_fields(tmp_path: Path, rope: dict, inside: bool) -> None:
    layer = {key: value for key, value in EAGLE3_LAYER.items() if not key.startswith("rope")}
    config = SPECULATORS_EAGLE3 | {"transformer_layer_config": layer | (rope if inside else {})}
    heads = load_heads(write_checkpoint(tmp_path, eagle3_tensors("layers.0."), config | ({} if inside else rope)))
    assert heads.config.rope_parameters == {"rope_type": "default", "rope_theta": 20000.0}


def with_layer(**changes: Any) -> dict[str, Any]:
    return SPECULATORS_EAGLE3 | {"transformer_layer_config": EAGLE3_LAYER | changes}


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({**SPECULATORS_EAGLE3, "norm_before_residual": None}, HeadConfigError, "lacks `norm_before_residual`"),
        ({**SPECULATORS_EAGLE3, "norm_before_residual": "no"}, HeadConfigError, "expected true or false"),
        ({**SPECULATORS_EAGLE3, "transformer_layer_config": 3}, HeadConfigError, "expected an object"),
        ({**SPECULATORS_EAGLE3, "rope_theta": 7.0}, HeadConfigError, "at the top level and in rope_parameters"),
        ({**SPECULATORS_EAGLE3, "draft_vocab_size": 50}, CheckpointShapeError, "draft_vocab_size=50"),
        (with_layer(model_type="mamba"), HeadConfigError, "'mamba'"),
        (with_layer(rope_theta=1.5), HeadConfigError, "at the top level and in rope_parameters"),
        (with_layer(partial_rotary_factor=0.5), HeadConfigError, "partial_rotary_factor"),
        (with_layer(intermediate_size=38), CheckpointShapeError, "intermediate_size=38"),
        (speculators_config("eagle", layernorms=False), CheckpointShapeError, r"\[H, 2H\]"),
    ],
)
def test_what_eagle3_configs_must_say(tmp_path: Path, config: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        load_heads(write_checkpoint(tmp_path, eagle3_tensors("layers.0."), config))


@pytest.mark.parametrize(
    ("flags", "norms", "words"),
    [
        ({"layernorms": True, "fusion_bias": True}, False, "layernorms=true, but the file has no"),
        ({"layernorms": False, "fusion_bias": True}, True, "layernorms=false, but the file has a"),
        ({"layernorms": True, "fusion_bias": False}, True, "fusion_bias=false"),
    ],
)
def test_flags_and_tensors_must_agree(tmp_path: Path, flags: dict, norms: bool, words: str) -> None:
    with pytest.raises(CheckpointKeysError, match=words):
        load_heads(write_checkpoint(tmp_path, speculators_eagle(norms), speculators_config("eagle", **flags)))


@pytest.mark.parametrize("name", ["hass-norms", "speculators-hass-norms"])
def test_all_three_norms_or_none(name: str, tmp_path: Path) -> None:
    files = LAYOUTS[name].files()
    norms = [key for key in files["model.safetensors"] if "layernorm" in key and "post_attention" not in key]
    assert len(norms) == 3
    for key in norms:
        weights = {k: tensor for k, tensor in files["model.safetensors"].items() if k != key}
        with pytest.raises(CheckpointKeysError):
            load_heads(LAYOUTS[name].write(tmp_path / key, files | {"model.safetensors": weights}))


def test_training_reads_the_norms_as_drafting_does(tmp_path: Path) -> None:
    """The last row of the first two passes against two draft positions; all three norms get gradients."""
    heads = load_heads(write_checkpoint(tmp_path, eagle_tensors(embedding=False) | hass_norms())).bind(target())
    ids, features = torch.randint(3, VOCAB, (1, 8)), torch.randn(1, 7, HIDDEN)
    borrowed = heads.borrowed
    rows = TrainingRows(
        features=features,
        token_ids=ids[:, :-1],
        next_token_ids=ids[:, 1:],
        documents=torch.zeros(1, 7, dtype=torch.long),
        position_ids=torch.arange(7)[None],
        embed=borrowed.embed_tokens,
        lm_head=borrowed.lm_head,
    )
    first, second = heads.unroll(rows, 2)
    cache = heads.new_draft_cache()
    _, logits = heads.start_draft(cache, ids, features)
    torch.testing.assert_close(first.logits(first.hidden[:, -1:]), logits, atol=1e-5, rtol=1e-4)
    # The second pass reads what the first drafted one row before: one committed row fewer, and its token drafted.
    cache = heads.new_draft_cache()
    state, _ = heads.start_draft(cache, ids[:, :-1], features[:, :-1])
    _, logits = heads.extend_draft(cache, 1, ids[:, -1:], state, torch.ones(1, 1, 1, dtype=torch.bool))
    torch.testing.assert_close(second.logits(second.hidden[:, -1:]), logits, atol=1e-5, rtol=1e-4)
    first.logits(first.hidden).square().mean().backward()
    norms = (heads.embed_layernorm, heads.layers[0].input_layernorm, heads.lm_head_layernorm)
    assert all(norm.weight.grad is not None and norm.weight.grad.abs().sum() > 0 for norm in norms)
