"""Reads the prompts of a call with as few rows as possible.

A prompt of several sequences (`num_return_sequences`) is read once, and its cache is copied. Prompts of different
lengths are read in groups of similar length, because the padding of a short prompt beside a long one costs as much as
tokens do.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import ModelOutput

from ..cache.names import cache_name
from ..target.features import FeatureReader
from ..target.recurrence import counts_padding
from .committed import NewRows

# Tensors [B, T] of a call, whose rows are equal for all sequences of a prompt.
ROWS = ("attention_mask", "position_ids")
SETTING = (bool, int, float, str, NoneType)  # types of keyword arguments that are no inputs; images may be lists
FORWARD = 128  # what a forward costs besides its tokens, in tokens: the time of reading all weights


def copies_of_prompts(config: GenerationConfig, model_kwargs: dict[str, Any]) -> int:
    """Number of sequences per prompt if the prefill can read each prompt once, otherwise 1.

    Every sequence is read by itself if there are inputs besides tokens, a mask and positions (images, embeddings), or
    if the cache does not grow or is not empty.
    """
    cache, copies = model_kwargs[cache_name(model_kwargs)], config.num_return_sequences or 1
    if copies == 1 or not _grows_from_tokens(cache, model_kwargs):
        return 1
    copied = (DynamicLayer, DynamicSlidingWindowLayer)
    return copies if all(type(layer) in copied for layer in cache.layers) else 1


def groups_of_prompts(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    copies: int,
) -> list[list[int]]:
    """Divides the prompts of a call into groups that the prefill reads one after the other, without common padding.

    All prompts are in one group if the padding is worth no forward of its own, if the target might read the padding,
    or if the target does not compute in float32. In half precision, a forward of another shape rounds differently, and
    texts would leave those of plain generation at more ties.

    Args:
        target: The target.
        input_ids: int64 [B, T], the prompts of all sequences.
        config, model_kwargs: As `generate` prepared them.
        copies: Number of sequences per prompt, as from [`copies_of_prompts`].

    Returns:
        Numbers of prompts, per group.
    """
    together = [list(range(len(input_ids) // copies))]
    if len(together[0]) == 1 or target.dtype != torch.float32 or counts_padding(target) or config.prefill_chunk_size:
        return together
    cache = model_kwargs[cache_name(model_kwargs)]
    if any(model_kwargs.get(name) is None for name in ROWS) or not _grows_from_tokens(cache, model_kwargs):
        return together
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        return together
    padding = _padding_of(model_kwargs["attention_mask"][::copies])
    return cheapest_groups([input_ids.shape[1] - before for before in padding], FORWARD)


def cheapest_groups(lengths: Sequence[int], forward: int) -> list[list[int]]:
    """Divides rows into groups. A group costs the rows that it has when all are as long as its longest, and `forward`.

    Args:
        lengths: Number of tokens, per row.
        forward: What a forward costs besides, in tokens.

    Returns:
        Numbers of rows, per group, with the least total cost.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    best = [(0, 0)]  # for the n shortest rows: their least cost, and where the last of their groups begins
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        best.append(min((best[start][0] + (end - start) * longest + forward, start) for start in range(end)))
    groups, end = [], len(order)
    while end > 0:
        start = best[end][1]
        groups.append(sorted(order[start:end]))
        end = start
    return groups


def _padding_of(mask: torch.Tensor) -> list[int]:
    """Number of padding tokens before the first token, per row of a mask [B, T]; 0 for a row of padding only."""
    return mask.ne(0).int().argmax(dim=1).tolist()


def _grows_from_tokens(cache: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether a call begins with an empty cache that grows, and has no inputs besides tokens, a mask and positions."""
    if type(cache) is not DynamicCache or cache.get_seq_length() > 0:
        return False
    given = {
        name: value for name, value in model_kwargs.items() if value is not cache and not isinstance(value, SETTING)
    }
    return set(given) <= set(ROWS) and all(value.dim() == 2 for value in given.values())


def read_prompts(
    reader: FeatureReader,
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    copies: int,
    groups: list[list[int]],
) -> tuple[ModelOutput, torch.Tensor | None]:
    """Runs [`FeatureReader.prefill`] for the first of every `copies` sequences, group by group, and copies the results
    for all. Of the outputs, only the logits of the last token are for all sequences."""
    if copies == 1 and len(groups) == 1:
        return reader.prefill(target, input_ids, config, model_kwargs)
    rows = {name: model_kwargs[name][::copies] for name in ROWS if model_kwargs.get(name) is not None}
    read = reader.prefill if len(groups) == 1 else partial(_read_groups, reader, groups)
    outputs, features = read(target, input_ids[::copies], config, model_kwargs | rows)
    if copies == 1:
        return outputs, features
    model_kwargs[cache_name(model_kwargs)].batch_repeat_interleave(copies)
    outputs.logits = outputs.logits.repeat_interleave(copies, dim=0)
    return outputs, None if features is None else features.repeat_interleave(copies, dim=0)


def _read_groups(
    reader: FeatureReader,
    groups: list[list[int]],
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> tuple[ModelOutput, torch.Tensor | None]:
    """Reads groups of prompts into caches of their own, and puts them into the call's cache."""
    name, tokens = cache_name(model_kwargs), input_ids.shape[1]
    cache, padding = model_kwargs[name], _padding_of(model_kwargs["attention_mask"])
    parts, logits, features = [], [], []
    for group in groups:
        first = min(padding[row] for row in group)
        own = {kind: model_kwargs[kind][group, first:] for kind in ROWS}
        part = model_kwargs | own | {name: copy.deepcopy(cache)}
        outputs, states = reader.prefill(target, input_ids[group, first:], config, part)
        if reader.positions_dropped:  # the target counts positions from the begin of its rows, padding included
            return reader.prefill(target, input_ids, config, model_kwargs)
        parts.append(part[name])
        logits.append(outputs.logits[:, -1:])
        features += [] if states is None else [states]
    for index in range(len(parts[0].layers)):
        layers = [part.layers[index] for part in parts]
        if layers[0].is_initialized:
            keys, values = ([getattr(layer, states) for layer in layers] for states in ("keys", "values"))
            cache.update(_all_rows(keys, groups, tokens), _all_rows(values, groups, tokens), index)
            for layer in layers:
                layer.keys = layer.values = None  # so that only one layer at a time is in memory twice
    outputs.logits = _all_rows(logits, groups, 1)
    return outputs, _all_rows(features, groups, tokens) if features else None


def _all_rows(parts: list[torch.Tensor], groups: list[list[int]], tokens: int) -> torch.Tensor:
    """Joins groups of rows [b, ..., T, X] into rows [B, ..., tokens, X], with zeros for padding."""
    batch, shape = sum(map(len, groups)), parts[0].shape
    rows = parts[0].new_zeros(batch, *shape[1:-2], tokens, shape[-1])
    for group, part in zip(groups, parts, strict=True):
        rows[group, ..., tokens - part.shape[-2] :, :] = part
    return rows


@dataclass
class SharedPrompts:
    """Prompts that the draft head takes in once for several sequences, when it drafts for the first time.

    Attributes:
        rows: Rows of a prompt that its sequences share. The last row is not shared, because it goes with the root,
            which every sequence chose for itself.
        prompts: Number of the prompt, per sequence.
    """

    rows: int
    prompts: list[int]

    @classmethod
    def of(cls, rows: NewRows, copies: int) -> SharedPrompts | None:
        """The shared prompts of a prefill's rows; `None` if nothing is shared."""
        batch, shared = rows.token_ids.shape[0], rows.token_ids.shape[1] - 2
        return None if copies == 1 or shared < 1 else cls(shared, [sequence // copies for sequence in range(batch)])

    def readers(self) -> list[int]:
        """The first sequence of every prompt."""
        return [self.prompts.index(prompt) for prompt in dict.fromkeys(self.prompts)]

    def places(self) -> list[int]:
        """The place of its prompt among [`readers`], per sequence."""
        order = list(dict.fromkeys(self.prompts))
        return [order.index(prompt) for prompt in self.prompts]
