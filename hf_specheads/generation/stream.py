"""Streams of requests: a sequence that ends leaves its place in the batch to a request that waits.

transformers' continuous batching refuses assistants, and a static batch runs until its longest text ends. Here every
sequence has cache slots of its own ([`SlotCache`]). The prompt of a new request is read by itself. Its cache then
moves into the place of a sequence that has ended, and the request takes part in the next round. Targets that only take
chains keep transformers' own cache, in which the new sequence is placed behind padding ([`RecurrentCache`]).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from ..cache.joining import joining_problem
from ..cache.names import CACHE_NAMES, cache_name
from ..cache.recurrent import RecurrentCache
from ..cache.target import TreeCache
from ..contract import DraftingContract
from ..errors import UnsupportedGenerationError
from ..target.positions import finds_begins
from ..target.recurrence import counts_padding, is_recurrent
from ..target.structure import forward_parameters
from .accounts import RequestSampler, RequestStop, RequestTexts
from .call import begin_call
from .committed import NewRows
from .loop import RoundLoop
from .observer import tell
from .options import DraftingOptions
from .pace.paces import pace_of
from .refusals import (
    refuse_numbers,
    refuse_prepared_call,
    refuse_processors,
    rounds_go_back,
    with_a_tree_for,
)
from .sequences import Sequences, pad_token_of
from .stopping import OF_ONE_SEQUENCE
from .verification.accepted import Accepted

OF_A_CALL = ("assistant_model", "streamer", "custom_generate", *CACHE_NAMES, "inputs", "input_ids")
OF_A_REQUEST = "max_new_tokens"
_END = object()


@dataclass(frozen=True)
class FinishedText:
    """The text of a request that has finished.

    Attributes:
        index: Number of the request, counted from 0 in the order in which requests were taken.
        token_ids: The new tokens. The end-of-sequence token, if there was one, is the last.
        num_accepted: Accepted draft tokens of each round of the request.
    """

    index: int
    token_ids: list[int]
    num_accepted: list[int]


def generate_stream(
    target: PreTrainedModel, heads: DraftingContract, requests: Iterable[Any], max_batch: int = 8, **options: Any
) -> Iterator[FinishedText]:
    """Generates for a stream of requests, at most `max_batch` at a time. Every text is the target's own.

    ```python
    for text in generate_stream(target, heads, map(tokenizer, prompts), max_batch=8, max_new_tokens=256):
        print(text.index, tokenizer.decode(text.token_ids))
    ```

    The next request is taken when a place in the batch is free, so `requests` may be a queue without an end. If no
    request is waiting, the iterator returns `None` and is asked again after the next round. Texts are yielded as they
    end. Greedy text equals that of `target.generate` for the request alone (up to ties, as in every batch). Sampled
    text has the same distribution whatever else is in the batch, but a seed does not reproduce it. If no draft tree
    was assigned, every round chooses one for its number of sequences. `heads.last_stats` has the statistics of all
    rounds.

    Args:
        target: The target.
        heads: Draft heads made for this target.
        requests: For each request, what a tokenizer returns for one text without padding (`input_ids` of shape [T] or
            [1, T], and other inputs of the target such as images), or only the token ids. A `max_new_tokens` in a
            request overrides that of the call. `None` means that no request is waiting at the moment.
        max_batch: Most sequences in a round.
        **options: Options of `generate`, for all requests. `stop_strings` needs the `tokenizer` too.

    Yields:
        A [`FinishedText`] for every request, in the order in which the texts end.

    Raises:
        ValueError: if a request is not a text, or an option belongs to a single call.
        UnsupportedGenerationError: if a batch cannot serve the target, cache, criterion or output. Raised before the
            forward of the request.
        WrongTargetError: if the draft heads belong to another target.
    """
    if max_batch < 1:
        raise ValueError(f"`max_batch` must be at least 1, got {max_batch}.")
    if given := [name for name in OF_A_CALL if name in options]:
        raise ValueError(f"`{given[0]}` belongs to one call of `generate`; a stream takes `requests` and `heads`.")
    return _Stream(target, heads, max_batch, options).run(iter(requests))


class _Stream:
    """The state of one [`generate_stream`], whose arguments it takes."""

    def __init__(self, target: PreTrainedModel, heads: DraftingContract, max_batch: int, options: dict[str, Any]):
        self.target, self.heads, self.max_batch, self.options = target, heads, max_batch, _with_criteria(options)
        self.asked = 0
        self.loop: StreamLoop | None = None

    def run(self, requests: Iterator[Any]) -> Iterator[FinishedText]:
        """Runs rounds and admits requests to free places until no request is left and all texts have ended."""
        try:
            waiting = True
            while waiting or self.is_busy:
                while waiting and not self.is_full:
                    request = next(requests, _END)
                    waiting = request is not _END
                    if request is None or not waiting:
                        break
                    self.admit(request)
                if self.loop is not None:
                    self.loop.step()
                    yield from self.loop.take_finished()
        finally:
            if self.loop is not None:
                self.loop.close()

    @property
    def is_busy(self) -> bool:
        """Whether some text has not ended yet."""
        return self.loop is not None and self.loop.num_active > 0

    @property
    def is_full(self) -> bool:
        """Whether all places of the batch are taken."""
        return self.loop is not None and self.loop.num_active >= self.max_batch

    def admit(self, request: Any) -> None:
        """Reads the prompt of a request, so that the request takes part in the next round."""
        inputs, most = _inputs_of(request, self.asked, self.target.device)
        own = {} if most is None else {OF_A_REQUEST: most}
        began = time.perf_counter()
        newcomer, rows = self.target.generate(**inputs, **{**self.options, **own}, custom_generate=self._read_prompt)
        assert self.loop is not None  # `_read_prompt` has made it
        self.heads.last_stats = self.loop.stats
        self.loop.take_in(self.asked, newcomer, rows, time.perf_counter() - began)
        self.asked += 1

    def _read_prompt(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> tuple[RoundLoop, NewRows]:
        """Prefills one request by itself, and returns its loop and rows. `generate` calls it as `custom_generate`."""
        settings = begin_call(model, self.heads, generation_config.get_generation_mode(), generation_config)
        heads, batch = self.heads.for_call(model), max(self.max_batch, 2)
        settings = replace(settings, exact_seed=False, in_stream=True)
        settings = with_a_tree_for(model, settings, batch, model_kwargs)
        _refuse_in_streams(settings, stopping_criteria, generation_config, model_kwargs)
        refuse_prepared_call(model, heads, settings, batch, generation_config, model_kwargs)
        _refuse_to_join(model, settings, batch, model_kwargs)
        refuse_processors(settings, logits_processor, generation_config, batch)
        probe_seconds = refuse_numbers(model, heads, settings, batch, model_kwargs[cache_name(model_kwargs)])
        prepared = (logits_processor, stopping_criteria, generation_config)
        if self.loop is None:
            self.loop = StreamLoop(model, heads, settings, *prepared, batch)
            self.loop.stats.probe_seconds = probe_seconds
        pad_token_id = pad_token_of(generation_config._pad_token_tensor, generation_config._eos_token_tensor)
        alone = replace(settings, adaptive=False, on_round=None)
        loop = RoundLoop(model, heads, alone, *prepared, Sequences(input_ids, pad_token_id or 0), model_kwargs)
        try:
            return loop, loop.prefill()
        except BaseException:
            loop.close()
            raise


class StreamLoop(RoundLoop):
    """The rounds of a stream. Each place of the batch holds a request, and gets another one when that has ended.

    Args:
        target, head, options, logits_processor, stopping_criteria, generation_config: As prepared for the first
            request.
        batch: Most sequences in a round.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        head: DraftingContract,
        options: DraftingOptions,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        batch: int,
    ):
        self.texts, self.own_stop = RequestTexts(), RequestStop(stopping_criteria)
        self.own_sampler = RequestSampler(logits_processor, bool(generation_config.do_sample))
        prepared = (logits_processor, stopping_criteria, generation_config)
        super().__init__(target, head, replace(options, adaptive=False), *prepared, self.texts, {})
        self.options, self.batch = options, batch
        self.sampler, self.stop, self.candidates.max_length = self.own_sampler, self.own_stop, self.own_stop.max_length
        self.adaptive = options.adaptive and not (options.trace or self.stats.lossy)
        self.pace_of = partial(pace_of, head, target, options, config=generation_config)
        self.paced = 0  # number of sequences that `pace` was made for
        self.rows: NewRows | None = None
        self.finished: list[FinishedText] = []

    @property
    def num_active(self) -> int:
        """Number of sequences that have not ended."""
        return len(self.texts.active) - len(self.texts.ended)

    # ------------------------------------------------------------------ newcomers
    @torch.no_grad()
    def take_in(self, request: int, newcomer: RoundLoop, rows: NewRows, seconds: float) -> None:
        """Gives a free place to a request whose prompt was read, unless its first token was its last.

        Args:
            request: Number of the request.
            newcomer: The loop that has prefilled the request. It is closed.
            rows: The rows of the prompt, for the draft head to take in.
            seconds: Wall seconds that reading the prompt took.
        """
        first = Accepted(newcomer.sequences.new_ids(0), [0], stopped=not newcomer.sequences.active)
        self.stats.target_forwards += newcomer.stats.target_forwards
        self.stats.host_syncs += newcomer.stats.host_syncs
        if first.stopped:
            self.finished.append(FinishedText(request, first.token_ids, []))
        else:
            self._give_place(request, newcomer, newcomer.candidates.take_in(rows))
        newcomer.close()
        tell(self.options.on_round, None, {request: first}, seconds)

    def _give_place(self, request: int, newcomer: RoundLoop, rows: NewRows) -> None:
        """Moves the caches, the rows and the text of a newcomer into a place of the batch."""
        texts, place, batch = self.texts, self.texts.free_place(), len(self.texts.active)
        cache, newcomer._target_cache = newcomer.target_cache, None
        assert isinstance(cache, TreeCache | RecurrentCache)  # a `ChainCache` takes no batches
        if self.rows is None:
            self._target_cache, self.rows = cache, rows
            self.candidates.draft_cache = newcomer.candidates.draft_cache
            self.candidates.lookup, self.candidates.moods = newcomer.candidates.lookup, newcomer.candidates.moods
        else:
            self._put_cache(place, cache, batch, rows.token_ids.device)
            cache.give_back(None)
            self.candidates.put_sequence(place, newcomer.candidates, batch)
            self.rows = self.rows.with_sequence(place, rows)
        texts.open(request, place, newcomer.sequences, newcomer.stop.max_length)
        self.own_stop.own[request], self.own_sampler.own[request] = newcomer.stop, newcomer.sampler

    def _put_cache(self, place: int, cache: TreeCache | RecurrentCache, batch: int, device: torch.device) -> None:
        """Moves a newcomer's target cache into a place of the target cache of the batch."""
        if isinstance(cache, TreeCache):
            cast(TreeCache, self.target_cache).put_sequence(place, cache, batch, cache.device)
            return
        mine = cast(RecurrentCache, self.target_cache)  # all requests have caches of one kind
        before = mine.additional_forwards
        mine.put_sequence(place, cast(RecurrentCache, cache), device)
        self.stats.target_forwards += mine.additional_forwards - before

    # ------------------------------------------------------------------ rounds
    @torch.no_grad()
    def step(self) -> None:
        """Runs one round of all sequences, after removing the places that no request has taken."""
        if self.texts.ended:
            self._close_up()
        if self.rows is not None:
            self.rows = self.round(self.rows)

    def _close_up(self) -> None:
        kept = self.texts.close_up()
        if self.rows is None or not kept:
            self.close()
            self.rows = None
            return
        self.target_cache.select_sequences(kept)
        self.candidates.select_sequences(kept)
        self.rows = self.rows.select_sequences(kept)

    def begin_round(self) -> bool:
        if self.adaptive and (active := len(self.texts.active)) != self.paced:
            self.pace, self.paced = self.pace_of(active), active
        return super().begin_round()

    def drop_ended(self, rows: NewRows, accepted: dict[int, Accepted]) -> NewRows:
        """Frees the places of ended sequences. Their rows stay until a request takes the place or `step` drops it."""
        ended = [request for request, result in accepted.items() if result.stopped]
        self.texts.end(ended)
        for request in ended:
            known = self.stats.num_accepted[request : request + 1]  # empty if all steps of the request were plain
            self.finished.append(FinishedText(request, self.texts.finish(request), *known or [[]]))
            del self.own_stop.own[request], self.own_sampler.own[request]
        self.stats.new_tokens = self.texts.mean_new_tokens
        return rows

    def take_finished(self) -> list[FinishedText]:
        """Returns the texts that have ended since the last call."""
        finished, self.finished = self.finished, []
        return finished


# ---------------------------------------------------------------------- what is asked for
def _with_criteria(options: dict[str, Any]) -> dict[str, Any]:
    """Turns `stop_strings` into a stopping criterion, which transformers does not do for a `custom_generate`."""
    options = dict(options)
    strings, tokenizer = options.pop("stop_strings", None), options.pop("tokenizer", None)
    if strings is None:
        return options
    if tokenizer is None:
        raise ValueError("`stop_strings` are looked for in the text; pass the `tokenizer` too.")
    criteria = [*options.pop("stopping_criteria", ()), StopStringCriteria(tokenizer, strings)]
    return {**options, "stopping_criteria": StoppingCriteriaList(criteria)}


def _inputs_of(request: Any, number: int, device: torch.device) -> tuple[dict[str, Any], int | None]:
    """Inputs [1, ...] of a request on the target's device, and its own `max_new_tokens` (`None` if it has none)."""
    inputs = dict(request) if isinstance(request, Mapping) else {"input_ids": request}
    most = inputs.pop(OF_A_REQUEST, None)
    try:
        tensors = {name: torch.as_tensor(value, device=device) for name, value in inputs.items()}
        tensors = {name: value[None] if value.dim() == 1 else value for name, value in tensors.items()}
        shape = tuple(tensors["input_ids"].shape)
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"request {number} is not a text (got {type(request).__name__}); give token ids, or what a "
            "tokenizer returns."
        ) from None
    if len(shape) != 2 or shape[0] != 1 or shape[1] == 0:
        raise ValueError(f"request {number} has `input_ids` of shape {list(shape)}; give one text, [1, tokens].")
    return tensors, most


def _refuse_in_streams(
    options: DraftingOptions,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Refuses what belongs to a single call and cannot be shared by texts that begin and end at different times."""
    strange = [type(one).__name__ for one in criteria if type(one) not in OF_ONE_SEQUENCE]
    mask = model_kwargs.get("attention_mask")
    reasons = {
        "compiled rounds, whose shapes are fixed (`heads.compiled = False`)": options.compiled,
        "return_dict_in_generate=True": bool(config.return_dict_in_generate),
        f"num_return_sequences={config.num_return_sequences} (pass the request that many times)": (
            (config.num_return_sequences or 1) > 1
        ),
        "padding": mask is not None and not bool(mask.all()),
        f"stopping criteria that may look at all texts at once ({', '.join(strange)})": bool(strange),
    }
    for what, applies in reasons.items():
        if applies:
            raise UnsupportedGenerationError(
                f"a stream of requests does not support {what}; leave it out, or call `generate`."
            )


def _refuse_to_join(
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
