"""What rounds over one chain reveal about other chains, and for how long."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specheads.generation.pace import tallies
from hf_specheads.generation.pace.tallies import Acceptance, Siblings, Tried, candidates_of, tokens_of
from hf_specheads.tree.config import DraftTreeConfig

DEEPEST = 8


def text_in_runs(positions: int, stays: float, seed: int) -> list[bool]:
    """Tells for each token whether a draft of it is right. Easy and hard stretches alternate."""
    chance, easy, right = random.Random(seed), True, []
    for _ in range(positions):
        easy = easy if chance.random() < stays else not easy
        right.append(chance.random() < (0.97 if easy else 0.25))
    return right


def rounds_of(right: list[bool], depth: int) -> list[int]:
    """Returns the accepted drafts of every round of a chain over a text. The bonus token is right whatever the draft
    was."""
    found, place = [], 0
    while place + depth < len(right):
        number = next((number for number in range(depth) if not right[place + number]), depth)
        found.append(number)
        place += number + 1
    return found


def mean_tokens(right: list[bool], depth: int) -> float:
    numbers = rounds_of(right, depth)
    return 1 + sum(numbers) / len(numbers)


@pytest.mark.parametrize("depth", [3, 6, 8])
@pytest.mark.parametrize("stays", [0.8, 0.97])
def test_deep_chains_tell_of_shallow_ones(depth, stays):
    """Rates by position alone would underestimate shallow chains by up to an eighth."""
    right = text_in_runs(60_000, stays, seed=depth)
    acceptance = Acceptance(DEEPEST)
    for number in rounds_of(right, depth):
        acceptance.record([depth], [number])
    for shallow in range(1, depth + 1):
        # other memories only know the last stretch
        expected = tokens_of(acceptance.memories[-1].rates(DEEPEST)[:shallow])
        assert expected == pytest.approx(mean_tokens(right, shallow), rel=0.08), shallow


def test_shallow_chains_tell_of_deep_ones_what_positions_let_expect():
    acceptance, chance = Acceptance(DEEPEST), random.Random(0)
    for _ in range(4000):
        depth = chance.choice([2, 2, 2, 4])
        acceptance.record([depth], [next((n for n in range(depth) if chance.random() > 0.7), depth)])
    for depth in (1, 2, 4, 8):
        assert tokens_of(acceptance.rates(DEEPEST)[:depth]) == pytest.approx(tokens_of([0.7] * depth), rel=0.1)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, DEEPEST), st.lists(st.integers(0, DEEPEST), min_size=1, max_size=4)),
                max_size=60))  # fmt: skip
def test_rates_are_rates(rounds):
    acceptance = Acceptance(DEEPEST)
    for depth, numbers in rounds:
        acceptance.record([depth] * len(numbers), numbers)
        acceptance.record_tree([1.7] * depth, [min(number, depth) for number in numbers])
    assert all(0 < rate < 1 for rate in acceptance.rates(DEEPEST))
    assert acceptance.rates(3) == acceptance.rates(DEEPEST)[:3]


@pytest.mark.parametrize("depth", [2, 150])
def test_heads_of_no_use_and_very_deep_chains(depth):
    """The probabilities of the last positions are too small to be represented."""
    acceptance = Acceptance(150)
    for _ in range(300):
        acceptance.record([depth], [0])
    assert 1 < tokens_of(acceptance.rates(150)) < 1.1


def test_a_text_that_changes_is_noticed_and_one_that_does_not_is_known_well():
    acceptance, chance = Acceptance(DEEPEST), random.Random(1)

    def read(rate: float, rounds: int) -> float:
        for _ in range(rounds):
            acceptance.record([2], [next((n for n in range(2) if chance.random() > rate), 2)])
        return acceptance.rates(1)[0]

    steady = [read(0.5, 50) for _ in range(40)][10:]
    assert max(steady) - min(steady) < 0.12, "sixteen rounds alone swing by four times as much"
    assert read(0.95, 40) > 0.8


def test_weights_that_grow_are_made_lighter(monkeypatch):
    numbers = [n % 5 for n in range(300)]
    rates = []
    for heavy in (tallies.HEAVY, 3.0):
        monkeypatch.setattr(tallies, "HEAVY", heavy)
        acceptance = Acceptance(DEEPEST)
        for number in numbers:
            acceptance.record([4], [number])
            acceptance.record_tree([1.5] * 3, [number % 4])
        rates.append(acceptance.rates(DEEPEST))
        assert max(memory.weight for memory in acceptance.memories) <= 1.1 * heavy
    assert rates[0] == pytest.approx(rates[1])


def test_a_hard_stretch_is_not_the_last_word():
    """Plain steps reveal nothing about drafts. What was seen just before them is therefore forgotten over time, or at
    the end of the text."""

    def after_a_hard_stretch() -> Acceptance:
        acceptance, chance = Acceptance(DEEPEST), random.Random(2)
        for round_ in range(600):
            rate = 0.05 if round_ % 60 >= 40 else 0.9
            acceptance.record([2], [next((n for n in range(2) if chance.random() > rate), 2)])
        return acceptance

    usual = after_a_hard_stretch().memories[1].rates(1)[0]
    for passes_over in ([Acceptance.record_plain] * 200, [Acceptance.begin_text] * 3):
        acceptance = after_a_hard_stretch()
        assert acceptance.rates(1)[0] < usual - 0.1
        for pass_over in passes_over:
            pass_over(acceptance)
        assert acceptance.rates(1)[0] == pytest.approx(usual, abs=0.03)


@settings(max_examples=50)
@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=8), st.integers(2, 60), st.integers(2, 10))
def test_nodes_of_a_dynamic_tree_are_where_rounds_come_to(rates, nodes, top_k):
    tree = DraftTreeConfig(depth=len(rates), top_k=top_k, total_tokens=min(nodes, len(rates) * top_k + 1))
    found = candidates_of(tree, rates)
    assert len(found) == len(rates) and sorted(found, reverse=True) == found
    assert max(found) <= top_k and sum(found) <= tree.num_nodes - 1 + 1e-6
    chain = DraftTreeConfig(kind="chain", depth=len(rates), top_k=1, total_tokens=len(rates) + 1)
    assert candidates_of(chain, rates) == [1.0] * len(rates)
    assert Siblings().tokens(chain, rates) == pytest.approx(tokens_of(rates))


def test_a_deep_tree_of_few_nodes_gives_no_less_than_a_shallow_one():
    """The estimate must not spread nodes evenly over levels that rounds hardly reach."""
    rates = [0.5, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4]
    deep, shallow = (DraftTreeConfig(depth=depth, top_k=6, total_tokens=12) for depth in (8, 3))
    assert Siblings().tokens(deep, rates) > Siblings().tokens(shallow, rates[:3]) - 0.05


def ranks(generator: random.Random, rounds: int, rate: float, exponent: float) -> list[int]:
    """Returns ranks of right children. k children are all wrong as often as one is, k ** exponent times in a row."""
    found = []
    for _ in range(rounds):
        chance = generator.random()
        found.append(next((rank for rank in range(40) if chance > (1 - rate) ** (rank + 1) ** exponent), 40))
    return found


@pytest.mark.parametrize("exponent", [0.2, 0.4, 0.8])
def test_what_chains_missed_tells_what_trees_would_give(exponent):
    """The estimate works without ever having tried a tree."""
    siblings, rate = Siblings(), 0.6
    for rank in ranks(random.Random(3), 1500, rate, exponent):
        if rank:
            siblings.record_miss(rate, rank)
    assert siblings.exponent == pytest.approx(exponent, abs=0.1)
    wide = DraftTreeConfig(depth=1, top_k=5, total_tokens=6)
    assert siblings.tokens(wide, [rate]) == pytest.approx(2 - (1 - rate) ** 5**exponent, abs=0.05)


def test_trees_that_had_no_such_child_tell_less_but_nothing_wrong():
    siblings, rate = Siblings(), 0.6
    for rank in ranks(random.Random(4), 3000, rate, 0.4):
        if rank:
            siblings.record_miss(rate, min(rank, 3), at_least=rank >= 3)
    assert siblings.exponent == pytest.approx(0.4, abs=0.1)


def test_a_tree_that_was_tried_where_the_text_was_easy():
    """What the tree gave is compared with what was expected in that text."""
    tried = Tried()
    for number in range(256):
        tried.record(number, tokens=4.4, expected=4.0, copied=0.0)
    assert 1.03 < tried.tokens_drafted(2.0) / 2.0 < 1.1, "a tenth better than expected, where the text is hard too"
    assert Tried().tokens_drafted(3.0) == 3.0


def test_rounds_of_several_sequences_tell_as_much_as_so_many_rounds():
    alone, together = Tried(), Tried()
    for number in range(64):
        alone.record(number, tokens=4.4, expected=4.0, copied=0.0)
    for number in range(16):
        together.record(number, tokens=4.4, expected=4.0, copied=0.0, sequences=4)
    assert together.tokens_drafted(2.0) == pytest.approx(alone.tokens_drafted(2.0))
