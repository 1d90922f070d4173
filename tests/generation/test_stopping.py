"""Stopping inside a block: the first token that ends a generation ends it, whatever was accepted after it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from hf_specheads.generation.stopping import StopRule


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
        ([MaxTimeCriteria(1000)], True),
        ([Custom()], True),
        ([type("Derived", (MaxLengthCriteria,), {})(9)], True),
    ],
    ids=["known", "time", "user", "derived"],
)
def test_everything_but_length_and_eos_is_asked_for_every_token(criteria, per_token):
    assert rule(*criteria).per_token is per_token


def test_met_asks_every_criterion():
    stop = rule(MaxLengthCriteria(9), Custom())
    assert stop.met(torch.tensor([[1, 5]]), None)
    assert not stop.met(torch.tensor([[5, 1]]), None)
    assert stop.max_length == 9
