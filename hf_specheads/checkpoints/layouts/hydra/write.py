"""Hydra and Hydra++ heads as their authors publish them (arXiv 2402.05109)."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from ....errors import ExportError
from ....heads import HydraHead
from ..written import SPECIAL_TOKENS, Layout, common_notes, dtype_name, rope_fields, target_name

PREFIX = "prefix_embeding_layer."  # spelled like this
ROPE_TABLE = f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq"


def layout(heads: HydraHead) -> Layout:
    """A state dict, `hydra_lm_head.pt`, with the authors' numbering.

    Raises:
        ExportError: for heads without projections of their own.
    """
    config = heads.config
    if heads.lm_heads is None:
        raise ExportError(
            "these heads share the target's `lm_head`, and the authors' layout has one per head; train heads with "
            "lm_head='own'."
        )
    fields: dict[str, Any] = {
        "base_model_name_or_path": target_name(heads),
        "hydra_num_heads": config.num_heads,
        "hydra_num_layers": config.num_blocks,
        "hydra_head_arch": config.head_arch,
        "grounded_heads": config.grounded,
        "hidden_state_offset": config.hidden_state_offset,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "torch_dtype": dtype_name(heads),
        "transformers_version": transformers.__version__,
    }
    fields |= {name: value for name in SPECIAL_TOKENS if (value := getattr(config, name)) is not None}
    notes = common_notes(heads)
    if config.head_arch == "prefix-mlp":
        fields |= _layer_fields(heads)
        notes.append("the authors' code builds the prefix layer from the target's config: sizes must be the target's")
    return Layout(fields, _tensors(heads), notes, weight_file="hydra_lm_head.pt")


def _layer_fields(heads: HydraHead) -> dict[str, Any]:
    """Of the prefix layer; the authors' code takes them from the target, our importer from here."""
    names = ("num_attention_heads", "rms_norm_eps", "hidden_act", "max_position_embeddings")
    return {**{name: getattr(heads.config, name) for name in names}, **rope_fields(heads.config, "eagle")}


def _tensors(heads: HydraHead) -> dict[str, torch.Tensor]:
    """With dropout between the blocks (Hydra++), every other index is taken."""
    config = heads.config
    step, first, projection = (2, 1, ".1") if config.head_arch == "prefix-mlp" else (1, 0, "")
    tensors: dict[str, torch.Tensor] = {}
    for head, blocks in enumerate(heads.blocks):
        for block in range(config.num_blocks):
            key = f"hydra_mlp.{head}.{first + step * block}"
            parts = blocks[min(block, len(blocks) - 1)]
            if block or not config.grounded:
                tensors |= {f"{key}.linear.{name}": value for name, value in parts.state_dict().items()}
                continue
            tensors |= {f"{key}.linear.{name}": value for name, value in parts.linear.state_dict().items()}
            tensors |= {f"{key}.res_connection.{name}": value for name, value in parts.residual.state_dict().items()}
        lm_head = heads.lm_heads[head].state_dict()
        tensors |= {f"hydra_lm_head.{head}{projection}.{name}": value for name, value in lm_head.items()}
    if heads.prefix is None:
        return tensors
    for name, value in heads.prefix.state_dict().items():
        tensors[f"{PREFIX}{name}" if name.startswith("norm.") else f"{PREFIX}layers.0.{name}"] = value
    base = heads.config.rope_parameters["rope_theta"] if heads.config.rope_parameters else 10000.0
    tensors[ROPE_TABLE] = base ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    return tensors
