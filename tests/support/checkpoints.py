"""Checkpoints with random weights, in the layouts that the authors publish."""

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
    """Makes tensors of EAGLE or HASS (one layer) or PosS (several layers)."""
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


TOKENS = torch.tensor([t for t in range(VOCAB) if t % 3])  # 66 of 99
EAGLE3_CONFIG: dict[str, Any] = LLAMA_CONFIG | {"draft_vocab_size": len(TOKENS)}
MODELOPT_CONFIG = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}


def eagle3_tensors(layer: str = "midlayer.", hidden: int = HIDDEN, embedding: bool = False) -> dict[str, torch.Tensor]:
    """Makes tensors of EAGLE-3 heads that draft [`TOKENS`], for a target of width HIDDEN."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    tensors = {f"{layer}self_attn.{name}_proj.weight": weight(size, 2 * hidden) for name, size in rows.items()}
    tensors |= {
        f"{layer}self_attn.o_proj.weight": weight(hidden, HEADS * HEAD_DIM),
        f"{layer}mlp.gate_proj.weight": weight(MIDDLE, hidden),
        f"{layer}mlp.up_proj.weight": weight(MIDDLE, hidden),
        f"{layer}mlp.down_proj.weight": weight(hidden, MIDDLE),
        f"{layer}hidden_norm.weight": weight(hidden).abs(),
        f"{layer}input_layernorm.weight": weight(hidden).abs(),
        f"{layer}post_attention_layernorm.weight": weight(hidden).abs(),
        "fc.weight": weight(hidden, 3 * HIDDEN),
        "norm.weight": weight(hidden).abs(),
        "lm_head.weight": weight(len(TOKENS), hidden),
        "d2t": TOKENS - torch.arange(len(TOKENS)),
        "t2d": torch.isin(torch.arange(VOCAB), TOKENS),
    }
    if embedding:
        tensors["embed_tokens.weight"] = weight(VOCAB, hidden)
    return tensors


def medusa_tensors(
    heads: int = 3, blocks: int = 1, *, tied: bool = True, projections: bool = True, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Makes the authors' state dict: `{i}.{j}.linear.*`, and `{i}.{n}.weight` with projections."""
    torch.manual_seed(seed)
    tensors = {}
    for head in range(heads):
        for index in range(blocks):
            again = tied and index > 0
            weight = tensors[f"{head}.0.linear.weight"].clone() if again else torch.randn(HIDDEN, HIDDEN) * 0.3
            bias = tensors[f"{head}.0.linear.bias"].clone() if again else torch.randn(HIDDEN)
            tensors |= {f"{head}.{index}.linear.weight": weight, f"{head}.{index}.linear.bias": bias}
        if projections:
            tensors[f"{head}.{blocks}.weight"] = torch.randn(VOCAB, HIDDEN)
    return tensors


HYDRA_PREFIX = "prefix_embeding_layer."
HYDRA_ROPE_TABLE = f"{HYDRA_PREFIX}layers.0.self_attn.rotary_emb.inv_freq"


def hydra_tensors(
    *, prefixed: bool = False, grounded: bool = True, num_heads: int = 3, num_blocks: int = 3, tied: bool = True,
    base: float = 10000.0,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Makes tensors as the authors save them: tied blocks are listed once per use, and dropout takes every other
    index."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    tensors = {"input_embed_fn.weight": weight(VOCAB, HIDDEN)}
    step, first, projection = (2, 1, ".1") if prefixed else (1, 0, "")
    for head in range(num_heads):
        copies = None
        for block in range(num_blocks):
            key = f"hydra_mlp.{head}.{first + step * block}"
            if grounded and block == 0:
                width = (head + 2) * HIDDEN
                for name in ("linear", "res_connection"):
                    tensors |= {f"{key}.{name}.weight": weight(HIDDEN, width), f"{key}.{name}.bias": weight(HIDDEN)}
                continue
            if copies is None or not tied:
                copies = weight(HIDDEN, HIDDEN), weight(HIDDEN)
            tensors |= {f"{key}.linear.weight": copies[0].clone(), f"{key}.linear.bias": copies[1].clone()}
        tensors[f"hydra_lm_head.{head}{projection}.weight"] = weight(VOCAB, HIDDEN)
        tensors[f"hydra_lm_head.{head}{projection}.bias"] = weight(VOCAB)
    if prefixed:
        layer, rows = (
            f"{HYDRA_PREFIX}layers.0.",
            {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM},
        )
        tensors |= {f"{layer}self_attn.{name}_proj.weight": weight(size, HIDDEN) for name, size in rows.items()}
        tensors[f"{layer}self_attn.o_proj.weight"] = weight(HIDDEN, HEADS * HEAD_DIM)
        tensors |= {f"{layer}mlp.{name}_proj.weight": weight(MIDDLE, HIDDEN) for name in ("gate", "up")}
        tensors[f"{layer}mlp.down_proj.weight"] = weight(HIDDEN, MIDDLE)
        tensors |= {
            f"{layer}{name}.weight": weight(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")
        }
        tensors |= {
            f"{HYDRA_PREFIX}norm.weight": weight(HIDDEN),
            f"{HYDRA_PREFIX}embed_tokens.weight": weight(VOCAB, HIDDEN),
        }
        tensors[HYDRA_ROPE_TABLE] = base ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return tensors


def write_checkpoint(
    folder: Path, tensors: dict[str, Any], config: dict[str, Any] | None = None, *, pickled: bool = False
) -> Path:
    """Writes config and weights, as `pytorch_model.bin` if `pickled` and as safetensors otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG if config is None else config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
