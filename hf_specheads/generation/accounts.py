"""What a stream knows of its requests: each has its own text, sampler and limit, where a batch has one for all."""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from .sampling import TokenSampler
from .sequences import Sequences
from .stopping import StopRule

MOST_TOKENS = 1 << 40  # where the limits of all requests are counted to, see `RequestTexts.lengths`


class RequestTexts(Sequences):
    """The texts of requests that come and go, by their number; places of a batch, in the order of `active`.

    Attributes:
        active: Requests in the places of the batch.
        ended: Those of them that have ended: their places are free.
    """

    def __init__(self) -> None:
        self.active: list[int] = []
        self.ended: list[int] = []
        self.texts: dict[int, Sequences] = {}
        self.limits: dict[int, int | None] = {}
        self.finished_tokens = self.finished = 0

    @property
    def lengths(self) -> dict[int, int]:  # type: ignore[override]  # by number, not by place
        """Tokens of every request as one limit for all of them counts: [`MOST_TOKENS`] less those it may still get; of
        requests without a limit, their tokens."""
        return {request: self.texts[request].lengths[0] + self._before(request) for request in self.active}

    def _before(self, request: int) -> int:
        limit = self.limits[request]
        return 0 if limit is None else MOST_TOKENS - limit

    def open(self, request: int, place: int, text: Sequences, limit: int | None) -> None:
        """A request takes a place: of one that has ended, or after the last."""
        self.ended = [one for one in self.ended if one not in self.active[place : place + 1]]
        self.active[place : place + 1] = [request]
        self.texts[request], self.limits[request] = text, limit

    def free_place(self) -> int:
        """The first place whose request has ended, else the one after the last."""
        return self.active.index(self.ended[0]) if self.ended else len(self.active)

    def finish(self, request: int) -> list[int]:
        """Its new tokens; the request is forgotten."""
        del self.limits[request]
        tokens = self.texts.pop(request).new_ids(0)
        self.finished, self.finished_tokens = self.finished + 1, self.finished_tokens + len(tokens)
        return tokens

    def tokens_of(self, sequence: int) -> torch.Tensor:
        return self.texts[sequence].tokens_of(0)

    def last_tokens(self) -> list[int]:
        return [self.texts[request].last_tokens()[0] for request in self.active]

    def append(self, sequence: int, token_ids: list[int], on_device: torch.Tensor) -> None:
        self.texts[sequence].append(0, token_ids, on_device)

    def end(self, sequences: list[int]) -> None:
        """Their places are free."""
        self.ended += sequences

    def close_up(self) -> list[int]:
        """Gives up the places that are free; returns those that are kept."""
        kept = [place for place, request in enumerate(self.active) if request not in self.ended]
        self.active, self.ended = [self.active[place] for place in kept], []
        return kept

    @property
    def mean_new_tokens(self) -> float:
        tokens = self.finished_tokens + sum(text.new_tokens(0) for text in self.texts.values())
        return tokens / max(self.finished + len(self.texts), 1)


class RequestSampler(TokenSampler):
    """A sampler whose processors are, for every request, those that `generate` has prepared for it.

    Args:
        logits_processor, do_sample: Of any request; where processors look at logits alone they are the same for all.
    """

    def __init__(self, logits_processor: LogitsProcessorList, do_sample: bool):
        super().__init__(logits_processor, do_sample)
        self.own: dict[int, TokenSampler] = {}

    def at_lengths(self, shortest: int, longest: int) -> TokenSampler:
        return self  # requests have limits of their own

    def for_sequence(self, sequence: int) -> TokenSampler:
        return self.own[sequence]


class RequestStop(StopRule):
    """A stop rule whose limit is, for every request, its own.

    Args:
        criteria: Of any request.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        super().__init__(criteria)
        self.max_length = MOST_TOKENS
        self.own: dict[int, StopRule] = {}

    def for_sequence(self, sequence: int) -> StopRule:
        return self.own[sequence]
