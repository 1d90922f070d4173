"""Inspection of transformers' caches."""

from __future__ import annotations

import torch


def states_of(cache) -> dict[str, torch.Tensor]:
    """Returns copies of all tensors that a cache holds, by name."""
    found = {}
    for index, layer in enumerate(cache.layers):
        for name, value in vars(layer).items():
            for key, tensor in value.items() if isinstance(value, dict) else [("", value)]:
                if isinstance(tensor, torch.Tensor) and not name.startswith("_"):
                    found[f"{index}.{name}.{key}"] = tensor.clone()
    return found
