"""Medusa heads as their authors publish them, and as vLLM read them while it had Medusa (arXiv 2401.10774)."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from ....errors import ExportError
from ....heads import MedusaHead
from ..written import Layout, common_notes, dtype_name, target_name


def layout(heads: MedusaHead, to: str) -> Layout:
    """Files for `"medusa"`, the authors' own, or `"vllm-medusa"`.

    Raises:
        ExportError: for heads without projections of their own, to vLLM.
    """
    return _authors(heads) if to == "medusa" else _old_vllm(heads)


def _blocks(heads: MedusaHead) -> list[tuple[int, int, dict[str, torch.Tensor]]]:
    """Head, block and tensors of every block; a tied block is listed once per use, as the authors do."""
    config = heads.config
    return [
        (head, block, heads.blocks[head][0 if config.tied_blocks else block].state_dict())
        for head in range(config.num_heads)
        for block in range(config.num_blocks)
    ]


def _common(heads: MedusaHead) -> dict[str, Any]:
    config = heads.config
    return {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "torch_dtype": dtype_name(heads),
        "transformers_version": transformers.__version__,
    }


def _authors(heads: MedusaHead) -> Layout:
    """A state dict; heads that share the target's `lm_head` are the authors' "version 2"."""
    config = heads.config
    fields = {
        "base_model_name_or_path": target_name(heads),
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_blocks,
        **_common(heads),
    }
    tensors = {
        f"{head}.{block}.linear.{name}": value
        for head, block, parts in _blocks(heads)
        for name, value in parts.items()
    }
    if heads.lm_heads is None:
        fields["version"] = "2"
    else:
        tensors |= {f"{i}.{config.num_blocks}.weight": lm_head.weight for i, lm_head in enumerate(heads.lm_heads)}
    return Layout(fields, tensors, common_notes(heads), weight_file="medusa_lm_head.pt")


def _old_vllm(heads: MedusaHead) -> Layout:
    config = heads.config
    if heads.lm_heads is None:
        raise ExportError(
            "these heads share the target's `lm_head`, and vLLM's Medusa has one per head in the file; train heads "
            "with lm_head='own'."
        )
    fields = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_blocks,
        "truncated_vocab_size": config.vocab_size,
        "medusa_fc_bias": True,
        "original_lm_head": False,
        **_common(heads),
    }
    tensors = {
        f"blocks.{head}.layers.{block}.{name}": value
        for head, block, parts in _blocks(heads)
        for name, value in parts.items()
    }
    tensors |= {f"lm_heads.{i}.weight": lm_head.weight for i, lm_head in enumerate(heads.lm_heads)}
    notes = ["vLLM has dropped Medusa: 0.33 has neither the model nor the method; older releases draft one chain"]
    return Layout(fields, tensors, notes + common_notes(heads))
