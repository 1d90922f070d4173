"""One call of `generate` with draft heads: what is refused before any work, and the rounds that serve the rest."""

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
)
from .sequences import Sequences, pad_token_of


def begin_call(
    target: PreTrainedModel, heads: DraftingContract, mode: GenerationMode, config: GenerationConfig
) -> DraftingOptions:
    """What every call starts with, once: refusals of the call, heads bound to the target, their settings read.

    Raises:
        UnsupportedGenerationError: for a call no draft head can serve.
        WrongTargetError: for heads of another target.
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
    """Generates with draft heads; the text is the target's own (unless `heads.verification` says otherwise).

    Reached through `target.generate(..., assistant_model=heads)` or, without the dispatch that importing this package
    installs, through

        target.generate(**inputs, custom_generate=hf_specheads.speculative_generate, draft_head=heads)

    (transformers hands no streamer and no stop-string tokenizer to a `custom_generate` callable; use
    `assistant_model=` for those.) Statistics of the call are left in `draft_head.last_stats`.

    Args:
        model: The target.
        input_ids: int64 [B, T], the prompt.
        logits_processor, stopping_criteria, generation_config, model_kwargs: As `generate` prepared them.
        draft_head: Heads made for this target.
        streamer: Receives every token, one `put` each.
        synced_gpus: Not supported.

    Returns:
        int64 [B, T + new tokens], or the usual dict output under `return_dict_in_generate`.

    Raises:
        UnsupportedGenerationError: if the call cannot be served exactly; before any forward.
        WrongTargetError: if the heads belong to another target; before any forward.
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
    """The same for a call that has begun ([`begin_call`]): `draft_head` is bound, `options` are its settings."""
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
