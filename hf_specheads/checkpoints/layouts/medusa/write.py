"""Writes Medusa heads as their authors publish them, and as older releases of vLLM read them (arXiv 2401.10774)."""

from __future__ import annotations

from typing import Any

import transformers

from ....errors import ExportError
from ....heads import MedusaHead
from ..fields import Tensors
from ..keys import TARGET_NAME
from ..written import Layout, common_notes, dtype_name, target_name
from . import keys


def layout(heads: MedusaHead, to: str) -> Layout:
    """Builds the files for `"medusa"` (the authors' own layout) or `"vllm-medusa"`.

    Raises:
        ExportError: If the destination is vLLM and the heads have no projections of their own.
    """
    return _authors(heads) if to == "medusa" else _old_vllm(heads)


def _blocks(heads: MedusaHead, name: str) -> Tensors:
    """Tensors of all blocks, named by a template of [`keys`]; as in the authors' files, a tied block is repeated."""
    config, state = heads.config, heads.state_dict()
    return {
        name.format(head=head, block=block, part=part): state[f"blocks.{head}.{stored}.{part}"]
        for head in range(config.num_heads)
        for block in range(config.num_blocks)
        for stored in [0 if config.tied_blocks else block]
        for part in ("weight", "bias")
    }


def _projections(heads: MedusaHead, name: str) -> Tensors:
    """Projections of the heads, named by a template of [`keys`]."""
    config, state = heads.config, heads.state_dict()
    return {
        name.format(head=head, block=config.num_blocks): state[f"lm_heads.{head}.weight"]
        for head in range(config.num_heads)
    }


def _common(heads: MedusaHead) -> dict[str, Any]:
    config = heads.config
    return {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "torch_dtype": dtype_name(heads),
        "transformers_version": transformers.__version__,
    }


def _authors(heads: MedusaHead) -> Layout:
    """Builds the authors' state dict; heads that share the target's `lm_head` are their "version 2"."""
    config = heads.config
    fields = {
        TARGET_NAME: target_name(heads),
        keys.NUM_HEADS: config.num_heads,
        keys.NUM_BLOCKS: config.num_blocks,
        **_common(heads),
    }
    tensors = _blocks(heads, keys.BLOCK)
    if heads.lm_heads is None:
        fields["version"] = "2"
    else:
        tensors |= _projections(heads, keys.PROJECTION)
    return Layout(fields, tensors, common_notes(heads), weight_file="medusa_lm_head.pt")


def _old_vllm(heads: MedusaHead) -> Layout:
    config = heads.config
    if heads.lm_heads is None:
        raise ExportError(
            "these heads share the target's `lm_head`, but vLLM's Medusa has one per head in the file; train heads "
            "with lm_head='own'."
        )
    fields = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_blocks,
        "truncated_vocab_size": config.vocab_size,
        keys.SERVED_BIAS: True,
        "original_lm_head": False,
        **_common(heads),
    }
    tensors = _blocks(heads, keys.SERVED_BLOCK) | _projections(heads, keys.SERVED_PROJECTION)
    notes = ["vLLM has dropped Medusa: 0.33 has neither the model nor the method; older releases draft one chain"]
    return Layout(fields, tensors, notes + common_notes(heads))
