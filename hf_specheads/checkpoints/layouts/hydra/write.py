"""Writes Hydra and Hydra++ heads as their authors publish them (arXiv 2402.05109)."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from ....errors import ExportError
from ....heads import HydraHead
from ..fields import DEFAULT_ROPE_BASE, Tensors
from ..keys import Q_PROJ, TARGET_NAME
from ..written import Layout, common_notes, dtype_name, rope_fields, target_name, token_fields
from . import keys


def layout(heads: HydraHead) -> Layout:
    """Builds the files: a state dict, `hydra_lm_head.pt`, with the authors' numbering.

    Raises:
        ExportError: If the heads have no projections of their own.
    """
    config = heads.config
    if heads.lm_heads is None:
        raise ExportError(
            "these heads share the target's `lm_head`, but the authors' layout has one per head; train heads with "
            "lm_head='own'."
        )
    fields: dict[str, Any] = {
        TARGET_NAME: target_name(heads),
        keys.NUM_HEADS: config.num_heads,
        keys.NUM_BLOCKS: config.num_blocks,
        keys.HEAD_ARCH: config.head_arch,
        keys.GROUNDED: config.grounded,
        keys.OFFSET: config.hidden_state_offset,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "torch_dtype": dtype_name(heads),
        "transformers_version": transformers.__version__,
        **token_fields(config),
    }
    notes = common_notes(heads)
    if config.head_arch == "prefix-mlp":
        fields |= _layer_fields(heads)
        notes.append(
            "the authors' code builds the prefix layer from the target's config: its sizes must be those of the target"
        )
    return Layout(fields, _tensors(heads), notes, weight_file="hydra_lm_head.pt")


def _layer_fields(heads: HydraHead) -> dict[str, Any]:
    """Config fields of the prefix layer. This package reads them; the authors' code reads the target's config."""
    names = ("num_attention_heads", "rms_norm_eps", "hidden_act", "max_position_embeddings")
    return {**{name: getattr(heads.config, name) for name in names}, **rope_fields(heads.config, "eagle")}


def _tensors(heads: HydraHead) -> Tensors:
    """Tensors by the authors' names; a tied block is written once per use."""
    config, state = heads.config, heads.state_dict()
    numbering = keys.Numbering(config.head_arch == "prefix-mlp", config.grounded)
    stored = len(list(heads.blocks[0].children()))
    biases = [key.removeprefix("prefix.") for key in state if key.startswith("prefix.") and key.endswith(".bias")]
    names = numbering.names(config.num_heads, config.num_blocks, stored, biases)
    tensors = {theirs: state[ours] for theirs, ours in names.items()}
    if not numbering.prefixed:
        return tensors
    base = (config.rope_parameters or {}).get("rope_theta", DEFAULT_ROPE_BASE)
    head_dim = len(tensors[keys.PREFIX_LAYER + Q_PROJ]) // config.num_attention_heads
    tensors[keys.ROPE_TABLE] = base ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    return tensors
