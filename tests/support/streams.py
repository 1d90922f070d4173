"""Streams of requests: heads that know all texts, processors and criteria with a state, and the resulting texts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from support.stubs import StubCache, StubHead


class StreamOracle(StubHead):
    """Heads that know all texts, and recognise the text of a row by the tokens it begins with."""

    def new_draft_cache(self) -> StubCache:
        return OracleCache([-1])

    def start_draft(self, cache: Any, token_ids: torch.Tensor, features: torch.Tensor) -> Any:
        for place, row in enumerate(cache.rows):
            if row < 0:
                begin = token_ids[place].tolist()
                [cache.rows[place]] = [n for n, text in enumerate(self.truth) if text[: len(begin)] == begin]
        return super().start_draft(cache, token_ids, features)


class OracleCache(StubCache):
    """A cache whose rows change places with those of the batch."""

    def put_sequence(self, place: int, other: Any, batch: int, device: torch.device) -> None:
        super().put_sequence(place, other, batch, device)
        self.rows[place : place + 1] = other.rows


def texts_of(found: list[Any]) -> list[list[int]]:
    """Returns the texts in the order of the requests, and checks that each request occurs once."""
    assert sorted(one.index for one in found) == list(range(len(found)))
    return [one.token_ids for one in sorted(found, key=lambda one: one.index)]


class NoTokenTwice(LogitsProcessor):
    """Forbids the tokens that it has seen last in a text, which it remembers from call to call."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(int(input_ids[0, -1]))
        scores[:, self.seen] = -torch.inf
        return scores


class EndsAfter(StoppingCriteria):
    """Ends a text after a number of calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.left -= 1
        return torch.full((len(input_ids),), self.left <= 0)
