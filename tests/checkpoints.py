"""Checkpoints in the layouts their authors publish, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, MIDDLE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 37, 4, 2, 8, 99

LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 20000.0,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def eagle_tensors(
    num_layers: int = 1, *, fc_bias: bool = True, qkv_bias: bool = False, embedding: bool = True, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Tensors of EAGLE, HASS (one layer) or PosS (several)."""
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {"fc.weight": weight(HIDDEN, 2 * HIDDEN)}
    if fc_bias:
        tensors["fc.bias"] = weight(HIDDEN)
    if embedding:
        tensors["embed_tokens.weight"] = weight(VOCAB, HIDDEN)
    for index in range(num_layers):
        prefix = f"layers.{index}."
        rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        for name, size in rows.items():
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = weight(size, HIDDEN)
            if qkv_bias:
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = weight(size)
        tensors[f"{prefix}self_attn.o_proj.weight"] = weight(HIDDEN, HEADS * HEAD_DIM)
        tensors[f"{prefix}mlp.gate_proj.weight"] = weight(MIDDLE, HIDDEN)
        tensors[f"{prefix}mlp.up_proj.weight"] = weight(MIDDLE, HIDDEN)
        tensors[f"{prefix}mlp.down_proj.weight"] = weight(HIDDEN, MIDDLE)
        tensors[f"{prefix}post_attention_layernorm.weight"] = weight(HIDDEN).abs()
    return tensors


def write_checkpoint(
    folder: Path, tensors: dict[str, Any], config: dict[str, Any] | None = None, *, pickled: bool = False
) -> Path:
    """Writes config and weights; `pickled` as `pytorch_model.bin`, otherwise as safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG if config is None else config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
