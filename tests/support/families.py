"""A tiny random target of every causal language model that transformers knows, made from its config class by rule.

Sizes are shrunk according to the names of the config's fields; other fields that a class needs are in [`SPECIAL`].
Windows and similar limits become shorter than every prompt, so that they take effect from the first token on.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

VOCAB = 99
WINDOW = 12  # shorter than every prompt
LAYERS = 4
ENOUGH = 8  # distinct tokens that a text needs for mistakes to show

# Values of fields whose default is a number. The first pattern that matches the whole name counts.
SIZES: tuple[tuple[str, int], ...] = (
    ("(true_|text_)?vocab_size(_per_layer_input)?", VOCAB),
    (r"(num_|n_)?(hidden_layers|layers?)|(en|de)coder_layers|num_(en|de)coder_layers|depth", LAYERS),
    ("num_mem_blocks|num_nextn_predict_layers|num_mtp_layers", 1),
    (r".*(key_value|kv)_heads(_\w+)?|num_kv_heads", 2),
    (r".*attention_heads|n_heads?|num_heads|.*index_n_heads|mamba_n_heads|linear_num_.*_heads", 4),
    ("(global_|local_|swa_)?head_dim|.*v_head_dim|.*index_head_dim|linear_.*_head_dim|mamba_d_head|d_kv", 8),
    ("qk_rope_head_dim|qk_nope_head_dim|rotary_dim", 4),
    ("qk_head_dim", 8),
    (".*lora_rank|.*_rank", 16),
    ("hidden_size_per_layer_input", 8),
    (r"hidden_size|n_embd|d_model|embed_dim|dim_model|embedding_size|word_embed_proj_dim|.*_embedding_size|width", 32),
    (r".*intermediate_size(_\w+)?|.*ffn_dim|n_inner|d_ff|dim_ff|ffn_hidden_size|.*_ffn_hidden_size|lru_width", 32),
    (r"(num_)?(local_|routed_|n_routed_)?experts|n_routed_experts|moe_num_experts|num_moe_experts", 4),
    (r"(num_|moe_)?(experts_per_tok\w*|topk|top_k|top_k_experts)|moe_topk", 2),
    ("n_shared_experts|num_shared_experts|moe_num_shared_experts|n_group|topk_group|first_k_dense_replace", 1),
    (r"sliding_window|window_size|attention_window\w*|sliding_window_size", WINDOW),
    ("attention_chunk_size|chunk_size", 16),
    ("index_topk", 64),  # draft heads are refused for longer contexts
    (r"_?(sliding_window_pattern|global_attn_every_n_layers|full_attention_interval)", 2),
    ("max_window_layers", 2),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_seq_length|(model_)?max_length|seq_length", 512),
)  # fmt: skip
FLOATS = (("(decoder_|text_)?(initializer_range|init_std|initializer_factor|init_scale)", 0.3),)

COMMON = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True, "tie_word_embeddings": False}

# A dozen families that represent the others, with the tests that each of them takes.
REPRESENTATIVE = {
    "llama": "all", "gpt2": "all", "mistral": "all", "gemma4_text": "all", "gpt_oss": "all", "deepseek_v3": "all",
    "bert": "all", "gpt_neo": "chain", "bloom": "chain", "glm_moe_dsa": "chain", "lfm2": "chain", "git": "alone",
    "gemma3n_text": "none", "minimax": "none", "mllama": "none", "cpmant": "none", "jamba": "none",
    "qwen3_next": "chain", "mamba2": "chain",
}  # fmt: skip

# Fields that a class needs in addition, or cannot have.
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
_IMAGE_TOKENS = {"image_token_id": 98, "video_token_id": 97, "vision_start_token_id": 96, "vision_end_token_id": 95}
_SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_LINEAR_AND_FULL = ["linear_attention", "full_attention"] * (LAYERS // 2)
_SPARSE = {"num_key_value_heads": 4, "index_head_dim": 8, "first_k_dense_replace": 1}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_BY_LAYER_TYPE = {"sliding_attention": _DEFAULT_ROPE, "full_attention": _DEFAULT_ROPE}
# Layers that reuse the keys and values of earlier ones, and attention heads that are wider in layers of full
# attention.
_GEMMA_4 = {
    "layer_types": _SLIDING_AND_FULL, "num_kv_shared_layers": 2, "global_head_dim": 16,
    "rope_parameters": _BY_LAYER_TYPE,
}  # fmt: skip
_DOTS_3 = {
    "num_key_value_heads": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16, "swa_head_dim": 8, "swa_qk_nope_head_dim": 4, "swa_v_head_dim": 8,
    "layer_types": ["sliding_attention", "indexed_attention"] * (LAYERS // 2),
    "rope_parameters": {"sliding_attention": _DEFAULT_ROPE, "indexed_attention": _DEFAULT_ROPE},
}  # fmt: skip
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": {"num_key_value_heads": 4},
    "axk2": _SPARSE,
    "bailing_hybrid": {"layer_types": _LINEAR_AND_FULL, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"layer_types": _SLIDING_AND_FULL, "rope_parameters": _BY_LAYER_TYPE},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v32": _SPARSE,
    "deepseek_v4": {"compress_rates": {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4}},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "text_config": _DOTS_3,
        "vision_config": {"num_hidden_layers": 42, "adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": _DOTS_3,
    "emu3": {"vocabulary_map": {"<image>": 98}},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_state": 16, "mamba_n_groups": 1},
    "gemma3n_text": {"layer_types": _SLIDING_AND_FULL, "num_kv_shared_layers": 2},
    "gemma4": {"text_config": _GEMMA_4, "vision_config": None, "audio_config": None},
    "gemma4_text": _GEMMA_4,
    "gemma4_unified": {"text_config": _GEMMA_4},
    "gemma4_unified_text": _GEMMA_4,
    "glm_moe_dsa": _SPARSE,
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granitemoehybrid": {"layer_types": _LINEAR_AND_FULL},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2, "num_experts": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {
        "layer_types": _LINEAR_AND_FULL, "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "longcat_flash": {"qk_head_dim": 8, "head_dim": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local"] * LAYERS},
    "xlm": {"emb_dim": 32, "causal": True},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"num_heads": 2, "qk_dim_factor": 1.0, "v_dim_factor": 1.0},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * (LAYERS // 2)},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

# In these families, keys and values are computed from a latent and have as many heads as queries.
SPECIAL |= {name: {"num_key_value_heads": 4} for name in ("deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")}

# Classes of the mapping that cannot be built alone as language models.
_AUDIO = "a model of audio codes, which `AutoModelForCausalLM` cannot build from its config"
_ASSISTANT = "an assistant, which reads the cache of its target"
NOT_BUILT = {
    "blt": "plain `generate` fails in transformers: its config has no `num_hidden_layers`",
    "gemma3n": "its image tower needs timm, which is not installed; its text model is `gemma3n_text`",
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "musicgen": _AUDIO,
    "musicgen_melody": _AUDIO,
}
# Multimodal families, from `AutoModelForImageTextToText`.
SPECIAL |= {
    "llava": {"image_token_index": 98, "image_token_id": 98},
    "qwen2_vl": {"text_config": {"rope_parameters": _MROPE}, **_IMAGE_TOKENS},
    "qwen2_5_vl": {"text_config": {"rope_parameters": _MROPE}, **_IMAGE_TOKENS},
    "qwen3_vl": {"text_config": {"rope_parameters": _MROPE}, **_IMAGE_TOKENS},
    "paligemma": {"image_token_index": 98, "image_token_id": 98},
}
SPECIAL["qwen4_exp"] = {"text_config": SPECIAL["qwen4_exp_text"]}


def by_name(name: str, default: Any) -> Any:
    """Returns a small value for a config's field, or `default`."""
    table = FLOATS if isinstance(default, float) else SIZES
    if isinstance(default, bool) or not isinstance(default, int | float):
        return default
    return next((value for pattern, value in table if re.fullmatch(pattern, name)), default)


def tiny_fields(usual: PreTrainedConfig) -> dict[str, Any]:
    """Returns arguments that make a tiny model, for the class of the config `usual`, which has all defaults."""
    fields: dict[str, Any] = {"model_type": usual.model_type}
    for field in dataclasses.fields(usual):
        default = field.default
        if isinstance(vars(usual).get(field.name), PreTrainedConfig):
            fields[field.name] = tiny_fields(vars(usual)[field.name])
        elif (value := by_name(field.name, default)) is not default:
            fields[field.name] = value
    names = {field.name for field in dataclasses.fields(usual)}
    return fields | {name: value for name, value in COMMON.items() if name in names}


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """Makes a tiny config of a model type."""
    usual = AutoConfig.for_model(model_type)
    fields = tiny_fields(usual)
    for name, value in (SPECIAL.get(model_type, {}) | overrides).items():
        fields[name] = {**fields.get(name, {}), **value} if isinstance(value, dict) else value
    fields.pop("model_type")
    config = type(usual)(**fields)
    config.tie_word_embeddings = False  # with tied embeddings, the next token often repeats the last one
    return config


def tiny_target(
    model_type: str, seed: int = 0, scale: float = 0.3, auto: Any = AutoModelForCausalLM, **overrides: Any
) -> PreTrainedModel:
    """Makes a random target of a family, in fp32, that never ends by itself.

    Args:
        model_type: Key of `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`, or of the mapping of `auto`.
        seed: Seed of the weights.
        scale: Standard deviation of the weights of linear layers, set here because some classes ignore
            `initializer_range`.
        auto: Auto class that makes the model.
        overrides: Fields of the config.
    """
    torch.manual_seed(seed)
    target = auto.from_config(tiny_config(model_type, **overrides), dtype=torch.float32).eval()
    for module in target.modules():
        if isinstance(module, nn.Linear | nn.Embedding | Conv1D):
            nn.init.normal_(module.weight, std=1.0 if isinstance(module, nn.Embedding) else scale)
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    return target


def families() -> list[str]:
    """Returns all model types with a causal language model."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def image_text_families() -> list[str]:
    """Returns all model types with a model of images and text."""
    return list(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def varied_target(
    model_type: str, text: Callable[[PreTrainedModel], torch.Tensor], auto: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """Tries a few random targets of a family. Returns the first whose text is varied enough for mistakes to show, or
    else the one with the most varied text.

    Args:
        model_type: Key of `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`, or of the mapping of `auto`.
        text: Returns the text that a target generates, int64 [T].
        auto: Auto class that makes the model.
    """
    best, most = None, 0
    for seed, scale in enumerate((0.3, 0.15, 0.6, 0.3, 1.0)):
        target = tiny_target(model_type, seed, scale, auto)
        if (distinct := len(set(text(target).tolist()))) > most:
            best, most = target, distinct
        if most >= ENOUGH:
            break
    if best is None:
        raise ValueError(f"no target of {model_type!r} generates anything.")
    return best
