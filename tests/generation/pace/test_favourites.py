"""What rounds over trees and chains reveal about the chain of favourites."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batches import batch_of, greedy
from support.heads import random_heads
from support.targets import shared_target

from hf_specheads import DraftTreeConfig
from hf_specheads.generation.pace.costs import Costs
from hf_specheads.generation.pace.favourites import Favourites, favourites_of_chain, favourites_of_tree
from hf_specheads.generation.pace.gains import ENOUGH_MISSES, ROUNDS_BETWEEN_MISSES, Gains
from hf_specheads.generation.pace.pace import Pace

#        0
#      1   2        1 is likelier than 2,
#     3 4   5       4 likelier than 3
PARENTS, SCORES = [-1, 0, 0, 1, 1, 2], [0.0, -0.1, -2.0, -1.5, -0.3, -2.1]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ([0], Favourites(0, 1, rank=2, at_least=True)),  # neither child was right
        ([0, 2], Favourites(0, 1, rank=1)),
        ([0, 2, 5], Favourites(0, 1, rank=1)),
        ([0, 1], Favourites(1, 2, rank=2, at_least=True)),
        ([0, 1, 3], Favourites(1, 2, rank=1)),
        ([0, 1, 4], Favourites(2, 2)),  # nothing more was drafted there
    ],
    ids=str,
)
def test_accepted_paths_of_a_tree(path, expected):
    assert favourites_of_tree(PARENTS, SCORES, path) == expected


def head(vocabulary: list[int] | None = None) -> SimpleNamespace:
    return SimpleNamespace(draft_vocabulary=None if vocabulary is None else torch.tensor(vocabulary))


@given(st.permutations(range(6)), st.integers(0, 5))
def test_ranks_of_what_chains_missed(order, token):
    """The rank of a token is its place among the children, starting with the likeliest."""
    logits = torch.empty(6).scatter(0, torch.tensor(order), -torch.arange(6.0))
    told = favourites_of_chain(head(), [logits], 1, [token])
    assert told == Favourites(0, 1, rank=max(order.index(token), 1))


def test_tokens_that_heads_cannot_draft():
    logits = torch.tensor([0.0, 3.0, 2.0])  # logits of the target's tokens 5, 7 and 9
    assert favourites_of_chain(head([5, 7, 9]), [logits], 1, [5]).rank == 2
    assert favourites_of_chain(head([5, 7, 9]), [logits], 1, [6]).rank == 3, "no child at all"


def test_heads_that_say_nothing_and_chains_that_are_right():
    nothing = torch.full((3,), torch.nan)
    assert favourites_of_chain(head(), [nothing], 1, [2]) == Favourites(0, 1, rank=1)
    assert favourites_of_chain(head(), [nothing, nothing], 2, [0, 1, 2]) == Favourites(2, 2)
    assert favourites_of_chain(head(), [nothing], 1, [0, 1, 2]) == Favourites(1, 1), "copies come after all links"


@pytest.mark.parametrize("kind", ["chain", "dynamic"])
def test_rounds_of_a_batch_tell_what_became_of_every_sequence(kind, monkeypatch):
    """What is recorded agrees with what was accepted, whatever was drafted."""
    target, (inputs, _), rounds = shared_target(), batch_of(), []
    heads = random_heads(target)
    heads.adaptive = True

    def choose(pace: Pace, *_: object) -> int:
        return next(number for number, tree in enumerate(pace.menu) if tree.kind == kind)

    def record(pace: Pace, choice: int, seconds: float, accepted: list[int], *known: object) -> None:
        rounds.append((accepted, known[2]))

    monkeypatch.setattr(Pace, "choose", choose)
    monkeypatch.setattr(Pace, "record_round", record)
    greedy(target, inputs, assistant_model=heads, max_new_tokens=24)
    assert len(rounds) > 2
    for accepted, told in rounds:
        assert len(told) == len(accepted)
        for number, one in zip(accepted, told, strict=True):
            assert one.accepted <= number and (one.rank > 0) == (one.accepted < one.depth)
            assert one.accepted == number or (kind == "dynamic" and not one.at_least)
    assert any(one.rank for _, told in rounds for one in told)


@pytest.mark.parametrize(("told", "misses"), [(Favourites(0, 1, 1, at_least=True), 0), (Favourites(0, 1, 1), 1)])
def test_a_favourite_without_siblings_tells_nothing_of_them(told, misses):
    menu = (DraftTreeConfig(kind="chain", depth=1, top_k=1, total_tokens=2), DraftTreeConfig())
    gains = Gains(menu, set())
    gains.record(0, 1, [0], Costs(menu), told=[told])
    assert gains.siblings.misses == misses


def test_what_is_known_well_is_asked_less_often():
    menu = (DraftTreeConfig(kind="chain", depth=1, top_k=1, total_tokens=2), DraftTreeConfig())
    gains, costs = Gains(menu, set()), Costs(menu)

    def asked(rounds: int) -> int:
        found = 0
        for number in range(rounds):
            found += (asks := gains.asks_for_favourites(0))
            gains.record(0, number, [0], costs, told=[Favourites(0, 1, 1)] if asks else None)
        return found

    assert asked(ENOUGH_MISSES) == ENOUGH_MISSES
    assert asked(4 * ROUNDS_BETWEEN_MISSES) == 4


def test_copies_are_no_accepted_drafts():
    """Whether a chain was accepted does not depend on a copied path beside it."""
    menu = tuple(DraftTreeConfig(kind="chain", depth=2, top_k=1, total_tokens=3, lookup=copied) for copied in (0, 4))
    costs = Costs(menu)
    one, other = (Gains(menu, set()) for _ in range(2))
    for number in range(1, 9):
        one.record(0, number, [0], costs)
        other.record(1, number, [3], costs, num_drafted=[0])
    one.work_out_again()
    other.work_out_again()
    assert one.acceptance["top_k"].rates(2) == other.acceptance["top_k"].rates(2)
    assert other.given(1, costs) == pytest.approx(one.given(0, costs) + 3.0)
    assert other.given(0, costs) == pytest.approx(one.given(0, costs)), "the chain without copies"
