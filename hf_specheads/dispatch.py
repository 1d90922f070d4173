"""The hook that makes `generate(assistant_model=heads)` work with unmodified transformers.

transformers has no registry for candidate generators: it looks up one decoding method on `GenerationMixin`. Importing
the package `heads`, which creating or loading draft heads requires, wraps three methods of `GenerationMixin` and one
function of transformers' pipelines, once:

* `_assisted_decoding`: runs our rounds if the assistant implements [`DraftingContract`], and passes every other call
  on unchanged;
* `_validate_generation_mode`: refuses a call that draft heads cannot serve, before any cache or forward;
* `_get_candidate_generator`: gives transformers' own loop our candidate generator when the heads ask for that loop;
* `load_assistant_model`: pipelines compare the special tokens in the assistant's and the target's configs to find out
  whether the two share a tokenizer. Draft heads always read the target's tokens, and most published ones do not repeat
  its special tokens in their config, so the wrapper skips the comparison.

The hook also registers an `sdpa` that is faster with the masks of draft trees on a CPU
([`generation.kernels.attention`]).
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import transformers
from packaging.version import Version
from transformers import GenerationMixin
from transformers.generation import GenerationMode
from transformers.pipelines import base as pipelines

from .contract import DraftingContract
from .generation.call import begin_call, run_rounds
from .generation.candidates import DraftHeadCandidateGenerator
from .generation.kernels.attention import install_grouped_attention, uninstall_grouped_attention
from .generation.refusals import refuse_prepared_call
from .target.recurrence import is_recurrent

MINIMUM_TRANSFORMERS = "5.23.0"
OPTIONS = "draft_options"  # keyword argument that carries a call's settings from validation to decoding
EXPECTED_PARAMETERS = {
    "_assisted_decoding": {
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "assistant_model",
    },
    "_validate_generation_mode": {"generation_mode", "generation_config", "generation_mode_kwargs"},
    "_get_candidate_generator": {"generation_config", "assistant_model", "model_kwargs"},
}


def install() -> None:
    """Installs the hook; calling it again changes nothing.

    Raises:
        ImportError: if the installed transformers does not have the methods that the hook was written for.
    """
    if getattr(GenerationMixin._assisted_decoding, "_specheads_original", None) is not None:
        return
    _check_transformers()
    _wrap(GenerationMixin, "_assisted_decoding", _assisted_decoding)
    _wrap(GenerationMixin, "_validate_generation_mode", _validate_generation_mode)
    _wrap(GenerationMixin, "_get_candidate_generator", _get_candidate_generator)
    _wrap(pipelines, "load_assistant_model", _load_assistant_model)
    install_grouped_attention()


def uninstall() -> None:
    """Removes the hook and restores the original functions."""
    for owner, name in (
        *((GenerationMixin, name) for name in EXPECTED_PARAMETERS),
        (pipelines, "load_assistant_model"),
    ):
        original = getattr(getattr(owner, name), "_specheads_original", None)
        if original is not None:
            setattr(owner, name, original)
    uninstall_grouped_attention()


def _check_transformers() -> None:
    version = transformers.__version__
    if Version(version) < Version(MINIMUM_TRANSFORMERS):
        raise ImportError(f"hf-specheads needs transformers >= {MINIMUM_TRANSFORMERS}, found {version}; upgrade it.")
    for name, expected in EXPECTED_PARAMETERS.items():
        method = getattr(GenerationMixin, name, None)
        missing = expected - set(inspect.signature(method).parameters) if method else expected
        if missing:
            raise ImportError(
                f"transformers {version} has changed GenerationMixin.{name} (missing {sorted(missing)}); "
                "upgrade hf-specheads, or install an earlier transformers."
            )


def _wrap(owner: Any, name: str, ours: Callable) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)  # `generate` inspects the signatures of these methods
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    wrapper._specheads_original = original
    setattr(owner, name, wrapper)


def _assisted_decoding(original: Callable, target: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    head, options = kwargs.get("assistant_model"), kwargs.pop(OPTIONS, None)
    if not isinstance(head, DraftingContract):
        return original(target, input_ids, *args, **kwargs)
    if options.loop == "transformers":
        prepared = {k: v for k, v in kwargs.items() if k not in ("generation_config", "assistant_model")}
        refuse_prepared_call(target, head, options, input_ids.shape[0], kwargs["generation_config"], prepared)
        return original(target, input_ids, *args, **kwargs)
    for unused in ("assistant_model", "inputs_tensor", "assistant_tokenizer", "tokenizer"):
        kwargs.pop(unused, None)
    return run_rounds(target, input_ids, *args, draft_head=head, options=options, **kwargs)


def _validate_generation_mode(
    original: Callable, target: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: dict
) -> None:
    head = generation_mode_kwargs.get("assistant_model")
    if isinstance(head, str | os.PathLike):  # transformers would fail less clearly, on a missing `config`
        raise TypeError(
            f"assistant_model={str(head)!r} is a name, but `generate` takes loaded models; for draft heads "
            f"pass `assistant_model=load_heads({str(head)!r})`."
        )
    if isinstance(head, DraftingContract):
        # `generate` passes this dict on to the decoding method.
        generation_mode_kwargs[OPTIONS] = begin_call(target, head, generation_mode, generation_config)
        # transformers insists on equal vocabulary sizes, but a draft model may pad its vocabulary differently. We have
        # checked the vocabulary already, so transformers validates the call without the assistant.
        if head.config.vocab_size != target.config.get_text_config().vocab_size:
            generation_mode_kwargs = {k: v for k, v in generation_mode_kwargs.items() if k != "assistant_model"}
        # transformers refuses assistants for recurrent targets and for several returned sequences. Our rounds serve
        # both: they restore saved recurrent states, and several sequences are an ordinary batch.
        if is_recurrent(target) or (generation_config.num_return_sequences or 1) > 1:
            generation_mode = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
    original(target, generation_mode, generation_config, generation_mode_kwargs)


def _get_candidate_generator(original: Callable, target: Any, *args: Any, **kwargs: Any) -> Any:
    head = kwargs.get("assistant_model")
    if not isinstance(head, DraftingContract):
        return original(target, *args, **kwargs)
    mask, config = kwargs["model_kwargs"].get("attention_mask"), kwargs["generation_config"]
    processors = kwargs["logits_processor"] if config.do_sample else None
    candidates = DraftHeadCandidateGenerator(head.for_call(target), target, config.max_length, mask, processors)
    head.last_stats = candidates.stats
    return candidates


def _load_assistant_model(
    original: Callable, model: Any, assistant_model: Any = None, assistant_tokenizer: Any = None
) -> Any:
    if isinstance(assistant_model, DraftingContract):
        return assistant_model, None
    return original(model, assistant_model, assistant_tokenizer)
