"""Layouts are told apart by config fields and key names; what is not read is named and refused."""

from __future__ import annotations

import pytest
from support.checkpoints import LLAMA_CONFIG, eagle_tensors

from hf_specheads.checkpoints.layouts.detect import (
    DFLASH,
    EAGLE,
    EAGLE3,
    HYDRA,
    MEDUSA,
    OURS,
    POSS,
    detect_from_config,
    detect_from_keys,
)
from hf_specheads.errors import UnknownFormatError


def shapes_of(tensors: dict) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("num_layers", "expected"), [(1, EAGLE), (2, POSS), (7, POSS)], ids=["eagle", "poss-2", "poss-7"]
)
def test_family_of_eagle(num_layers: int, expected: str) -> None:
    assert detect_from_config(LLAMA_CONFIG) is None
    assert detect_from_keys(shapes_of(eagle_tensors(num_layers)), LLAMA_CONFIG) == expected


@pytest.mark.parametrize(
    "keys",
    [
        ["0.0.linear.weight", "0.0.linear.bias", "0.1.weight"],
        ["0.0.linear.weight", "0.0.linear.bias"],
        ["medusa_head.0.0.linear.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight"],
        ["medusa_heads.0.0.linear.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight"],
        ["blocks.0.layers.0.weight", "lm_heads.0.weight"],
    ],
    ids=["v1", "version 2", "Medusa-2", "ModelOpt", "vLLM"],
)
@pytest.mark.parametrize("config", [{}, {"medusa_num_heads": 2, "medusa_num_layers": 1}, {"model_type": "medusa"}])
def test_medusa(keys: list[str], config: dict) -> None:
    assert detect_from_config(config) is None
    assert detect_from_keys(dict.fromkeys(keys, (4, 4)), config) == MEDUSA


@pytest.mark.parametrize(
    "keys",
    [
        ["hydra_mlp.0.0.linear.weight", "hydra_lm_head.0.weight", "input_embed_fn.weight"],
        ["hydra_mlp.0.1.linear.weight", "prefix_embeding_layer.layers.0.input_layernorm.weight"],
    ],
    ids=["Hydra", "Hydra++"],
)
@pytest.mark.parametrize("config", [{}, {"hydra_num_heads": 4, "hydra_head_arch": "mlp"}])
def test_hydra(keys: list[str], config: dict) -> None:
    assert detect_from_config(config) is None
    assert detect_from_keys(dict.fromkeys(keys, (4, 4)), config) == HYDRA


@pytest.mark.parametrize(
    ("keys", "config"),
    [
        (["midlayer.hidden_norm.weight", "fc.weight", "norm.weight"], {}),
        (["layers.0.hidden_norm.weight", "fc.weight", "d2t"], {}),
        (["fc.weight", "layers.0.mlp.up_proj.weight"], {"draft_vocab_size": 40}),
    ],
    ids=["SafeAILab", "ModelOpt", "one feature in EAGLE-3's layout"],
)
def test_eagle3(keys: list[str], config: dict) -> None:
    assert detect_from_config(config) is None
    assert detect_from_keys(dict.fromkeys(keys, (4, 4)), config) == EAGLE3


QWEN3 = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": 64}
BLOCK_KEYS = ["fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight", "layers.0.input_layernorm.weight"]


@pytest.mark.parametrize("config", [QWEN3, QWEN3 | {"dflash_config": {"mask_token_id": 5}}, {}])
def test_block_drafters_are_told_by_their_keys(config: dict) -> None:
    """Their config is that of an ordinary Qwen 3; without `fc` it is one."""
    assert detect_from_config(config) is None
    shapes = dict.fromkeys(BLOCK_KEYS, (4, 4))
    assert detect_from_keys(shapes, config) == DFLASH
    language_model = dict.fromkeys([*BLOCK_KEYS[2:], "lm_head.weight"], (4, 4))
    with pytest.raises(
        UnknownFormatError, match="according to its config" if "dflash_config" in config else "language model"
    ):
        detect_from_keys(language_model, config)


def test_own_layout() -> None:
    assert detect_from_config({"model_type": "specheads_poss"}) == OURS


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"speculators_model_type": "eagle9"}, "speculators.*eagle9"),
        ({"hydra_num_heads": 4, "hydra_head_arch": "eagle-attn"}, "Hydra .*eagle-attn"),
    ],
)
def test_config_names_what_is_not_read(config: dict, words: str) -> None:
    with pytest.raises(UnknownFormatError, match=words):
        detect_from_config(config)


def language_model_keys() -> list[str]:
    return ["embed_tokens.weight", *(f"layers.{i}.input_layernorm.weight" for i in range(3)), "norm.weight"]


@pytest.mark.parametrize(
    ("keys", "config", "words"),
    [
        (["parallel_draft_heads.0.weight", "fc.weight", "midlayer.hidden_norm.weight"], {}, "parallel_draft_heads"),
        (["fc.weight", "layers.0.mlp.up_proj.weight", "layers.1.input_layernorm.weight"], {}, "consecutive layers"),
        (language_model_keys(), {}, "whole language model"),
        (["transformer.wte.weight"], {}, "not draft heads of a known layout"),
    ],
)
def test_keys_name_what_is_not_read(keys: list[str], config: dict, words: str) -> None:
    with pytest.raises(UnknownFormatError, match=words):
        detect_from_keys(dict.fromkeys(keys, (4, 8)), config)
