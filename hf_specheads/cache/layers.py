"""transformers' cache layers: which of them rounds can work with, and how one goes back to what it held."""

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
# Layers that can be rolled back by the rows of a rejected chain; of linear attention, those with convolutions only.
CHAIN_CACHE_LAYERS = (*GROWING_LAYERS, LinearAttentionLayer, DynamicIndexedLayer)
# Layers whose state can be kept and restored as a whole.
RECURRENT_CACHE_LAYERS = (
    *CHAIN_CACHE_LAYERS,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    Fp8QuantizedLayer,
)
# Of a modeling file of transformers; their states are replaced and never written into.
COMPRESSING_LAYERS = {"DeepseekV4HCACache", "DeepseekV4CSACache"}
# Layers that only append rows, and in which dimension; others have states that must be kept to go back to them.
APPENDING_LAYERS = (DynamicLayer, DynamicIndexedLayer)
APPENDED = {"keys": -2, "values": -2, "indexer_keys": 1, "indexer_position_ids": -1}


def tree_cache_problem(cache: Cache) -> str | None:
    """Why a target cache cannot hold a draft tree, or `None` if it can.

    An allow-list: rows of a layer class that does not keep every slot could not be taken over without an error.
    """
    return _offloading_problem(cache) or _layer_problem(cache, TREE_CACHE_LAYERS)


def chain_cache_problem(cache: Cache) -> str | None:
    """Why rejected tokens of a chain cannot be taken out of a target cache again, or `None` if they can."""
    return _offloading_problem(cache) or _layer_problem(cache, CHAIN_CACHE_LAYERS)


def recurrent_cache_problem(cache: Cache) -> str | None:
    """Why the states of a target cache cannot be kept and restored, or `None` if they can."""
    return _offloading_problem(cache) or _layer_problem(cache, RECURRENT_CACHE_LAYERS, COMPRESSING_LAYERS)


def is_restored(cache: Cache) -> bool:
    """Whether no row can be taken out of a cache, which can go back to what it held before all the same: layers of
    8-bit floats quantise every row alike, whatever forward it came in. (Fewer bits are quantised in groups of rows.)
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
    """Whether a layer has buffers of a fixed size, written in place."""
    return isinstance(layer, STATIC_LAYERS)


def rows_of(layer: CacheLayerMixin, name: str, tokens: int) -> torch.Tensor:
    """What a layer holds of so many tokens, [B, heads, rows, width]; of a sliding layer the newest.

    Args:
        layer: One that trees are verified with.
        name: `keys` or `values`.
        tokens: That it has seen.
    """
    rows: torch.Tensor = getattr(layer, name)
    return rows[:, :, :tokens] if is_static(layer) else rows


def hold_rows(layer: StaticLayer, name: str, rows: torch.Tensor, tokens: int) -> None:
    """Writes so many tokens, the first rows [B, heads, >= tokens, width], into a static layer that held fewer."""
    newest = min(tokens, layer.max_cache_len)
    getattr(layer, name)[:, :, :newest] = rows[:, :, tokens - newest : tokens]
    if newest == tokens:  # past its window a sliding layer looks at the number of the host only
        layer.cumulative_length.fill_(tokens)
    if isinstance(layer, StaticSlidingWindowLayer):
        layer.cumulative_length_int = tokens


def contents_of(layer: CacheLayerMixin) -> dict[str, Any]:
    """What a cache layer needs to forget a forward: its length where rows are only appended, else its attributes, as
    they are now (tensors are never written in place while the past is recorded)."""
    if type(layer) in APPENDING_LAYERS:
        return {"length": layer.get_seq_length()}
    return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}


def contents_with_states(layer: CacheLayerMixin) -> dict[str, Any]:
    """The same where the past is not recorded: linear attention writes into its states, which are copied then."""
    contents = contents_of(layer)
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return contents
    for name in ("conv_states", "recurrent_states"):
        contents[name] = {index: None if s is None else s.clone() for index, s in contents[name].items()}
    if isinstance(layer, LinearAttentionAndFullAttentionLayer):  # its attention appends rows
        contents = {name: value for name, value in contents.items() if name not in APPENDED}
        contents["length"] = layer.get_seq_length()
    return contents


def whole_contents(layer: CacheLayerMixin) -> dict[str, Any]:
    """What goes back to now after sequences have been left out, too: everything a layer has, its states copied."""
    contents = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for name in ("conv_states", "recurrent_states"):
            contents[name] = {index: None if s is None else s.clone() for index, s in contents[name].items()}
    return contents


def restore(layer: CacheLayerMixin, contents: dict[str, Any]) -> None:
    """Goes back to what [`contents_of`] or [`contents_with_states`] has kept."""
    vars(layer).update({name: value for name, value in contents.items() if name != "length"})
    if "length" not in contents:
        return
    for name, rows in APPENDED.items():
        if isinstance(states := getattr(layer, name, None), torch.Tensor) and states.dim() > 1:
            setattr(layer, name, states.narrow(rows, 0, min(contents["length"], states.shape[rows])))


def own_rows(layer: CacheLayerMixin) -> None:
    """Copies tensors that share their memory with rows that were dropped."""
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
    """The target's stock forward over tokens after those in its cache.

    Args:
        target: The target.
        name: Under which name its forward takes the cache.
        cache: transformers' cache.
        padding_mask: int or bool [B, T], 0 on padding among the tokens in the cache; `None` without padding.
        first_positions: [B, 1] or [3, B, 1], position of the first token; `None` for targets that take none.
        token_ids: int64 [B, Q].
        asked: Further arguments of the forward.
    """
    inputs: dict[str, Any] = {name: cache, "use_cache": True, "return_dict": True}
    rows = token_ids.shape[1]
    if padding_mask is not None:
        inputs["attention_mask"] = torch.nn.functional.pad(padding_mask, (0, rows), value=1)
    if first_positions is not None:
        inputs["position_ids"] = first_positions + torch.arange(rows, device=first_positions.device)
    return target(token_ids, **inputs, **asked)
