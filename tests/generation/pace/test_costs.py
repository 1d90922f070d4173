"""Costs of rounds: the expected cost of trees that were never tried, and the expected loss of trials."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hf_specheads import DraftTreeConfig
from hf_specheads.generation.pace.costs import CHEAPEST, PLAIN, Costs
from hf_specheads.generation.pace.menu import trees_to_choose
from hf_specheads.generation.pace.pace import Pace

CHAINS = tuple(
    DraftTreeConfig(kind="chain", depth=depth, top_k=1, total_tokens=depth + 1, children=children)
    for children in ("top_k", "sampled")
    for depth in (2, 4, 8)
)


def seconds_of(tree: DraftTreeConfig, level: float, drawn: float) -> float:
    return 1.1 + (level + drawn * (tree.children == "sampled")) * tree.depth


def levels_of_rounds(chain: DraftTreeConfig, seconds: Callable[[int], float], most: int) -> list[int]:
    """Levels of 160 rounds of a variable-length chain of which at most `most` links are accepted, and always are.
    `seconds` are what a round of so many levels takes; a plain step takes one."""
    pace, moods, levels = Pace((chain,), ending=True), [None], []
    while len(levels) < 160:
        if (choice := pace.choose(100)) == PLAIN:
            pace.record_plain(1.0)
            continue
        reach = pace.reach(choice, moods)
        while reach.keeps([-0.5]) and reach.levels < chain.depth and reach.goes_on():
            pass
        levels.append(reach.levels)
        accepted = [min(most, reach.levels)]
        reach.learn(accepted)
        pace.record_round(choice, seconds(reach.levels), accepted, reach)
    return levels


def test_drawn_levels_have_a_price_of_their_own():
    costs, level, drawn = Costs(CHAINS), 0.15, 0.2
    for _ in range(64):
        costs.record(PLAIN, 1.0)
        for choice in (0, 2, 3):
            costs.record(choice, seconds_of(CHAINS[choice], level, drawn))
    for choice in (1, 4, 5):  # these chains were never tried
        assert costs.expected(choice)[0] == pytest.approx(seconds_of(CHAINS[choice], level, drawn), rel=0.1)
    assert sum(costs.marginal(4)) - sum(costs.marginal(1)) == pytest.approx(drawn, rel=0.2)


def test_links_have_their_price_where_rounds_cost_less_than_plain_steps():
    """Kernels for a few rows may be faster than those for the single row of a plain step. What all rounds save is not
    the price of a link."""
    costs, level = Costs(CHAINS), 0.15
    for _ in range(64):
        costs.record(PLAIN, 1.0)
        for choice in (0, 1):
            costs.record(choice, seconds_of(CHAINS[choice], level, 0.0) - 0.7)
    assert costs.expected(2)[0] == pytest.approx(0.4 + 8 * level, rel=0.1)
    assert sum(costs.marginal(0)) == pytest.approx(level, rel=0.2)


def test_no_round_is_expected_to_cost_nothing():
    costs = Costs(CHAINS)
    for _ in range(64):
        costs.record(PLAIN, 1.0)
        costs.record(1, 0.3)
        costs.record(2, 1.6)
    assert costs.expected(0)[0] == CHEAPEST


@pytest.mark.parametrize("stalled", [0, 1, 2], ids=["none", "plain", "round"])
def test_a_stall_where_the_context_has_grown_changes_no_costs(stalled):
    """The first time measured after a change of context sets the unit of all later times."""
    costs, times = Costs(CHAINS), {PLAIN: 1.0, 0: 1.5, 1: 2.0}
    for _ in range(16):
        for choice, seconds in times.items():
            costs.record(choice, seconds)
    before = [costs.own(choice) for choice in (0, 1)]
    costs.begin_context()
    costs.record(PLAIN, 4.0 if stalled == 1 else 1.0)
    costs.record(0, 6.0 if stalled == 2 else 1.5)
    assert costs.unit == pytest.approx(1.0)
    for choice in (0, 1, 1, 0, 2, 2):
        costs.record(choice, times.get(choice, 3.0))
    assert [costs.own(choice) for choice in (0, 1)] == pytest.approx(before)
    assert costs.own(2) == pytest.approx(3.0)


def test_chains_that_end_where_they_like_cost_what_those_of_as_many_levels_do():
    """What is learnt about a number of levels applies to all rounds with this many levels, whatever was timed
    first."""
    chain = DraftTreeConfig(kind="chain", depth=4, top_k=1, total_tokens=5)
    costs = Costs((chain,), ending={0})
    for levels in (2, 2, 2, 4) * 16:
        costs.record(PLAIN, 1.0)
        costs.record(0, 1.0 + 0.1 * levels, levels)
    assert costs.own(0) == pytest.approx(0.75 * 1.2 + 0.25 * 1.4, rel=0.01)


def test_a_stall_among_the_first_plain_steps_is_no_measure():
    """The first plain step is the unit of all others. If the second one stalls, plain steps must not look more
    expensive."""
    costs = Costs(CHAINS)
    for choice, seconds in [(PLAIN, 1.0), (0, 1.5), (0, 1.5), (PLAIN, 4.0), (0, 1.5), (0, 1.5)]:
        costs.record(choice, seconds)
    assert costs.plain_seconds == pytest.approx(1.0, rel=0.05)
    assert costs.own(0) == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_trials_of_what_is_dearer_and_gives_the_same_stay_few(seed):
    """Chains of free length might always end better in future. The expected loss of trying them must be based on what
    they have given, not on this hope."""
    chain, farthest, batch = DraftTreeConfig(kind="chain", depth=4, top_k=1, total_tokens=5), 16, 8
    menu = trees_to_choose(chain, None, lambda tree: None, drawn=True, farthest=farthest)
    pace, draw, rounds, drawn = Pace(menu, ending=True), random.Random(seed), 600, 0
    for _ in range(rounds):
        if (choice := pace.choose(100)) == PLAIN:
            pace.record_plain(1.0)
            continue
        reach = pace.reach(choice, [None] * batch)
        while reach.keeps([-0.1] * batch) and reach.levels < farthest and reach.goes_on():
            pass
        accepted = [next((n for n in range(reach.levels) if draw.random() > 0.95), reach.levels) for _ in range(batch)]
        reach.learn(accepted)
        pace.record_round(choice, 1.1 + (0.3 if reach.drawn else 0.2) * reach.levels, accepted, reach)
        drawn += reach.drawn
    assert drawn < 0.045 * rounds


@pytest.mark.parametrize("first", [1.2, 1.9, 3.0])
def test_the_first_round_over_a_tree_is_not_held_against_it(first: float) -> None:
    """The first round prepares what later ones reuse. Of two trees with equal cost, the tree tried once must not look
    more expensive. It may look cheaper."""
    costs = Costs([DraftTreeConfig(kind="chain", depth=depth, top_k=1, total_tokens=depth + 1) for depth in (3, 4)])
    for _ in range(4):
        costs.record(PLAIN, 1.0)
    for seconds in (1.9, 1.5, 1.5, 1.5):
        costs.record(0, seconds)
    before = costs.cost(1)
    costs.record(1, first)
    assert costs.expected(1)[0] == pytest.approx(before), "nor against others like it"
    assert costs.cost(1) == pytest.approx(before) if first > before else costs.cost(1) < before
    costs.record(1, 1.6)
    assert costs.own(1) == pytest.approx(min(first, 1.6), abs=0.01), "the faster of two"
    assert costs.expected(1)[0] != pytest.approx(before)


@pytest.mark.parametrize("found", [0, 3])
def test_a_chain_costs_as_many_nodes_as_it_found_to_copy(found: int) -> None:
    """A node has its price even if texts never repeat, so that chains have fewer nodes than they may have."""
    chain = DraftTreeConfig(kind="chain", depth=8, top_k=1, total_tokens=9)
    wide = DraftTreeConfig(kind="dynamic", depth=6, top_k=10, total_tokens=60)
    costs = Costs((chain, chain.replace(lookup=8), wide), ending={0, 1})
    for levels in (1, 2, 4, 6) * 16:
        costs.record(PLAIN, 1.0)
        costs.record(0, 1.0 + 0.1 * levels, levels)
        costs.record(1, 1.0 + 0.1 * levels + 0.04 * found, levels, found)
        costs.record(2, 1.0 + 0.06 * 6 + 0.04 * 59)
    assert costs.expected(0)[0] == pytest.approx(costs.own(0), rel=0.05)
    assert costs.expected(1)[0] == pytest.approx(costs.own(1), rel=0.05)
    assert costs.marginal(0) == (pytest.approx(0.06, rel=0.2), pytest.approx(0.04, rel=0.1))


@pytest.mark.parametrize("seed", range(4))
def test_no_link_is_drafted_in_vain_where_rounds_cost_less_than_plain_steps(seed: int) -> None:
    chain, draw = DraftTreeConfig(kind="chain", depth=16, top_k=1, total_tokens=17), random.Random(seed)
    levels = levels_of_rounds(chain, lambda levels: (0.45 + 0.13 * levels) * draw.gauss(1.0, 0.02), most=1)
    assert levels[32:].count(1) > 0.85 * len(levels[32:])


def test_depths_seen_with_copies_are_known_without_them():
    """How well deep drafts fare does not depend on what is copied after them, so chains explore depths together."""
    chain = DraftTreeConfig(kind="chain", depth=8, top_k=1, total_tokens=9)
    costs = Costs((chain, chain.replace(lookup=8), chain.replace(children="sampled")), ending={0, 1, 2})
    for choice, levels in ((PLAIN, None), (0, 3), (1, 3), (1, 3)):
        costs.record(choice, 1.0, levels)
    assert [costs.levels_to_draft(choice, 0)[0] for choice in range(3)] == [3, 3, 0]


@pytest.mark.parametrize("seed", range(4))
def test_one_level_more_is_taken_where_it_costs_less(seed: int) -> None:
    """Kernels may take longer for three rows than for four. After a few such observations, no round drafts two links,
    even if the third is never accepted."""
    chain, draw = DraftTreeConfig(kind="chain", depth=16, top_k=1, total_tokens=17), random.Random(seed)
    costs = {1: 2.1, 2: 2.85, 3: 2.55, 4: 2.8}

    def seconds(levels: int) -> float:
        return costs.get(levels, 2.8 + 0.35 * (levels - 4)) * draw.gauss(1.0, 0.02)

    levels = levels_of_rounds(chain, seconds, most=2)
    assert levels[32:].count(2) < 0.05 * len(levels[32:])
    assert levels[32:].count(3) > 0.85 * len(levels[32:])
