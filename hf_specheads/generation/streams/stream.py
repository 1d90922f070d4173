"""Streams of requests: a sequence that ends leaves its place in the batch to a request that waits.

transformers' continuous batching refuses assistants, and a static batch runs until its longest text ends. Here every
sequence has cache slots of its own ([`SlotCache`]). The prompt of a new request is read by itself. Its cache then
moves into the place of a sequence that has ended, and the request takes part in the next round. Targets that only take
chains keep transformers' own cache, in which the new sequence is placed behind padding ([`RecurrentCache`]).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from time import sleep
from typing import Any, cast

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ...cache.names import cache_name
from ...cache.recurrent import RecurrentCache
from ...cache.target import TreeCache
from ...contract import DraftingContract
from ...errors import WrongTargetError
from ..call import begin_call
from ..committed import NewRows
from ..loop import RoundLoop
from ..observer import tell
from ..options import DraftingOptions
from ..pace.paces import pace_of
from ..refusals import (
    refuse_numbers,
    refuse_prepared_call,
    refuse_processors,
    with_a_tree_for,
    with_copies,
)
from ..sequences import Sequences, pad_token_of
from ..verification.accepted import Accepted
from .accounts import RequestSampler, RequestStop, RequestTexts, StreamStats
from .requests import CallOptions, Request, refuse_in_streams, refuse_to_join

_END = object()
IDLE_SECONDS = 0.002  # how long a stream without texts waits before it asks again for a request


@dataclass(frozen=True)
class FinishedText:
    """The text of a request that has finished.

    Attributes:
        index: Number of the request, counted from 0 in the order in which requests were taken.
        token_ids: The new tokens. The end-of-sequence token, if there was one, is the last.
        num_accepted: Accepted draft tokens of each round of the request.
        error: Why the request could not be served; `None` if it was. Only with `raise_errors=False`.
    """

    index: int
    token_ids: list[int]
    num_accepted: list[int]
    error: Exception | None = None


def generate_stream(
    target: PreTrainedModel,
    heads: DraftingContract,
    requests: Iterable[Any],
    max_batch: int = 8,
    raise_errors: bool = True,
    **options: Any,
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
    was assigned, every round chooses one for its number of sequences. `heads.last_stats` has the statistics of the
    stream ([`StreamStats`]).

    Args:
        target: The target.
        heads: Draft heads made for this target.
        requests: For each request, what a tokenizer returns for one text without padding (`input_ids` of shape [T] or
            [1, T], and other inputs of the target such as images), or only the token ids. A request may have options
            of `generate` of its own, which override those of the call: all that say how its tokens are chosen or where
            its text ends (`do_sample`, `temperature`, `prefix_allowed_tokens_fn`, `max_new_tokens`, `eos_token_id`,
            `stop_strings` and so on). `None` means that no request is waiting at the moment.
        max_batch: Most sequences in a round.
        raise_errors: Raise the error of a request that cannot be read or served, which ends the stream and all its
            texts. Otherwise the request is yielded with its `error`, and the other texts go on.
        **options: Options of `generate`, for all requests. `stop_strings` needs the `tokenizer` too.

    Yields:
        A [`FinishedText`] for every request, in the order in which the texts end.

    Raises:
        ValueError: if a request is not a text, or an option belongs to a single call or to the whole stream.
        UnsupportedGenerationError: if a batch cannot serve the target, cache, criterion or output. Raised before the
            forward of the request.
        WrongTargetError: if the draft heads belong to another target.
    """
    if max_batch < 1:
        raise ValueError(f"`max_batch` must be at least 1, got {max_batch}.")
    return _Stream(target, heads, max_batch, CallOptions(options), raise_errors).run(iter(requests))


class _Stream:
    """The state of one [`generate_stream`], whose arguments it takes."""

    def __init__(
        self,
        target: PreTrainedModel,
        heads: DraftingContract,
        max_batch: int,
        options: CallOptions,
        raise_errors: bool,
    ):
        self.target, self.heads, self.max_batch, self.options = target, heads, max_batch, options
        self.raise_errors = raise_errors
        self.asked = 0
        self.refused: list[FinishedText] = []
        self.loop: StreamLoop | None = None

    def run(self, requests: Iterator[Any]) -> Iterator[FinishedText]:
        """Runs rounds and admits requests to free places until no request is left and all texts have ended."""
        try:
            waiting = True
            while waiting or self.is_busy:
                while waiting and not self.is_full:
                    request = next(requests, _END)
                    waiting = request is not _END
                    if request is None and not self.is_busy:
                        sleep(IDLE_SECONDS)
                    if request is None or not waiting:
                        break
                    self.admit(request)
                refused, self.refused = self.refused, []
                yield from refused
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
        number, began = self.asked, time.perf_counter()
        self.asked += 1
        try:
            asked = Request.of(request, number, self.target.device)
            options = {**self.options.of(asked.options), "custom_generate": partial(self._read_prompt, asked)}
            newcomer, rows = self.target.generate(**asked.inputs, **options)
        except WrongTargetError:  # the fault of the heads, not of the request
            raise
        except Exception as error:
            if self.raise_errors:
                raise
            self.refused.append(FinishedText(number, [], [], error))
            return
        assert self.loop is not None  # `_read_prompt` has made it
        self.heads.last_stats = self.loop.stats
        self.loop.take_in(asked, newcomer, rows, time.perf_counter() - began)

    def _read_prompt(
        self,
        request: Request,
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
        prepared = (logits_processor, stopping_criteria, generation_config)
        samples = None if self.loop is None else bool(self.loop.config.do_sample)
        refuse_in_streams(request, settings, stopping_criteria, generation_config, model_kwargs, samples)
        refuse_prepared_call(model, heads, settings, batch, generation_config, model_kwargs)
        refuse_to_join(model, settings, batch, model_kwargs)
        shared = LogitsProcessorList(one for one in logits_processor if not request.is_own(one))
        refuse_processors(settings, shared, generation_config, batch)
        refuse_processors(settings, logits_processor, generation_config, batch_size=1)
        probe_seconds = refuse_numbers(model, heads, settings, batch, model_kwargs[cache_name(model_kwargs)])
        settings = with_copies(model, heads, settings, batch, model_kwargs[cache_name(model_kwargs)])
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
        self.texts, self.own_stop = RequestTexts(), RequestStop()
        self.own_sampler = RequestSampler(self.texts)
        prepared = (logits_processor, stopping_criteria, generation_config)
        super().__init__(target, head, replace(options, adaptive=False), *prepared, self.texts, {})
        self.options, self.batch = options, batch
        self.stats = self.candidates.stats = self.own_stats = StreamStats(**vars(self.stats))
        self.sampler, self.stop, self.candidates.max_length = self.own_sampler, self.own_stop, self.own_stop.max_length
        self.adaptive = options.adaptive and not (options.trace or self.stats.lossy)
        self.paced: tuple[int, GenerationConfig | None] = (0, None)  # what `pace` was made for
        self.rows: NewRows | None = None
        self.finished: list[FinishedText] = []

    @property
    def num_active(self) -> int:
        """Number of sequences that have not ended."""
        return len(self.texts.active) - len(self.texts.ended)

    # ------------------------------------------------------------------ newcomers
    @torch.no_grad()
    def take_in(self, request: Request, newcomer: RoundLoop, rows: NewRows, seconds: float) -> None:
        """Gives a free place to a request whose prompt was read, unless its first token was its last.

        Args:
            request: The request.
            newcomer: The loop that has prefilled the request. It is closed.
            rows: The rows of the prompt, for the draft head to take in.
            seconds: Wall seconds that reading the prompt took.
        """
        first = Accepted(newcomer.sequences.new_ids(0), [0], stopped=not newcomer.sequences.active)
        self.stats.target_forwards += newcomer.stats.target_forwards
        self.stats.host_syncs += newcomer.stats.host_syncs
        if first.stopped:
            self.finished.append(FinishedText(request.number, first.token_ids, []))
        else:
            self._give_place(request, newcomer, newcomer.candidates.take_in(rows))
        newcomer.close()
        tell(self.options.on_round, None, {request.number: first}, seconds)

    def _give_place(self, request: Request, newcomer: RoundLoop, rows: NewRows) -> None:
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
        texts.open(request.number, place, newcomer.sequences, newcomer.stop.max_length)
        self.own_stop.give(request.number, newcomer.stop)
        self.own_sampler.give(request.number, newcomer.sampler, newcomer.config, request.choices)

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
        active, config = len(self.texts.active), self.own_sampler.config
        self.candidates.sampling_processors = self.own_sampler.of_drafts
        if self.adaptive and (active != self.paced[0] or config is not self.paced[1]):
            self.pace = pace_of(self.candidates.head, self.target, self.options, active, config)
            self.paced = active, config
        return super().begin_round()

    def drop_ended(self, rows: NewRows, accepted: dict[int, Accepted]) -> NewRows:
        """Frees the places of ended sequences. Their rows stay until a request takes the place or `step` drops it."""
        ended = [request for request, result in accepted.items() if result.stopped]
        self.texts.end(ended)
        for request in ended:
            self.finished.append(FinishedText(request, self.texts.finish(request), self.own_stats.finish(request)))
            self.own_stop.take(request)
            self.own_sampler.take(request)
        self.stats.new_tokens = self.texts.mean_new_tokens
        return rows

    def take_finished(self) -> list[FinishedText]:
        """Returns the texts that have ended since the last call."""
        finished, self.finished = self.finished, []
        return finished
