"""Compiles layers of a target that are alike once: the compiler sees the first one and reuses its code for the rest.

A target is mostly the same layer many times, and a compiler that is shown all of them traces, lowers and schedules
each one anew. `torch.compiler.nested_compile_region` lets it see one. The compiler does not check what it is told to
be alike, so that is decided here: two layers are alike if they consist of the same classes with the same settings, and
of tensors of the same kind. This comparison cannot tell whether a layer uses its own number for more than finding its
slots in the cache. So the caller must compare the first logits of the result with those of the target itself.

The target may be in use elsewhere and is not changed: a forward goes through copies that share its parameters.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...cache.draft import DraftCache, Links
from ...cache.names import CACHE_NAME
from ...cache.rooms import stays
from ...cache.slots import OwnSlots, SlotCacheLayer
from ...cache.target import TreeCache
from ...contract import DraftingContract
from ...tree.shape import TreeShape
from ..drafting.grow import top_children

NUMBER = "layer_idx"  # attribute of transformers' modules with the number of a layer in the cache
COLLECTORS = "transformers.utils.output_capturing"  # module of the hooks that know their layer's number
MOST_KINDS = 64  # most kinds of layers in one target
_DICTS = (dict, OrderedDict)
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, type)
_NOT_SETTINGS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", NUMBER)


def _flat(args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """Flattens arguments into one list of tensors and plain values, which the compiler compares fastest: the number of
    positional arguments, these arguments, and for each keyword argument its name, the length of its tuple (-1 if it is
    no tuple) and its values."""
    flat = [len(args), *args]
    for name, value in kwargs.items():
        flat += [name, len(value), *value] if isinstance(value, tuple) else [name, -1, value]
    return flat


def _unflat(flat: tuple) -> tuple[list[Any], dict[str, Any]]:
    args, rest, kwargs = list(flat[1 : 1 + flat[0]]), list(flat[1 + flat[0] :]), {}
    while rest:
        name, size, *values = rest
        kwargs[name] = values[0] if size < 0 else tuple(values[:size])
        rest = values[abs(size) :]
    return args, kwargs


def _run(
    kind: int, layer: nn.Module, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor,
    place: int | None, *flat: Any,
) -> Any:  # fmt: skip
    args, kwargs = _unflat(flat)
    own = OwnSlots(keys, values, slots)
    if place is None:
        return layer.forward(*args, **{CACHE_NAME: own}, **kwargs)
    return layer.forward(*args[:place], own, *args[place:], **kwargs)


def _kind_of(kind: int, *others: Any) -> int:
    return kind


class _Region:
    """Mixed into the class of layers that are alike; sends their forward through the shared region."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kind, number, (layer,) = self.__dict__["region"]
        # Some families (GPT-2) pass the cache as a positional argument.
        place = next((i for i, one in enumerate(args) if isinstance(one, TreeCache)), None)
        cache = kwargs.get(CACHE_NAME) if place is None else args[place]
        if not isinstance(cache, TreeCache) or cache.slots is None or not cache.static:
            return layer.forward(*args, **kwargs)
        args = args if place is None else args[:place] + args[place + 1 :]
        kwargs.pop(CACHE_NAME, None)
        own = cache.layers[number]
        return _region(kind, layer, own.keys, own.values, cache.slots, place, *_flat(args, kwargs))


def _link(kind: int, head: Any, layer: nn.Module, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return head.link(layer, *tensors)


def _best(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return top_children(*args)


def _same(*args: Any) -> int:
    return 0


try:
    _region = torch.compiler.nested_compile_region(_run, max_reuse_entries=MOST_KINDS, reuse_hash_fn=_kind_of)
    _link_region = torch.compiler.nested_compile_region(_link, max_reuse_entries=MOST_KINDS, reuse_hash_fn=_kind_of)
    _best_region = torch.compiler.nested_compile_region(_best, reuse_hash_fn=_same)
except (AttributeError, TypeError):  # torch before 2.13 traces every layer even so
    _region = _link_region = _best_region = None

_classes: WeakKeyDictionary[type, type] = WeakKeyDictionary()


def with_regions(target: PreTrainedModel, cache: TreeCache) -> PreTrainedModel | None:
    """Makes a copy of the target for a compiled step: it shares the parameters, and layers that are alike are marked.

    Args:
        target: The target.
        cache: Cache that the target will verify trees with.

    Returns:
        The copy; `None` if no layers are alike or the installed torch has no use for it.
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


def links_of(head: DraftingContract, cache: DraftCache, shape: TreeShape | None) -> Links | None:
    """How a compiled step drafts the links of a chain. `None` for other trees, for draft heads without `link_layers`,
    and for draft caches whose layers do not hold slots yet.

    Args:
        head: Draft head.
        cache: Draft cache of this generation.
        shape: Shape of the tree, `None` if it is not known beforehand.
    """
    layers = head.link_layers
    if layers is None or shape is None or not all(level.link for level in shape.levels):
        return None
    if not all(map(_holds, cache.layers)):
        return None
    signatures = [_signature(layer) for layer in layers]
    known = list(dict.fromkeys(signatures))
    run = None if None in known or len(known) > MOST_KINDS else _link_region
    kinds, offsets = tuple(map(known.index, signatures)), _numbers(len(shape.levels), head.device)
    return Links(offsets, kinds, run, _best_region or top_children, head.dtype)


def links_apart(head: DraftingContract, depth: int, run: Callable[..., Any]) -> Links:
    """How links are drafted that are compiled one by one, so that the compiler itself checks whether they are alike.

    Args:
        head: Draft head that has `link_layers`.
        depth: Number of links.
        run: As in [`Links`], with the number of the specialist instead of the kind.
    """
    specialists = tuple(range(len(cast(Sequence[nn.Module], head.link_layers))))
    return Links(_numbers(depth, head.device), specialists, run, top_children, head.dtype, catch_up=True)


@lru_cache(maxsize=32)
def _numbers(count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The numbers from 0 to `count` - 1 as tensors, int64 [1] each."""
    return tuple(stays(torch.tensor([number], device=device)) for number in range(count))


def _holds(layer: Any) -> bool:
    return isinstance(layer, SlotCacheLayer) and layer.is_initialized


def _layer_lists(target: PreTrainedModel) -> Iterator[tuple[str, nn.ModuleList]]:
    for path, module in target.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and _number_of(module[0]) is not None:
            yield path, module


def _number_of(layer: nn.Module) -> int | None:
    """Number of a layer in the cache; `None` if the layer has no number or several ones."""
    numbers = {vars(module)[NUMBER] for module in layer.modules() if NUMBER in vars(module)}
    return next(iter(numbers)) if len(numbers) == 1 else None


def _signature(layer: nn.Module) -> tuple | None:
    """What two layers must have in common to be alike, apart from their number. `None` for a layer whose tensors are
    of another class than torch's own, as quantised ones are."""
    parts: list[Any] = []
    for name, module in layer.named_modules():
        settings = [
            (key, _value(value))
            for key, value in vars(module).items()
            if not (type(value) in _DICTS and not value)  # empty dicts of hooks
            # The layer's own hooks are called around the region, not in it; some of them know the layer's number.
            and key not in _NOT_SETTINGS
            and not (module is layer and key.endswith(("_hooks", "_hooks_with_kwargs")))
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
    """A comparable form of a setting: plain values by value, other objects by identity."""
    if isinstance(value, PreTrainedConfig):  # first, because other type checks of a config are slow
        return id(value)
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(_value(each) for each in value)
    if isinstance(value, dict):  # includes hooks: layers are alike only if they have the same hook functions
        return type(value), tuple((str(type(key)), _value(each)) for key, each in value.items())
    if getattr(value, "__module__", None) == COLLECTORS:  # idle, as compiled rounds ask for nothing they collect
        return COLLECTORS
    return id(value)


def _marked(layer: nn.Module, kind: int, number: int | None) -> nn.Module:
    known = type(layer)
    if known not in _classes:
        _classes[known] = type(known.__name__, (_Region, known), {"__module__": known.__module__})
    marked = copy.copy(layer)  # shallow: the hooks are shared with the layer
    marked.__class__ = _classes[known]
    marked.__dict__["region"] = (kind, number, (layer,))
    return marked


class _Layers(nn.ModuleList):
    """A list of layers whose full slice is the list itself. Models loop over such a slice in every forward, and the
    compiler would trace how the new list is made."""

    def __getitem__(self, idx: Any) -> Any:
        whole = isinstance(idx, slice) and idx.start is None and idx.step is None and idx.stop == len(self)
        return self if whole else super().__getitem__(idx)


def _with_layers(module: Any, path: list[str], layers: list[nn.Module]) -> Any:
    """A copy of a module with these layers at a path below it, as shallow as possible."""
    if not path:
        return _Layers(layers)
    changed = copy.copy(module)
    changed.__dict__["_modules"] = dict(module._modules)
    changed.__dict__["_modules"][path[0]] = _with_layers(module._modules[path[0]], path[1:], layers)
    return changed
