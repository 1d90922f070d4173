"""Stopping inside a block: the first token that ends a generation ends it, whatever was accepted after it."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MaxTimeCriteria, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from hf_specheads.generation.stopping import StopRule, cut_blocks


def rule(*criteria: StoppingCriteria) -> StopRule:
    return StopRule(StoppingCriteriaList(criteria))


@settings(deadline=None)
@given(
    block=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    length=st.integers(1, 10),
    room=st.integers(1, 12),
    eos=st.lists(st.integers(0, 6), max_size=3),
)
def test_cut_equals_asking_the_criteria_token_by_token(block, length, room, eos):
    criteria = [MaxLengthCriteria(length + room)]
    if eos:
        criteria.append(EosTokenCriteria(torch.tensor(eos)))
    ids, kept, stopped = torch.full((1, length), 9), 0, False
    for token in block:
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        kept += 1
        if stopped := bool(StoppingCriteriaList(criteria)(ids, None).all()):
            break
    assert rule(*criteria).cut(block, length) == (kept, stopped)


PIECES = ["<pad>", *"abcdef", "ab", "ba", "aab", "bb"]  # strings may end within a token, or span several


@functools.cache
def strings(*wanted: str) -> StopStringCriteria:
    pieces = models.BPE(
        vocab={piece: index for index, piece in enumerate(PIECES)},
        merges=[("a", "b"), ("b", "a"), ("a", "ab"), ("b", "b")],
    )
    core = Tokenizer(pieces)
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return StopStringCriteria(PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>"), list(wanted))


def naive_cut(block: list[int], ids: torch.Tensor, criteria: StoppingCriteriaList) -> tuple[int, bool]:
    for kept, token in enumerate(block, start=1):
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        if bool(criteria(ids, None).all()):
            return kept, True
    return len(block), False


texts = st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=9)
endings = st.tuples(
    st.integers(1, 9), st.integers(0, 12), st.sampled_from([(), ("aba",), ("b", "abba"), ("bbabab",), ("cd", "e")])
)


@settings(deadline=None, max_examples=200)
@given(rows=st.lists(st.tuples(texts, texts, endings), min_size=1, max_size=4))
def test_blocks_are_cut_where_asking_row_by_row_and_token_by_token_stops(rows):
    given_criteria = []
    for text, _, (room, eos, wanted) in rows:
        known = [MaxLengthCriteria(len(text) + room), EosTokenCriteria(torch.tensor([eos]))]
        given_criteria.append(StoppingCriteriaList([*known, *([strings(*wanted)] if wanted else [])]))
    ids, blocks = [torch.tensor([text]) for text, *_ in rows], [block for _, block, _ in rows]
    rules = [rule(*criteria) for criteria in given_criteria]
    expected = [naive_cut(*one) for one in zip(blocks, ids, given_criteria, strict=True)]
    assert not any(one.per_token for one in rules)
    assert cut_blocks(blocks, ids, rules) == expected


def test_a_criterion_of_strings_is_asked_once_for_all_blocks(monkeypatch):
    asked, criterion = [], strings("aba")

    def ask(self: StopStringCriteria, ids: torch.Tensor, scores: None) -> torch.Tensor:
        asked.append(ids.shape)
        return torch.zeros(len(ids), dtype=torch.bool)

    monkeypatch.setattr(StopStringCriteria, "__call__", ask)
    rules = [rule(criterion), rule(), rule(MaxLengthCriteria(50), criterion)]
    cut_blocks([[1, 2, 3], [4], [5, 6]], [torch.ones(1, length).long() for length in (1, 5, 30)], rules)
    assert asked == [(5, criterion.maximum_token_len)]


def test_no_criteria_never_stop():
    assert rule().cut([1, 2, 3], 100) == (3, False)
    assert rule().max_length is None


class Custom(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids[0, -1].item() == 5])


@pytest.mark.parametrize(
    ("criteria", "per_token"),
    [
        ([MaxLengthCriteria(9), EosTokenCriteria(torch.tensor([2]))], False),
        ([strings("aba")], False),
        ([MaxTimeCriteria(1000)], True),
        ([Custom()], True),
        ([type("Derived", (MaxLengthCriteria,), {})(9)], True),
    ],
    ids=["known", "strings", "time", "user", "derived"],
)
def test_criteria_that_blocks_cannot_be_cut_by_are_asked_for_every_token(criteria, per_token):
    assert rule(*criteria).per_token is per_token


def test_met_asks_every_criterion():
    stop = rule(MaxLengthCriteria(9), Custom())
    assert stop.met(torch.tensor([[1, 5]]), None)
    assert not stop.met(torch.tensor([[5, 1]]), None)
    assert stop.max_length == 9
