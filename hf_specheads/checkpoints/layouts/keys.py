"""Names of tensors and config fields that several layouts share; they are those of transformers' Llama."""

from __future__ import annotations

D2T, T2D = "d2t", "t2d"  # offsets from draft rows to token ids, and the mask of tokens that have a draft row
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
FC, FC_BIAS = "fc.weight", "fc.bias"
FIRST_LAYER = "layers.0."
INPUT_NORM, POST_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
# Fields of `config.json`.
TARGET_NAME = "base_model_name_or_path"
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def attention_weight(projection: str) -> str:
    """Key of the weight of an attention projection (q, k, v or o), without the layer's prefix."""
    return f"self_attn.{projection}_proj.weight"


def attention_bias(projection: str) -> str:
    """Key of the bias of an attention projection (q, k, v or o), without the layer's prefix."""
    return f"self_attn.{projection}_proj.bias"


Q_PROJ, K_PROJ, GATE_PROJ = attention_weight("q"), attention_weight("k"), "mlp.gate_proj.weight"
# Keys of the weights that every decoder layer has, without the layer's prefix.
LAYER_WEIGHTS = (*map(attention_weight, "qkvo"), GATE_PROJ, "mlp.up_proj.weight", "mlp.down_proj.weight")
