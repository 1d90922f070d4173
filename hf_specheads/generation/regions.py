"""Layers of a target that are alike are compiled once: the compiler meets the first, and calls its code for the rest.

A target is mostly the same layer many times, and a compiler that is shown all of them traces, lowers and schedules
each anew. `torch.compiler.nested_compile_region` lets it see one. What it is told to be alike it does not look at
again, so the answer is ours: two layers are alike if they consist of the same classes with the same settings,
and of tensors of the same kind. What a layer does with its own number beyond finding its slots in the cache, no such
comparison tells; whoever uses the outcome compares its first logits with those of the target itself.

The target, which others may be using, is not touched: a forward goes through copies that share its parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ..cache.slots import SlotCacheLayer, write_rows
from ..cache.target import TreeCache

NUMBER = "layer_idx"  # of a layer in the cache, as transformers' modules call it
COLLECTORS = "transformers.utils.output_capturing"  # hooks that know their layer's number
MOST_KINDS = 64  # of layers in one target
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, type)
_NOT_SETTINGS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", NUMBER)


class _OwnSlots:
    """What a layer alone sees of a [`TreeCache`]: its keys and values, and where to write.

    Args:
        keys, values: [B, heads, capacity, head_dim].
        slots: int64 [B, R].
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor):
        self.keys, self.values, self.slots = keys, values, slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`SlotCacheLayer.update`] in a cache that shows all its slots."""
        write_rows(self.keys, self.slots, key_states)
        write_rows(self.values, self.slots, value_states)
        return self.keys, self.values


def _run(
    kind: int, layer: nn.Module, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor,
    place: int | None, args: tuple, kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    own = _OwnSlots(keys, values, slots)
    if place is None:
        return layer.forward(*args, past_key_values=own, **kwargs)
    return layer.forward(*args[:place], own, *args[place:], **kwargs)


def _kind_of(kind: int, *others: Any) -> int:
    return kind


class _Region:
    """Mixed into the class of a layer that others are like."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kind, number, (layer,) = self.__dict__["region"]
        # Some families (GPT-2) hand the cache on by place.
        place = next((i for i, one in enumerate(args) if isinstance(one, TreeCache)), None)
        cache = kwargs.get("past_key_values") if place is None else args[place]
        if not isinstance(cache, TreeCache) or cache.slots is None or not cache.static:
            return layer.forward(*args, **kwargs)
        args = args if place is None else args[:place] + args[place + 1 :]
        kwargs.pop("past_key_values", None)
        own = cache.layers[number]
        return _region(kind, layer, own.keys, own.values, cache.slots, place, args, kwargs)


try:
    _region = torch.compiler.nested_compile_region(_run, max_reuse_entries=MOST_KINDS, reuse_hash_fn=_kind_of)
except (AttributeError, TypeError):  # torch before 2.13 looks at every layer all the same
    _region = None

_classes: WeakKeyDictionary[type, type] = WeakKeyDictionary()


def with_regions(target: PreTrainedModel, cache: TreeCache) -> PreTrainedModel | None:
    """The target for a compiled step: its own parameters, with layers that are alike marked as such.

    Args:
        target: The target.
        cache: That it will verify trees with.

    Returns:
        `None` where no layers are alike, or the installed torch cannot make use of it.
    """
    if _region is None or not cache.static:
        return None
    for path, layers in _layer_lists(target):
        numbers = [_number_of(layer) for layer in layers]
        held = [number is not None and number < len(cache.layers) and _holds(cache.layers[number])
                for number in numbers]  # fmt: skip
        kinds = [_signature(layer) if here else None for layer, here in zip(layers, held, strict=True)]
        common = [kind for kind in dict.fromkeys(kinds) if kind is not None and kinds.count(kind) > 1]
        if not common or len(common) > MOST_KINDS:
            continue
        marked = [
            layer if kind not in common else _marked(layer, common.index(kind), number)
            for layer, kind, number in zip(layers, kinds, numbers, strict=True)
        ]
        return _with_layers(target, path.split("."), marked)
    return None


def _holds(layer: Any) -> bool:
    return isinstance(layer, SlotCacheLayer) and layer.is_initialized


def _layer_lists(target: PreTrainedModel) -> Iterator[tuple[str, nn.ModuleList]]:
    for path, module in target.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and _number_of(module[0]) is not None:
            yield path, module


def _number_of(layer: nn.Module) -> int | None:
    """The one number of a layer in the cache; `None` without, or of several layers in one."""
    numbers = {vars(module)[NUMBER] for module in layer.modules() if NUMBER in vars(module)}
    return next(iter(numbers)) if len(numbers) == 1 else None


def _signature(layer: nn.Module) -> tuple | None:
    """What two layers must have in common to be alike, their number aside; `None` for one whose tensors are of a class
    of their own, as quantised ones are."""
    parts: list[Any] = []
    for name, module in layer.named_modules():
        settings = [
            (key, _value(value))
            for key, value in vars(module).items()
            # The layer's own hooks are called around a region, not in it; some are told the layer's number.
            if key not in _NOT_SETTINGS and not (module is layer and key.endswith(("_hooks", "_hooks_with_kwargs")))
        ]
        parts.append((name, type(module), tuple(sorted(settings, key=lambda setting: setting[0]))))
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None and type(tensor) not in (nn.Parameter, torch.Tensor):
                    return None
                parts.append((key, None if tensor is None else _tensor(tensor)))
    return tuple(parts)


def _tensor(tensor: torch.Tensor) -> tuple:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _value(value: Any) -> Any:
    """A setting by what it says; of objects, which they are."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(_value(each) for each in value)
    if isinstance(value, dict):  # hooks too, by the function: the same of all layers, or these are not alike
        return type(value), tuple((str(type(key)), _value(each)) for key, each in value.items())
    if getattr(value, "__module__", None) == COLLECTORS:  # idle: of what they collect, compiled rounds ask for none
        return COLLECTORS
    return id(value)


def _marked(layer: nn.Module, kind: int, number: int | None) -> nn.Module:
    known = type(layer)
    if known not in _classes:
        _classes[known] = type(known.__name__, (_Region, known), {"__module__": known.__module__})
    marked = copy.copy(layer)  # its hooks are the layer's own
    marked.__class__ = _classes[known]
    marked.__dict__["region"] = (kind, number, (layer,))
    return marked


def _with_layers(module: Any, path: list[str], layers: list[nn.Module]) -> Any:
    """A copy of a module with these layers at a path below it, as shallow as can be."""
    if not path:
        return nn.ModuleList(layers)
    changed = copy.copy(module)
    changed.__dict__["_modules"] = dict(module._modules)
    changed.__dict__["_modules"][path[0]] = _with_layers(module._modules[path[0]], path[1:], layers)
    return changed
