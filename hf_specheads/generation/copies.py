"""Several sequences of one prompt (`num_return_sequences`): the prompt is read once, and its cache is copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import ModelOutput

from ..cache.names import cache_name
from ..target.features import FeatureReader
from .committed import NewRows

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


@dataclass
class SharedPrompts:
    """What the heads have to take in once for several sequences, when they first draft.

    Attributes:
        rows: Rows of a prompt but the last, whose root every sequence has for itself.
        prompts: Number of its prompt, per sequence.
    """

    rows: int
    prompts: list[int]

    @classmethod
    def of(cls, rows: NewRows, copies: int) -> SharedPrompts | None:
        """Of the rows of a prefill; `None` where every sequence has rows of its own."""
        batch, shared = rows.token_ids.shape[0], rows.token_ids.shape[1] - 2
        return None if copies == 1 or shared < 1 else cls(shared, [sequence // copies for sequence in range(batch)])

    def readers(self) -> list[int]:
        """The first sequence of every prompt."""
        return [self.prompts.index(prompt) for prompt in dict.fromkeys(self.prompts)]

    def places(self) -> list[int]:
        """Per sequence, the place of its prompt among the readers."""
        order = list(dict.fromkeys(self.prompts))
        return [order.index(prompt) for prompt in self.prompts]
