"""Names of tensors and config fields that several layouts share: those of transformers' Llama."""

from __future__ import annotations

D2T, T2D = "d2t", "t2d"  # of which tokens the rows of a draft vocabulary are, and which tokens have one
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
FC, FC_BIAS = "fc.weight", "fc.bias"
FIRST_LAYER = "layers.0."
INPUT_NORM, POST_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
# Fields of `config.json`.
TARGET_NAME = "base_model_name_or_path"
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def attention_weight(projection: str) -> str:
    """Weight of a projection, one of the letters q, k, v, o, without the layer's prefix."""
    return f"self_attn.{projection}_proj.weight"


def attention_bias(projection: str) -> str:
    """Bias of a projection, one of the letters q, k, v, o, without the layer's prefix."""
    return f"self_attn.{projection}_proj.bias"


Q_PROJ, K_PROJ, GATE_PROJ = attention_weight("q"), attention_weight("k"), "mlp.gate_proj.weight"
# Weights that every decoder layer has, without the layer's prefix.
LAYER_WEIGHTS = (*map(attention_weight, "qkvo"), GATE_PROJ, "mlp.up_proj.weight", "mlp.down_proj.weight")
