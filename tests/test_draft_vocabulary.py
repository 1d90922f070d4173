"""Draft vocabularies as offsets and truth values."""

from __future__ import annotations

import pytest
import torch

from hf_specheads.draft_vocabulary import mapping_of, mapping_problem


def test_offsets_lead_to_the_tokens() -> None:
    d2t, t2d = mapping_of([8, 2, 3], 10)
    assert d2t.tolist() == [2, 2, 6] and t2d.nonzero()[:, 0].tolist() == [2, 3, 8]
    logits = torch.arange(10.0)
    assert torch.equal(logits[t2d], logits[torch.arange(3) + d2t])
    assert mapping_problem(d2t, t2d) is None


@pytest.mark.parametrize("token_ids", [[], [3, 3], [-1, 2], [10], list(range(11)), [[1, 2]]], ids=str)
def test_what_is_no_vocabulary_is_refused(token_ids: list) -> None:
    with pytest.raises(ValueError, match="frequent_tokens"):
        mapping_of(token_ids, 10)


@pytest.mark.parametrize(
    ("d2t", "tokens", "words"),
    [
        ([2, 2, 6], [2, 3], "marks 2 tokens, and `d2t` has 3"),
        ([2, 2, 6], [2, 3, 9], "disagree about which tokens"),
        ([2, 1, 6], [2, 8], "must be ascending"),
        ([2, 2, 8], [2, 3], "token id 10"),
        ([-1, 2, 6], [2, 3], "token id -1"),
    ],
)
def test_contradictions_are_named(d2t: list[int], tokens: list[int], words: str) -> None:
    t2d = torch.zeros(10, dtype=torch.bool)
    t2d[tokens] = True
    assert words in mapping_problem(torch.tensor(d2t), t2d)
