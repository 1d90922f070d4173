"""Reads a prompt once for all its sequences (`num_return_sequences`), and copies its cache."""

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

# Tensors [B, T] of a call, whose rows are equal for all sequences of a prompt.
ROWS = ("attention_mask", "position_ids")


def copies_of_prompts(config: GenerationConfig, model_kwargs: dict[str, Any]) -> int:
    """Number of sequences per prompt if the prefill can read each prompt once, otherwise 1.

    Every sequence is read by itself if there are inputs besides tokens, a mask and positions (images, embeddings), or
    if the cache does not grow or is not empty.
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
    """Runs [`FeatureReader.prefill`] for the first of every `copies` sequences, and copies the results for all."""
    if copies == 1:
        return reader.prefill(target, input_ids, config, model_kwargs)
    rows = {name: model_kwargs[name][::copies] for name in ROWS if model_kwargs.get(name) is not None}
    outputs, features = reader.prefill(target, input_ids[::copies], config, model_kwargs | rows)
    model_kwargs[cache_name(model_kwargs)].batch_repeat_interleave(copies)
    outputs.logits = outputs.logits.repeat_interleave(copies, dim=0)
    return outputs, None if features is None else features.repeat_interleave(copies, dim=0)


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
