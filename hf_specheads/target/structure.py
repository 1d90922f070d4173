"""Facts about a target that its config does not state and that are read from its modules."""

from __future__ import annotations

import inspect
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

_own_masks: WeakKeyDictionary[PreTrainedModel, str | None] = WeakKeyDictionary()


def forward_parameters(model: PreTrainedModel) -> frozenset[str]:
    """Returns the names of the parameters of a model's forward.

    If the forward was replaced by a wrapper that takes arbitrary keyword arguments, the parameters of the model's own
    forward are included.
    """
    parameters = inspect.signature(model.forward).parameters
    takes_anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_anything and "forward" in vars(model):
        return frozenset({*parameters, *inspect.signature(type(model).forward).parameters})
    return frozenset(parameters)


def own_mask(target: PreTrainedModel) -> str | None:
    """Returns the name of a buffer with which a module hides the oldest tokens itself, whatever mask it is given.

    Such a buffer holds truth values [..., C, C] and hides the first of C tokens from the last one, i.e. implements a
    local window. Buffers of plain causal attention do not count: they only hide later tokens, which no node of a draft
    tree looks at. The result is `None` if there is no such buffer.
    """
    if target not in _own_masks:
        _own_masks[target] = next((name for name, buffer in target.named_buffers() if _hides_the_oldest(buffer)), None)
    return _own_masks[target]


def _hides_the_oldest(buffer: torch.Tensor) -> bool:
    if buffer.dtype not in (torch.bool, torch.uint8) or buffer.dim() < 2 or buffer.device.type == "meta":
        return False
    rows, columns = buffer.shape[-2:]
    return rows == columns > 1 and not bool(buffer[..., -1, 0].any()) and bool(buffer[..., -1, -1].all())
