"""Building blocks of draft heads, defined by how they differ from transformers' Llama layers."""

from collections.abc import Callable
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from ..configuration import DraftHeadConfig


class DraftAttention(LlamaAttention):
    """Llama attention in which only the last `num_queries` rows attend; the rows before them only fill the cache.

    In a draft head of one layer, keys and values do not depend on attention. Rows whose outputs nobody reads (a
    prompt, tree levels that a specialist takes over) therefore cost two projections instead of a whole layer.
    """

    def __init__(self, config: DraftHeadConfig, layer_idx: int):
        super().__init__(config, layer_idx)  # type: ignore[arg-type]  # our configs have the fields it reads
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if config.attention_out_bias != config.attention_bias:
            self.o_proj: nn.Linear = nn.Linear(
                self.o_proj.in_features, self.o_proj.out_features, bias=config.attention_out_bias
            )

    def cache_rows(
        self,
        hidden_states: torch.Tensor,  # [B, R, h]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # each [B, R, head_dim]
        past_key_values: Cache | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends the keys and values of all rows to the cache, and returns all of both: each [B, key-value heads,
        cached + R, head_dim]."""
        rows = hidden_states.shape[:-1]
        key = self.k_proj(hidden_states).view(*rows, -1, self.head_dim)
        key = (key if self.k_norm is None else self.k_norm(key)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(*rows, -1, self.head_dim).transpose(1, 2)
        key = rotated(key, *position_embeddings)
        if past_key_values is None:
            return key, value
        return past_key_values.update(key, value, self.layer_idx)

    def forward(  # type: ignore[override]  # says which rows attend, which transformers' attention cannot
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,  # additive, [B, 1, Q, cached + R]
        past_key_values: Cache | None,
        num_queries: int,
        attention_function: Callable | None = None,
    ) -> torch.Tensor:
        key, value = self.cache_rows(hidden_states, position_embeddings, past_key_values)
        queries = hidden_states[:, -num_queries:]
        cos, sin = (table[:, -num_queries:] for table in position_embeddings)
        query = self.q_proj(queries).view(*queries.shape[:-1], -1, self.head_dim)
        query = (query if self.q_norm is None else self.q_norm(query)).transpose(1, 2)
        query = rotated(query, cos, sin)
        attend = attention_function or ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        output, _ = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling)
        return self.o_proj(output.reshape(*queries.shape[:-1], -1))


def rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies rotary positions to states [B, heads, R, head_dim], from tables [B, R, head_dim].

    transformers' function rotates queries and keys together, but here only some of the rows have queries.
    """
    return states * cos[:, None] + rotate_half(states) * sin[:, None]


def rotary_embedding(config: DraftHeadConfig) -> LlamaRotaryEmbedding:
    """Makes Llama's rotary embedding for heads with decoder layers."""
    return LlamaRotaryEmbedding(config)  # type: ignore[arg-type]  # our configs have the fields it reads


class DraftDecoderLayer(GradientCheckpointingLayer):
    """A Llama decoder layer **without** the norm before attention (EAGLE, section 3.2; every PosS specialist).

    Shapes: `hidden_states` [B, R, h] -> [B, Q, h], the outputs of the last Q = `num_queries` rows;
    with Q = 0 the rows only fill the cache.
    """

    def __init__(self, config: DraftHeadConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DraftAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None,
        num_queries: int,
        attention_function: Callable | None = None,
    ) -> torch.Tensor:
        read, added_to = self.attended(hidden_states)
        if num_queries == 0:
            self.self_attn.cache_rows(read, position_embeddings, past_key_values)
            return added_to[:, :0]
        attention = self.self_attn(
            read, position_embeddings, attention_mask, past_key_values, num_queries, attention_function
        )
        residual = added_to[:, -num_queries:] + attention
        return residual + self.mlp(self.post_attention_layernorm(residual))

    def attended(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the input of attention [B, R, *] and the residual [B, R, h]; here both are the rows themselves."""
        return rows, rows


class NormedDecoderLayer(DraftDecoderLayer):
    """A Llama decoder layer **with** the norm before attention; the residual is the input before that norm.

    Shapes: as [`DraftDecoderLayer`].
    """

    def __init__(self, config: DraftHeadConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def attended(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.input_layernorm(rows), rows


def validate_layer(config: DraftHeadConfig) -> None:
    """Checks the fields of a config that describe a decoder layer.

    Raises:
        ValueError: for an impossible value.
    """
    config._validate_sizes("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"`num_attention_heads` ({config.num_attention_heads}) must be a multiple of `num_key_value_heads` "
            f"({config.num_key_value_heads})."
        )
    if config.head_dim % 2:
        raise ValueError(f"`head_dim` must be even for rotary positions, got {config.head_dim}.")
    if config.hidden_act not in ACT2FN:
        raise ValueError(f"`hidden_act` must be an activation that transformers knows, got {config.hidden_act!r}.")
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
        raise ValueError(f"`rope_type` must be 'default' or one of {sorted(ROPE_INIT_FUNCTIONS)}, got {rope_type!r}.")


class WideAttention(DraftAttention):
    """Attention whose queries, keys and values are projected from `[embedding ; feature]`."""

    def __init__(self, config: DraftHeadConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        width = config.row_embedding_size + config.hidden_size
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self, name)
            setattr(self, name, nn.Linear(width, narrow.out_features, bias=narrow.bias is not None))
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)


class Eagle3DecoderLayer(DraftDecoderLayer):
    """A Llama decoder layer whose attention reads `[norm(embedding) ; norm(feature)]`; the residual is the feature.

    Shapes: rows [B, R, E + h], embedding first -> [B, Q, h], the outputs of the last Q = `num_queries` rows.
    """

    def __init__(self, config: DraftHeadConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.widths = (config.row_embedding_size, config.hidden_size)
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = WideAttention(config, layer_idx)
        self.input_layernorm = LlamaRMSNorm(config.row_embedding_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def attended(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embeddings, features = rows.split(self.widths, dim=-1)
        normed = self.hidden_norm(features)
        read = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        return read, normed if self.norm_before_residual else features


def layer_fields_for_target(target: PreTrainedModel) -> dict[str, Any]:
    """Config fields of a decoder layer with the target's proportions, as far as the target's config gives them.

    Only the base of the target's rope is taken over, not its scaling, because draft heads are trained at short
    positions.
    """
    config = target.config.get_text_config(decoder=True)
    config = config.per_layer_config[0]  # if sizes differ between layers, the config itself does not have them
    width = config.hidden_size
    heads = getattr(config, "num_attention_heads", None) or max(width // 64, 1)
    head_dim = getattr(config, "head_dim", None) or width // heads
    kv_heads = getattr(config, "num_key_value_heads", None)
    middle = getattr(config, "intermediate_size", None)
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    norm_eps = next((eps for name in names if (eps := getattr(config, name, None))), 1e-6)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads if isinstance(kv_heads, int) and kv_heads and heads % kv_heads == 0 else heads,
        "head_dim": head_dim if head_dim % 2 == 0 else head_dim + 1,
        "intermediate_size": middle if isinstance(middle, int) else 4 * width,
        "rms_norm_eps": float(norm_eps),
        "rope_parameters": {"rope_type": "default", "rope_theta": _rope_base(config)},
        "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 2048,
    }


def _rope_base(config: Any) -> float:
    """Base of the target's rope, for full attention if it differs by layer type (Gemma 3); 10000 if it has none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention") or parameters
    return float(parameters.get("rope_theta") or 10000.0)


@strict
class LayerHeadConfig(DraftHeadConfig):
    r"""Configuration of heads with Llama decoder layers; families check the fields with [`validate_layer`].

    Args:
        intermediate_size: Width of the SwiGLU MLP.
        num_attention_heads, num_key_value_heads, head_dim: Attention shape; `head_dim` defaults to h divided by
            `num_attention_heads`.
        hidden_act: Activation of the MLP.
        rms_norm_eps: Epsilon of the norms.
        rope_parameters: As in transformers; a missing base means 10000, as in the authors' code, not the target's.
        attention_bias: Whether the q, k and v projections have biases (as in heads for Qwen2 targets).
        attention_out_bias: Whether the output projection has a bias.
        mlp_bias: Whether the MLP projections have biases.
    """

    intermediate_size: int = 11008
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None and self.num_attention_heads:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)

    @classmethod
    def fields_for_target(cls, target: PreTrainedModel, method: str) -> dict[str, Any]:
        return {**layer_fields_for_target(target), **super().fields_for_target(target, method)}
