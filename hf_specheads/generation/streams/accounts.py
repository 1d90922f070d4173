"""The texts, samplers, length limits and statistics of a stream's requests. A batch has one of each, a stream one per
request."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ...metrics import GenerationStats
from ...tree.draft_tree import DraftTree
from ..sampling import TokenSampler
from ..sequences import Sequences
from ..stopping import StopRule

WARMEST = 2.0  # highest temperature that has trees of its own
KEPT_REQUESTS = 4096  # latest requests whose rounds the statistics of a stream keep
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
        texts: The texts of the requests.

    Attributes:
        own: The samplers of the requests, by number.
        alike: Whether all requests choose their tokens in the same way, so that all nodes are processed together.
        do_sample: Whether some request is sampled.
        config: How the tokens of all requests together are chosen, as far as draft trees depend on it.
    """

    def __init__(self, texts: RequestTexts):
        super().__init__(LogitsProcessorList(), do_sample=False, in_order=False)
        self.texts = texts
        self.own: dict[int, TokenSampler] = {}
        self._asked: dict[int, tuple[GenerationConfig, dict[str, Any]]] = {}
        self.alike, self.config = True, GenerationConfig()

    def give(self, request: int, sampler: TokenSampler, config: GenerationConfig, choices: dict[str, Any]) -> None:
        """Takes in a request, with its sampler, its config and the options by which it differs from others."""
        self.own[request], self._asked[request] = sampler, (config, choices)
        self._agree()

    def take(self, request: int) -> None:
        """Forgets a request that has ended."""
        del self.own[request], self._asked[request]
        self._agree()

    def _agree(self) -> None:
        """Works out what the requests have in common."""
        if not self.own:
            return
        configs, choices = zip(*self._asked.values(), strict=True)
        self.do_sample = any(sampler.do_sample for sampler in self.own.values())
        self.row_wise = all(sampler.row_wise for sampler in self.own.values())
        self.alike, self.config = all(_equal(one, choices[0]) for one in choices), configs[0]
        if self.do_sample:
            # Requests that differ share the trees of greedy requests. What is learnt of trees is kept for a few
            # temperatures only, as those of requests may all be different.
            warm = [(config.temperature or 1.0) if config.do_sample else 0.0 for config in configs]
            self.config = copy.copy(self.config)  # a new one would warn that greedy decoding has no temperature
            self.config.do_sample = self.alike
            self.config.temperature = min(round(sum(warm) / len(warm), 1), WARMEST)

    @property
    def of_drafts(self) -> LogitsProcessorList | None:
        """The processors with which children may be drawn; `None` where most probable children serve all requests."""
        one = next(iter(self.own.values()), None)
        return one.logits_processor if one is not None and self.alike and self.do_sample else None

    def at_lengths(self, shortest: int, longest: int) -> TokenSampler:
        # The lengths are shifted (`RequestTexts.lengths`), so they are not those that processors count.
        drafted = longest - max(self.texts.lengths.values())
        lengths = {request: self.texts.texts[request].lengths[0] for request in self.own}
        own = {request: one.at_lengths(lengths[request], lengths[request] + drafted)
               for request, one in self.own.items()}  # fmt: skip
        return self if all(one is self.own[request] for request, one in own.items()) else self._with(own, alike=False)

    def at_nodes(self, tree: DraftTree, texts: Sequence[torch.Tensor], sequences: list[int]) -> TokenSampler:
        if self.alike:
            one = next(iter(self.own.values())).at_nodes(tree, texts, sequences)
            return self._with(dict.fromkeys(self.own, one), alike=True)
        own = {}
        for place, request in enumerate(sequences):
            alone = tree.of_sequences([place]), texts[place : place + 1], [request]
            own[request] = self.own[request].at_nodes(*alone)
        return self._with(own, alike=False)

    def _with(self, own: dict[int, TokenSampler], alike: bool) -> RequestSampler:
        """The same with other samplers for a round."""
        other = copy.copy(self)
        other.own, other.alike = own, alike
        other.row_wise = all(sampler.row_wise for sampler in own.values())
        return other

    def of_sequences(self, sequences: list[int]) -> TokenSampler:
        return self._with({request: self.own[request] for request in sequences}, self.alike)

    def tokens_at_all_nodes(self, logits: torch.Tensor) -> torch.Tensor:
        return self._at_places(TokenSampler.tokens_at_all_nodes, logits)

    def scores_at_all_nodes(self, logits: torch.Tensor) -> torch.Tensor:
        return self._at_places(TokenSampler.scores_at_all_nodes, logits)

    def _at_places(
        self, of: Callable[[TokenSampler, torch.Tensor], torch.Tensor], logits: torch.Tensor
    ) -> torch.Tensor:
        """Calls a method of the samplers with the logits [B, N, V]: of one sampler if they are alike, else of each."""
        samplers = [self.own[request] for request in self.texts.active if request in self.own]
        if self.alike:
            return of(samplers[0], logits)
        return torch.cat([of(one, logits[place : place + 1]) for place, one in enumerate(samplers)])

    def for_sequence(self, sequence: int) -> TokenSampler:
        return self.own[sequence]


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether options are equal; those that cannot be compared, such as tensors, are not."""
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):
        return False


class RequestStop(StopRule):
    """A stop rule that uses, for every request, the criteria and the limit of this request.

    Attributes:
        own: The stop rules of the requests, by number.
    """

    def __init__(self) -> None:
        super().__init__(StoppingCriteriaList())
        self.max_length = MOST_TOKENS
        self.own: dict[int, StopRule] = {}

    def give(self, request: int, rule: StopRule) -> None:
        """Takes in a request, with its stop rule."""
        self.own[request] = rule

    def take(self, request: int) -> None:
        """Forgets a request that has ended."""
        del self.own[request]

    def for_sequence(self, sequence: int) -> StopRule:
        return self.own[sequence]


@dataclass
class StreamStats(GenerationStats):
    """Statistics of a stream, which may have no end.

    `num_accepted` and `offered` have a row for each of the latest [`KEPT_REQUESTS`] requests that drafted, in the
    order in which they first did. All other numbers are totals of the stream.
    """

    def __post_init__(self) -> None:
        self._rows: dict[int, tuple[list[int], list[int]]] = {}
        self._rounds = 0

    @property
    def rounds(self) -> int:
        """Number of rounds of the request with the most rounds."""
        return self._rounds

    def record_round(self, row: int, num_accepted: int, offered: int) -> None:
        """Records one verified round of the request with this number."""
        if row not in self._rows:
            self._rows[row] = [], []
            for kept, new in zip((self.num_accepted, self.offered), self._rows[row], strict=True):
                kept.append(new)
                del kept[:-KEPT_REQUESTS]
        for numbers, number in zip(self._rows[row], (num_accepted, offered), strict=True):
            numbers.append(number)
        self._rounds = max(self._rounds, len(self._rows[row][0]))

    def finish(self, request: int) -> list[int]:
        """Returns the accepted draft tokens of each round of a request that has ended; empty if none drafted."""
        return self._rows.pop(request, ([], []))[0]
