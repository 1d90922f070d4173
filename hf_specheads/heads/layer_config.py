"""Fields of the Llama decoder layers that several families are made of."""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedModel

from ..configuration import DraftHeadConfig
from ..layers import layer_fields_for_target


@strict
class LayerHeadConfig(DraftHeadConfig):
    r"""Configuration of heads with Llama decoder layers; families check the fields with [`layers.validate_layer`].

    Args:
        intermediate_size: Width of the SwiGLU MLP.
        num_attention_heads, num_key_value_heads, head_dim: Attention shape; `head_dim` defaults to h / heads.
        hidden_act: Activation of the MLP.
        rms_norm_eps: Epsilon of the norms.
        rope_parameters: As in transformers; a missing base means 10000, as in the authors' code, never the target's.
        attention_bias: Bias of the q, k and v projections (heads for Qwen2 targets).
        attention_out_bias: Bias of the output projection.
        mlp_bias: Bias of the MLP projections.
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
