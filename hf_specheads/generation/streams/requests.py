"""What a request of a stream may ask for, and what a stream cannot serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from ...cache.joining import joining_problem
from ...cache.names import CACHE_NAMES, cache_name
from ...errors import UnsupportedGenerationError
from ...target.positions import finds_begins
from ...target.recurrence import counts_padding, is_recurrent
from ...target.structure import forward_parameters
from ..options import DraftingOptions
from ..refusals import rounds_go_back
from ..stopping import OF_ONE_SEQUENCE
from ..verification.rules import RULES

OF_A_CALL = ("assistant_model", "streamer", "custom_generate", *CACHE_NAMES, "inputs")
# Options of `generate` that a request may have for itself: those that say where its text ends ...
ENDINGS = frozenset({"max_new_tokens", "max_length", "max_time", "stop_strings", "stopping_criteria"})
# ... and those that say how its tokens are chosen.
CHOICES = frozenset(
    {
        "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
        "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens",
        "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty",
        "min_length", "min_new_tokens", "eos_token_id", "renormalize_logits", "remove_invalid_values",
        "watermarking_config", "prefix_allowed_tokens_fn", "logits_processor",
    }
)  # fmt: skip
KEPT_CRITERIA = 16  # criteria for different stop strings that a stream keeps
OF_A_STREAM = (frozenset(vars(GenerationConfig())) | {"generation_config", "tokenizer"}) - ENDINGS - CHOICES


@dataclass(frozen=True)
class Request:
    """A request, checked.

    Attributes:
        number: Number of the request, counted from 0.
        inputs: Inputs [1, ...] of the target, on its device.
        options: Options of `generate` that the request has for itself.
    """

    number: int
    inputs: dict[str, torch.Tensor]
    options: dict[str, Any]

    @classmethod
    def of(cls, request: Any, number: int, device: torch.device) -> Request:
        """Reads what a stream was given for one text.

        Raises:
            ValueError: if it is not a text, or has an option that belongs to the whole stream or to a single call.
        """
        given = dict(request) if isinstance(request, Mapping) else {"input_ids": request}
        if strange := next((name for name in given if name in OF_A_STREAM or name in OF_A_CALL), None):
            where = "no stream takes it" if strange in OF_A_CALL else "give it to `generate_stream`, for all requests"
            raise ValueError(f"request {number} has the option `{strange}`, which no request has for itself; {where}.")
        options = {name: given.pop(name) for name in list(given) if name in ENDINGS or name in CHOICES}
        try:
            tensors = {name: torch.as_tensor(value, device=device) for name, value in given.items()}
            tensors = {name: value[None] if value.dim() == 1 else value for name, value in tensors.items()}
            shape = tuple(tensors["input_ids"].shape)
        except (KeyError, TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"request {number} is not a text (got {type(request).__name__}); give token ids, or what a "
                "tokenizer returns."
            ) from None
        if len(shape) != 2 or shape[0] != 1 or shape[1] == 0:
            raise ValueError(f"request {number} has `input_ids` of shape {list(shape)}; give one text, [1, tokens].")
        return cls(number, tensors, options)

    def is_own(self, extra: Any) -> bool:
        """Whether a criterion or processor was given for this request alone, so that it sees no other text."""
        given = (self.options.get(name) or () for name in ("stopping_criteria", "logits_processor"))
        return any(extra is one for several in given for one in several)

    @property
    def choices(self) -> dict[str, Any]:
        """The options that say how tokens are chosen. Requests with equal ones are processed together."""
        return {name: value for name, value in self.options.items() if name in CHOICES}


class CallOptions:
    """The options of `generate` for each request of a stream.

    `stop_strings` becomes a stopping criterion, which transformers does not do for a `custom_generate`.

    Args:
        options: The options for all requests.

    Raises:
        ValueError: if an option belongs to a single call, or `stop_strings` comes without the `tokenizer`.
    """

    def __init__(self, options: Mapping[str, Any]):
        if given := next((name for name in (*OF_A_CALL, "input_ids") if name in options), None):
            raise ValueError(f"`{given}` belongs to one call of `generate`; a stream takes `requests` and `heads`.")
        self.options = dict(options)
        self.tokenizer = self.options.pop("tokenizer", None)
        self._made = lru_cache(maxsize=KEPT_CRITERIA)(partial(StopStringCriteria, self.tokenizer))
        self.of({})

    def of(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The options for a request that has these options for itself."""
        options = {**self.options, **own}
        if (strings := options.pop("stop_strings", None)) is None:
            return options
        criteria = [*(options.pop("stopping_criteria", None) or ()), self._stops_at(strings)]
        return {**options, "stopping_criteria": StoppingCriteriaList(criteria)}

    def _stops_at(self, strings: str | list[str]) -> StopStringCriteria:
        """The criterion for stop strings. It is kept, as making one takes a walk through the vocabulary."""
        if self.tokenizer is None:
            raise ValueError("`stop_strings` are looked for in the text; pass the `tokenizer` too.")
        return self._made((strings,) if isinstance(strings, str) else tuple(strings))


def refuse_in_streams(
    request: Request,
    options: DraftingOptions,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    samples: bool | None,
) -> None:
    """Refuses what belongs to a single call and cannot be shared by texts that begin and end at different times.

    Args:
        request: The request.
        options, criteria, config, model_kwargs: As prepared for it.
        samples: Whether tokens of earlier requests are sampled; `None` for the first request.
    """
    own = request.is_own
    strange = [type(one).__name__ for one in criteria if type(one) not in OF_ONE_SEQUENCE and not own(one)]
    mask, lossless = model_kwargs.get("attention_mask"), RULES[options.verification].lossless
    reasons = {
        "compiled rounds, whose shapes are fixed (`heads.compiled = False`)": options.compiled,
        "return_dict_in_generate=True": bool(config.return_dict_in_generate),
        f"num_return_sequences={config.num_return_sequences} (pass the request that many times)": (
            (config.num_return_sequences or 1) > 1
        ),
        "padding": mask is not None and not bool(mask.all()),
        f"stopping criteria that may look at all texts at once ({', '.join(strange)})": bool(strange),
        "greedy beside sampled requests under typical acceptance (`heads.verification = 'lossless'`)": (
            not lossless and samples not in (None, bool(config.do_sample))
        ),
    }
    for what, applies in reasons.items():
        if applies:
            raise UnsupportedGenerationError(
                f"a stream of requests does not support {what}; leave it out, or call `generate`."
            )


def refuse_to_join(
    target: PreTrainedModel, options: DraftingOptions, batch: int, model_kwargs: dict[str, Any]
) -> None:
    """Refuses targets whose rounds use transformers' own cache, if it cannot hold texts of different lengths."""
    cache, problem = model_kwargs[cache_name(model_kwargs)], None
    if not rounds_go_back(target, options, batch, cache):
        return
    if counts_padding(target):
        problem = "it reads the padding that shorter texts have beside longer ones"
    elif "attention_mask" not in forward_parameters(target):
        problem = "its forward takes no attention mask, which is needed to hide the padding of shorter texts"
    elif not is_recurrent(target) and model_kwargs.get("position_ids") is None and not finds_begins(target):
        problem = "it computes positions by itself and counts the padding of shorter texts"
    if problem := problem or joining_problem(cache):
        raise UnsupportedGenerationError(
            f"a stream of requests is not supported for {type(target).__name__} here: {problem}; call `generate` with "
            "whole batches."
        )
