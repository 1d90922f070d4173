"""Several sequences of one prompt (`num_return_sequences`): the prompt is read once, and its cache is copied."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import ModelOutput

from ..cache.names import cache_name
from ..target.features import FeatureReader

# Tensors of a call that are [B, T], of which every sequence of a prompt has the same row.
ROWS = ("attention_mask", "position_ids")


def copies_of_prompts(config: GenerationConfig, model_kwargs: dict[str, Any]) -> int:
    """Sequences of every prompt for which the first is read, before the prefill; 1 where each is read by itself.

    So are inputs that are more than tokens, a mask and positions (images, embeddings), and prompts for caches that do
    not grow, or hold something already.
    """
    cache, copies = model_kwargs[cache_name(model_kwargs)], config.num_return_sequences or 1
    if copies == 1 or type(cache) is not DynamicCache or cache.get_seq_length() > 0:
        return 1
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        return 1
    given = {name: value for name, value in model_kwargs.items() if isinstance(value, torch.Tensor)}
    return copies if set(given) <= set(ROWS) and all(value.dim() == 2 for value in given.values()) else 1


def read_prompts(
    reader: FeatureReader,
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    copies: int,
) -> tuple[ModelOutput, torch.Tensor | None]:
    """[`FeatureReader.prefill`] of the first of every `copies` sequences; what is returned and cached is of all."""
    if copies == 1:
        return reader.prefill(target, input_ids, config, model_kwargs)
    rows = {name: model_kwargs[name][::copies] for name in ROWS if model_kwargs.get(name) is not None}
    outputs, features = reader.prefill(target, input_ids[::copies], config, model_kwargs | rows)
    model_kwargs[cache_name(model_kwargs)].batch_repeat_interleave(copies)
    outputs.logits = outputs.logits.repeat_interleave(copies, dim=0)
    return outputs, None if features is None else features.repeat_interleave(copies, dim=0)
