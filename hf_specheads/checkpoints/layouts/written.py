"""Contents of an export, and the fields of its `config.json` that several destinations share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from ...configuration import DraftHeadConfig
from ...errors import ExportError
from ...heads.base import DraftHead
from ...heads.layers import LayerHeadConfig
from ...heads.specialists import SpecialistHead
from ..files import SAFETENSORS
from .fields import DEFAULT_ROPE_BASE, EAGLE3_ROPES, EAGLE_ROPES, Tensors
from .keys import SPECIAL_TOKENS, attention_bias, attention_weight

ENGINES = ("vllm", "sglang")
# Ropes that a destination computes as transformers does. "dynamic" is missing for engines: they scale it at all
# lengths, transformers only beyond the original length.
ROPES = {
    "vllm": ("default", "linear", "llama3"),
    "sglang": ("default", "linear", "llama3"),
    "speculators": ("default", *EAGLE3_ROPES),
    "dflash": ("default", *EAGLE3_ROPES),
    "eagle": ("default", *EAGLE_ROPES),
    "eagle3": ("default", *EAGLE3_ROPES),
}


@dataclass
class Layout:
    """Files of an export before they are written.

    Attributes:
        config: Contents of `config.json`.
        tensors: Weights by key, on any device.
        notes: What is lost or changed, and what users must know; one sentence each.
        command: Command that serves the export, with `{folder}` and `{target}` as placeholders; `None` if no single
            command serves the layout.
        weight_file: Name of the weight file; a name ending in `.pt` is written with `torch.save`.
    """

    config: dict[str, Any]
    tensors: Tensors
    notes: list[str] = field(default_factory=list)
    command: str | None = None
    weight_file: str = SAFETENSORS


def dtype_name(heads: DraftHead) -> str:
    """Name of the heads' dtype, e.g. `"bfloat16"`."""
    return str(heads.dtype).removeprefix("torch.")


def rope_fields(config: LayerHeadConfig, destination: str) -> dict[str, Any]:
    """Rope fields, both flat for older readers and as `rope_parameters`, which newer readers prefer.

    Raises:
        ExportError: If the destination does not know the scaling, or computes it differently.
    """
    parameters = dict(config.rope_parameters or {})
    kind, base = parameters.get("rope_type", "default"), float(parameters.get("rope_theta", DEFAULT_ROPE_BASE))
    if kind not in ROPES[destination]:
        raise ExportError(
            f"these heads have the rope {kind!r}, but {destination} computes only {list(ROPES[destination])} as "
            "transformers does; train heads with one of those."
        )
    parameters |= {"rope_type": kind, "rope_theta": base}
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    flat = None if kind == "default" else {"type": kind, **scaling}
    return {"rope_theta": base, "rope_scaling": flat, "rope_parameters": parameters}


def llama_fields(heads: SpecialistHead, destination: str) -> dict[str, Any]:
    """Fields of a one-layer Llama config, for heads with Llama decoder layers.

    Raises:
        ExportError: If the engine lacks the activation, or as for [`rope_fields`].
    """
    config = heads.config
    if destination in ENGINES and config.hidden_act != "silu":
        raise ExportError(
            f"these heads have the activation {config.hidden_act!r}, but {destination}'s Llama layers support only "
            "'silu'; train heads with hidden_act='silu'."
        )
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "vocab_size", "rms_norm_eps", "hidden_act", "max_position_embeddings", "initializer_range")  # fmt: skip
    fields = {name: getattr(config, name) for name in names}
    return {
        "model_type": "llama",
        **fields,
        **token_fields(config),
        **rope_fields(config, destination),
        "num_hidden_layers": 1,
        "attention_bias": False,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": dtype_name(heads),
        "dtype": dtype_name(heads),
        "transformers_version": transformers.__version__,
    }


def token_fields(config: DraftHeadConfig) -> dict[str, Any]:
    """Ids of the special tokens that are known."""
    return {name: value for name in SPECIAL_TOKENS if (value := getattr(config, name)) is not None}


def zero_biases(heads: SpecialistHead, layer: str, projections: str) -> Tensors:
    """Zero biases of attention projections, for destinations that require biases the heads do not have.

    Args:
        heads: Heads without these biases.
        layer: Prefix of the layer's keys.
        projections: Letters of the projections, from q, k, v, o.
    """
    weights = heads.specialist_state(0)
    rows = {x: len(weights[attention_weight(x)]) for x in projections}
    return {layer + attention_bias(x): torch.zeros(count, dtype=heads.dtype) for x, count in rows.items()}


def scales_embeddings(heads: DraftHead) -> bool:
    """Whether the target scales its embeddings before the first layer, which engines' draft layers do not do."""
    return str((heads.config.target or {}).get("model_type") or "").startswith("gemma")


def target_name(heads: DraftHead) -> str | None:
    """Name of the target that is stored with the heads."""
    return (heads.config.target or {}).get("name")


def pruning_note(heads: DraftHead) -> list[str]:
    """Note for heads with a pruned vocabulary, for layouts that cannot represent pruning; else empty."""
    if heads.pruned_token_ids is None:
        return []
    return [
        f"the heads are pruned to {len(heads.pruned_token_ids)} tokens, which the layout cannot express: there they "
        "draft over the whole vocabulary"
    ]


def common_notes(heads: DraftHead) -> list[str]:
    """Notes that apply to heads of any family."""
    return pruning_note(heads) + adapter_note(heads)


def adapter_note(heads: DraftHead) -> list[str]:
    """Note for heads that were trained together with an adapter of their target; else empty."""
    if heads.config.target_adapter is None:
        return []
    return [
        "the heads were trained together with the adapter in their `target_adapter/`: serve the target with that "
        "adapter merged, or acceptance falls"
    ]
