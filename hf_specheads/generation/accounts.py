"""The texts, samplers and length limits of a stream's requests. A batch has one of each, a stream one per request."""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from .sampling import TokenSampler
from .sequences import Sequences
from .stopping import StopRule

MOST_TOKENS = 1 << 40  # the common limit of all requests, see `RequestTexts.lengths`


class RequestTexts(Sequences):
    """The texts of requests that come and go, by request number. A place of the batch is an index into `active`.

    Attributes:
        active: Number of the request in each place of the batch.
        ended: Requests in `active` that have ended, so that their places are free.
    """

    def __init__(self) -> None:
        self.active: list[int] = []
        self.ended: list[int] = []
        self.texts: dict[int, Sequences] = {}
        self.limits: dict[int, int | None] = {}
        self.finished_tokens = self.finished = 0

    @property
    def lengths(self) -> dict[int, int]:  # type: ignore[override]  # by number, not by place
        """Lengths of the active requests by number, shifted so that `MOST_TOKENS` is the limit of every request.

        The length of a request is `MOST_TOKENS` minus the tokens that it may still get. Without a limit, it is the
        number of its tokens.
        """
        return {request: self.texts[request].lengths[0] + self._before(request) for request in self.active}

    def _before(self, request: int) -> int:
        limit = self.limits[request]
        return 0 if limit is None else MOST_TOKENS - limit

    def open(self, request: int, place: int, text: Sequences, limit: int | None) -> None:
        """Puts a request into the place of a request that has ended, or after the last place."""
        self.ended = [one for one in self.ended if one not in self.active[place : place + 1]]
        self.active[place : place + 1] = [request]
        self.texts[request], self.limits[request] = text, limit

    def free_place(self) -> int:
        """The place of the request that ended first, or else the place after the last."""
        return self.active.index(self.ended[0]) if self.ended else len(self.active)

    def finish(self, request: int) -> list[int]:
        """Forgets a request, and returns its new tokens."""
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
        """Frees the places of these requests."""
        self.ended += sequences

    def close_up(self) -> list[int]:
        """Removes the free places from the batch. Returns the former indices of the places that are kept."""
        kept = [place for place, request in enumerate(self.active) if request not in self.ended]
        self.active, self.ended = [self.active[place] for place in kept], []
        return kept

    @property
    def mean_new_tokens(self) -> float:
        tokens = self.finished_tokens + sum(text.new_tokens(0) for text in self.texts.values())
        return tokens / max(self.finished + len(self.texts), 1)


class RequestSampler(TokenSampler):
    """A sampler that uses, for every request, the processors that `generate` has prepared for this request.

    Args:
        logits_processor, do_sample: Those of any request, used where all nodes of a batch are processed at once:
            processors that look at logits alone are the same for all requests.
    """

    def __init__(self, logits_processor: LogitsProcessorList, do_sample: bool):
        super().__init__(logits_processor, do_sample)
        self.own: dict[int, TokenSampler] = {}

    def at_lengths(self, shortest: int, longest: int) -> TokenSampler:
        return self  # `RequestTexts.lengths` are shifted, so they are not the lengths that processors count

    def for_sequence(self, sequence: int) -> TokenSampler:
        return self.own[sequence]


class RequestStop(StopRule):
    """A stop rule that uses, for every request, the limit of this request.

    Args:
        criteria: The criteria of any request.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        super().__init__(criteria)
        self.max_length = MOST_TOKENS
        self.own: dict[int, StopRule] = {}

    def for_sequence(self, sequence: int) -> StopRule:
        return self.own[sequence]
