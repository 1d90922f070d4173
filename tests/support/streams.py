"""Streams of requests: heads that know all texts of a stream, and the resulting texts."""

from __future__ import annotations

from typing import Any

import torch

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
