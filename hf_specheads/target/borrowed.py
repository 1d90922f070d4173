"""What heads borrow from their target, never own: its token embedding and its `lm_head`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel


def as_embedding(
    embedding: torch.Tensor | Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """An embedding lookup from a weight [V, E] or from the target's own module.

    Modules are called, not read, so that offloaded, adapted or scaled embeddings behave as in the target.
    """
    if isinstance(embedding, torch.Tensor):
        return lambda ids: F.embedding(ids, embedding)
    return embedding


def as_lm_head(
    lm_head: torch.Tensor | Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A map from features [..., H] to logits [..., V] from a weight [V, H] or from the target's own module.

    Args:
        lm_head: Either of them.
        dtype: Of the target, what a quantised module without a weight of floating point is given.
    """
    if isinstance(lm_head, torch.Tensor):
        return lambda features: F.linear(features.to(lm_head.dtype), lm_head)
    weight = getattr(lm_head, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dtype.is_floating_point:
        dtype = weight.dtype
    return lm_head if dtype is None else lambda features: lm_head(features.to(dtype))


def _execution_device(lm_head: nn.Module, target: PreTrainedModel) -> torch.device:
    """Where the target's `lm_head` computes: an offloaded weight is `meta`, and accelerate's hook knows the device."""
    weight, hook = getattr(lm_head, "weight", None), getattr(lm_head, "_hf_hook", None)
    candidates = (getattr(weight, "device", None), getattr(hook, "execution_device", None), target.device)
    devices = [torch.device(device) for device in candidates if device is not None]
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


@dataclass(frozen=True)
class BorrowedModules:
    """The target's parts a head calls. Held outside the module tree, so they are never saved or trained."""

    embed_tokens: Callable[[torch.Tensor], torch.Tensor]
    lm_head: Callable[[torch.Tensor], torch.Tensor]
    device: torch.device

    @classmethod
    def of(cls, target: PreTrainedModel) -> BorrowedModules:
        embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
        return cls(embedding, as_lm_head(lm_head, target.dtype), _execution_device(lm_head, target))
