"""What modules of a target do besides what its config says."""

from __future__ import annotations

import inspect
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

_own_masks: WeakKeyDictionary[PreTrainedModel, str | None] = WeakKeyDictionary()


def forward_parameters(model: PreTrainedModel) -> frozenset[str]:
    """Names of what a model's forward takes; where another function was put before it that takes anything, of what
    the model's own does."""
    parameters = inspect.signature(model.forward).parameters
    takes_anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_anything and "forward" in vars(model):
        return frozenset({*parameters, *inspect.signature(type(model).forward).parameters})
    return frozenset(parameters)


def own_mask(target: PreTrainedModel) -> str | None:
    """Name of a buffer by which a module hides the oldest tokens itself, whatever mask it is given; `None` without.

    A buffer of truth values [..., C, C] that keeps the last of C tokens from the first: a local window. Those of
    merely causal attention hide what comes later, which no node of a draft tree looks at.
    """
    if target not in _own_masks:
        _own_masks[target] = next((name for name, buffer in target.named_buffers() if _hides_the_oldest(buffer)), None)
    return _own_masks[target]


def _hides_the_oldest(buffer: torch.Tensor) -> bool:
    if buffer.dtype not in (torch.bool, torch.uint8) or buffer.dim() < 2 or buffer.device.type == "meta":
        return False
    rows, columns = buffer.shape[-2:]
    return rows == columns > 1 and not bool(buffer[..., -1, 0].any()) and bool(buffer[..., -1, -1].all())
