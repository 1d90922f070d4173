"""Draft heads for tiny targets with all weights random, norms and biases included, so that no mix-up is equal."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specheads import AutoDraftHead, DraftHead
from support.targets import own_target, shared_target

SCALED_ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 30000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 20000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def deep_target(*, own: bool = False) -> PreTrainedModel:
    """A Llama of eight layers, so that EAGLE-3's usual levels exist; a private copy with `own`."""
    return (own_target if own else shared_target)("llama", num_hidden_layers=8)


def random_heads(
    method: str,
    target: PreTrainedModel | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> DraftHead:
    """Heads of a method, not bound to their target."""
    heads = AutoDraftHead.from_target(target or deep_target(), method, dtype=torch.float32, **options).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name and parameter.dim() == 1 else 0.2 * noise)
    return heads.to(dtype)
