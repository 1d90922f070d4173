"""Serves one call of `generate` with draft heads: refuses it before any work, or runs its rounds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, GenerationMode

from ..cache.names import cache_name
from ..contract import DraftingContract
from ..errors import UnsupportedGenerationError
from .loop import RoundLoop
from .options import DraftingOptions
from .refusals import (
    refuse_call,
    refuse_numbers,
    refuse_options,
    refuse_prepared_call,
    refuse_processors,
    with_a_tree_for,
    with_copies,
)
from .sequences import Sequences, pad_token_of


def begin_call(
    target: PreTrainedModel, heads: DraftingContract, mode: GenerationMode, config: GenerationConfig
) -> DraftingOptions:
    """Begins a call: refuses what cannot be served, binds the draft heads to the target and reads their settings.

    Raises:
        UnsupportedGenerationError: if no draft head can serve the call.
        WrongTargetError: if the draft heads belong to another target.
    """
    refuse_call(target, mode, config)
    heads.bind(target)
    options = DraftingOptions.of(heads)
    refuse_options(heads, options, config)
    return options


def speculative_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft_head: DraftingContract,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Generates with draft heads. The text is the target's own, unless `heads.verification` is a lossy rule.

    The usual way here is `target.generate(..., assistant_model=heads)`. Without the dispatch that importing this
    package installs, pass the function itself:

        target.generate(**inputs, custom_generate=hf_specheads.speculative_generate, draft_head=heads)

    transformers passes neither a streamer nor the tokenizer for stop strings to a `custom_generate` callable; use
    `assistant_model=` if you need them. The statistics of the call are in `draft_head.last_stats` afterwards.

    Args:
        model: The target.
        input_ids: int64 [B, T], the prompt.
        logits_processor, stopping_criteria, generation_config, model_kwargs: As `generate` prepared them.
        draft_head: Draft heads made for this target.
        streamer: Receives every token with a `put` of its own.
        synced_gpus: Not supported.

    Returns:
        int64 [B, T + new tokens], or the usual dict output under `return_dict_in_generate`.

    Raises:
        UnsupportedGenerationError: if the call cannot be served exactly. Raised before any forward of the call.
        WrongTargetError: if the draft heads belong to another target. Raised before any forward.
    """
    options = begin_call(model, draft_head, generation_config.get_generation_mode(), generation_config)
    prepared = (input_ids, logits_processor, stopping_criteria, generation_config)
    return run_rounds(model, *prepared, draft_head, options, streamer, synced_gpus, **model_kwargs)


@torch.no_grad()
def run_rounds(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft_head: DraftingContract,
    options: DraftingOptions,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Runs the rounds of a call after [`begin_call`]: `draft_head` is bound, and `options` are its settings.

    The other arguments, the result and the errors are those of [`speculative_generate`].
    """
    heads = draft_head.for_call(model)
    batch = input_ids.shape[0]
    options = with_a_tree_for(model, options, batch, model_kwargs)
    refuse_prepared_call(model, heads, options, batch, generation_config, model_kwargs)
    if synced_gpus:
        raise UnsupportedGenerationError(
            "draft heads do not support synced_gpus (ZeRO-3 or FSDP generation); gather the target first."
        )
    refuse_processors(options, logits_processor, generation_config, batch)
    probe_seconds = refuse_numbers(model, heads, options, batch, model_kwargs[cache_name(model_kwargs)])
    options = with_copies(model, heads, options, batch, model_kwargs[cache_name(model_kwargs)])
    pad_token_id = pad_token_of(generation_config._pad_token_tensor, generation_config._eos_token_tensor)
    sequences = Sequences(input_ids, pad_token_id or 0, streamer)
    prepared = (logits_processor, stopping_criteria, generation_config, sequences, model_kwargs)
    loop = RoundLoop(model, heads, options, *prepared)
    draft_head.last_stats = loop.stats
    loop.stats.probe_seconds = probe_seconds
    try:
        return loop.run()
    finally:
        loop.close()
