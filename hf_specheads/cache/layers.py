"""transformers' cache layers: which classes rounds can work with, and how their contents are saved and restored."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    Fp8QuantizedLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.utils import ModelOutput

STATIC_LAYERS = (StaticLayer, StaticSlidingWindowLayer)
GROWING_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
TREE_CACHE_LAYERS = (*GROWING_LAYERS, *STATIC_LAYERS)
# Layers from which the rows of a rejected chain can be removed. `LinearAttentionLayer` can only do so when it holds
# nothing but convolution states.
CHAIN_CACHE_LAYERS = (*GROWING_LAYERS, LinearAttentionLayer, DynamicIndexedLayer)
# Layers whose state can be saved and restored as a whole.
RECURRENT_CACHE_LAYERS = (
    *CHAIN_CACHE_LAYERS,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    Fp8QuantizedLayer,
)
# Named, not imported, because they are defined in a modeling file. Their states are replaced, never written in place.
COMPRESSING_LAYERS = {"DeepseekV4HCACache", "DeepseekV4CSACache"}
# Layers that only append rows, and the dimension in which each tensor grows. All other layers have states, which must
# be saved before a forward so that they can be restored.
APPENDING_LAYERS = (DynamicLayer, DynamicIndexedLayer)
APPENDED = {"keys": -2, "values": -2, "indexer_keys": 1, "indexer_position_ids": -1}


def tree_cache_problem(cache: Cache) -> str | None:
    """Says why a target cache cannot hold a draft tree; `None` if it can.

    Only listed layer classes are accepted: rows of a class that does not keep every slot would be taken over wrongly.
    """
    return _offloading_problem(cache) or _layer_problem(cache, TREE_CACHE_LAYERS)


def chain_cache_problem(cache: Cache) -> str | None:
    """Says why rejected tokens of a chain cannot be removed from a target cache; `None` if they can."""
    return _offloading_problem(cache) or _layer_problem(cache, CHAIN_CACHE_LAYERS)


def recurrent_cache_problem(cache: Cache) -> str | None:
    """Says why the states of a target cache cannot be saved and restored; `None` if they can."""
    return _offloading_problem(cache) or _layer_problem(cache, RECURRENT_CACHE_LAYERS, COMPRESSING_LAYERS)


def is_restored(cache: Cache) -> bool:
    """Whether no row can be removed from a cache, but its earlier contents can be restored.

    This holds for layers of 8-bit floats, which quantise every row in the same way, whichever forward it came from.
    (Quantisation to fewer bits works on groups of rows.)
    """
    return any(type(layer) is Fp8QuantizedLayer for layer in cache.layers)


def _offloading_problem(cache: Cache) -> str | None:
    offloads = getattr(cache, "offloading", False)
    return "its cache keeps layers on the CPU (`cache_implementation='offloaded'`)" if offloads else None


def _layer_problem(cache: Cache, known: tuple[type, ...], by_name: set[str] | frozenset = frozenset()) -> str | None:
    made_later = getattr(cache, "layer_class_to_replicate", None)
    for kind in (*map(type, cache.layers), *([made_later] if made_later is not None else [])):
        named = kind.__name__ in by_name and kind.__module__.startswith("transformers.")
        if kind not in known and not named:
            return f"its cache has layers of class {kind.__name__}"
    return None


def is_static(layer: CacheLayerMixin) -> bool:
    """Whether a layer has buffers of a fixed size that are written in place."""
    return isinstance(layer, STATIC_LAYERS)


def rows_of(layer: CacheLayerMixin, name: str, tokens: int) -> torch.Tensor:
    """Returns the rows that a layer holds, [B, heads, rows, width]; a sliding layer holds only the newest ones.

    Args:
        layer: A layer of one of the classes in `TREE_CACHE_LAYERS`.
        name: `keys` or `values`.
        tokens: Number of tokens the layer has seen.
    """
    rows: torch.Tensor = getattr(layer, name)
    return rows[:, :, :tokens] if is_static(layer) else rows


def hold_rows(layer: StaticLayer, name: str, rows: torch.Tensor, tokens: int) -> None:
    """Writes the first `tokens` of the rows [B, heads, >= tokens, width] into a static layer that held fewer.

    A layer with fewer slots than that gets the newest of these rows.
    """
    newest = min(tokens, layer.max_cache_len)
    getattr(layer, name)[:, :, :newest] = rows[:, :, tokens - newest : tokens]
    if newest == tokens:  # once its window is full, a sliding layer only reads the count on the host
        layer.cumulative_length.fill_(tokens)
    if isinstance(layer, StaticSlidingWindowLayer):
        layer.cumulative_length_int = tokens


def contents_of(layer: CacheLayerMixin) -> dict[str, Any]:
    """Returns what is needed to undo a forward in a cache layer ([`restore`]).

    That is the length of a layer that only appends rows, and all current attributes of any other layer. The tensors
    are not copied, because they are never written in place while the cache records the past.
    """
    if type(layer) in APPENDING_LAYERS:
        return {"length": layer.get_seq_length()}
    return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}


def contents_with_states(layer: CacheLayerMixin) -> dict[str, Any]:
    """Like [`contents_of`], for a cache that does not record the past.

    The states of linear attention are copied, because the forward writes into them in place.
    """
    contents = contents_of(layer)
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return contents
    for name in ("conv_states", "recurrent_states"):
        contents[name] = {index: None if s is None else s.clone() for index, s in contents[name].items()}
    if isinstance(layer, LinearAttentionAndFullAttentionLayer):  # its full attention only appends rows
        contents = {name: value for name, value in contents.items() if name not in APPENDED}
        contents["length"] = layer.get_seq_length()
    return contents


def whole_contents(layer: CacheLayerMixin) -> dict[str, Any]:
    """Returns everything a layer holds, with copied states, to restore it even after sequences have left the batch."""
    contents = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for name in ("conv_states", "recurrent_states"):
            contents[name] = {index: None if s is None else s.clone() for index, s in contents[name].items()}
    return contents


def restore(layer: CacheLayerMixin, contents: dict[str, Any]) -> None:
    """Restores what [`contents_of`], [`contents_with_states`] or [`whole_contents`] saved."""
    vars(layer).update({name: value for name, value in contents.items() if name != "length"})
    if "length" not in contents:
        return
    for name, rows in APPENDED.items():
        if isinstance(states := getattr(layer, name, None), torch.Tensor) and states.dim() > 1:
            setattr(layer, name, states.narrow(rows, 0, min(contents["length"], states.shape[rows])))


def own_rows(layer: CacheLayerMixin) -> None:
    """Copies tensors that are views of larger ones, so that the memory of dropped rows is freed."""
    for states in (vars(layer), *(value for value in vars(layer).values() if isinstance(value, dict))):
        for name, value in states.items():
            if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > value.nbytes:
                states[name] = value.clone()


def read_on(
    target: PreTrainedModel,
    name: str,
    cache: Cache,
    padding_mask: torch.Tensor | None,
    first_positions: torch.Tensor | None,
    token_ids: torch.Tensor,
    **asked: Any,
) -> ModelOutput:
    """Runs the target's stock forward over tokens that follow those in its cache.

    Args:
        target: The target.
        name: Name of the argument through which the target's forward takes the cache.
        cache: transformers' cache.
        padding_mask: int or bool [B, T], 0 on padding among the tokens in the cache; `None` without padding.
        first_positions: [B, 1] or [3, B, 1], position of the first token; `None` for targets that take no positions.
        token_ids: int64 [B, Q], the tokens to read.
        asked: Further arguments of the forward.
    """
    inputs: dict[str, Any] = {name: cache, "use_cache": True, "return_dict": True}
    rows = token_ids.shape[1]
    if padding_mask is not None:
        inputs["attention_mask"] = torch.nn.functional.pad(padding_mask, (0, rows), value=1)
    if first_positions is not None:
        inputs["position_ids"] = first_positions + torch.arange(rows, device=first_positions.device)
    return target(token_ids, **inputs, **asked)
