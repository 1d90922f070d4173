"""Chains that end where another link would not pay: what is foreseen, where they end, and that texts stay the same."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import alone_texts, assert_rows, batch_of, greedy
from support.distributions import chi_square, critical_value, five_token_target, sample, target_distribution
from support.heads import random_heads
from support.stubs import TableHead
from support.targets import plain, prompt, shared_target
from transformers import LogitsProcessorList

from hf_specheads import DraftTreeConfig, generate_stream
from hf_specheads.cache.draft import DraftCache
from hf_specheads.generation.drafting.foresight import Foresight, Reach, mood_after
from hf_specheads.generation.drafting.grow import grow_tree
from hf_specheads.generation.pace.costs import Costs
from hf_specheads.generation.pace.favourites import Favourites
from hf_specheads.generation.pace.lessons import _usual_tree
from hf_specheads.generation.pace.menu import FARTHEST, FARTHEST_AT_ONCE, farthest_chain, trees_to_choose
from hf_specheads.generation.pace.pace import PLAIN, Pace
from hf_specheads.generation.sampling import DraftSampler
from hf_specheads.tree.default import CPU_TREE

CHAIN = DraftTreeConfig(kind="chain", depth=5, top_k=1, total_tokens=6)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# ---------------------------------------------------------------------- what is foreseen
@pytest.mark.parametrize(
    ("known", "sure", "mood"), [(0.0, 1.0, 0.0), (-1.0, 1.5, 0.5), (2.0, 0.0, 0.0), (0.5, 0.3, 1.5)]
)
def test_it_learns_what_heads_confidence_and_the_mood_say(known, sure, mood):
    """Heads that are believed, promise too much, are right whatever they say, or have good times and bad ones."""
    rng, foresight = random.Random(1), Foresight()

    def link() -> tuple[tuple[float, float, float], float]:
        traits = foresight.traits(math.log(rng.uniform(0.02, 0.98)), rng.random())
        return traits, sigmoid(known * traits[0] + sure * traits[1] + mood * traits[2])

    for _ in range(3000):
        traits, chance = link()
        foresight.learn(0, traits, rng.random() < chance)
    errors = [abs(foresight.chance(0, traits) - chance) for traits, chance in (link() for _ in range(300))]
    assert sum(errors) / len(errors) < 0.05


def test_at_first_heads_are_believed():
    foresight = Foresight()
    for probability in (0.1, 0.5, 0.9):
        traits = foresight.traits(math.log(probability), 0.5)
        assert foresight.chance(0, traits) == pytest.approx(sigmoid(0.5 * math.log(probability / (1 - probability))))


def test_another_pair_is_learnt_anew():
    """What was seen long ago is forgotten."""
    rng, foresight = random.Random(2), Foresight()
    for share in (0.95, 0.2):
        for _ in range(4000):
            foresight.learn(0, foresight.traits(-0.5, 0.5), rng.random() < share)
        assert foresight.chance(0, foresight.traits(-0.5, 0.5)) == pytest.approx(share, abs=0.1)


def test_positions_from_which_on_a_head_knows_nothing_are_found():
    """Whatever it says there."""
    foresight = Foresight()
    for _ in range(200):
        for position in range(4):
            foresight.learn(position, foresight.traits(-0.5, 0.5), position < 2)
    chances = [foresight.chance(position, foresight.traits(-0.5, 0.5)) for position in range(4)]
    assert min(chances[:2]) > 0.85 and max(chances[2:]) < 0.15
    assert foresight.chance_at(9, 0.5) == pytest.approx(foresight.chance_at(3, 0.5)), "as the deepest that is known"


@pytest.mark.parametrize("sureness", [-9.0, -6.0])
def test_one_link_that_the_head_was_unsure_of_does_not_end_all_chains(sureness):
    """What was first seen of a position is no measure of what comes, and is not seen again where chains end above."""
    foresight = Foresight()
    for position in range(3):
        foresight.learn(position, foresight.traits(-0.1 if position == 0 else sureness, 0.7), accepted=True)
    assert foresight.chance_at(1, 0.7) > 0.7 and foresight.chance_at(2, 0.7) > 0.7


def test_heads_that_are_wrong_about_themselves_are_known_by_what_was_accepted():
    """Random heads are sure of nothing; a stub makes their first two tokens right all the same."""
    foresight = Foresight()
    for _ in range(60):
        for position in range(3):
            foresight.learn(position, foresight.traits(-9.0, 0.8), position < 2)
    chances = [foresight.chance_at(position, 0.8) for position in range(3)]
    assert min(chances[:2]) > 0.9 and chances[2] < 0.1


@given(st.lists(st.booleans(), max_size=60), st.floats(0, 1))
def test_chances_are_probabilities(accepted, mood):
    foresight = Foresight()
    for one in accepted:
        foresight.learn(0, foresight.traits(-0.5, mood), one)
    assert 0 < foresight.chance_at(0, mood) < 1 and 0 < foresight.chance_at(5, mood) < 1


@pytest.mark.parametrize("broken", [math.nan, -math.inf, 1.0])
def test_heads_that_overflow_leave_no_trace(broken):
    foresight = Foresight()
    reach = Reach(foresight, [0.5], 0.1, 0.02)
    assert reach.keeps([broken])
    reach.goes_on()
    reach.learn([0])
    assert all(map(math.isfinite, (*foresight.weights, *reach.moods, foresight.chance_at(0, 0.5))))


def test_the_mood_follows_what_is_accepted():
    assert mood_after(0.5, 0, 3) < 0.5 < mood_after(0.5, 1, 1) < mood_after(0.5, 3, 3)
    assert mood_after(0.5, 3, 4) < mood_after(0.5, 3, 3), "the fourth was rejected"
    assert mood_after(0.5, 7, 4) == mood_after(0.5, 4, 4), "copies after the chain are no drafts"
    assert mood_after(0.5, 0, 0) == 0.5


# ---------------------------------------------------------------------- where chains end
def grown_by(reach: Reach, sureness: list[list[float]]) -> int:
    """Links of a chain by its log-probabilities, [link][sequence]."""
    for link in sureness:
        if not reach.keeps(link) or not reach.goes_on():
            break
    return reach.levels


SURENESS = st.lists(st.lists(st.floats(-8, 0), min_size=2, max_size=2), min_size=1, max_size=6)


@given(sureness=SURENESS, link=st.floats(0.01, 1.5), share=st.floats(0, 1), drawn=st.booleans())
def test_the_dearer_a_link_the_shorter_the_chain(sureness, link, share, drawn):
    def levels(link: float) -> int:
        return grown_by(Reach(Foresight(), [0.5, 0.9], link, share * link, drawn), sureness)

    assert 1 <= levels(link) <= levels(link / 2) <= len(sureness)
    assert levels(1e-12) == len(sureness)


@given(sureness=SURENESS, node=st.floats(0.01, 1.0))
def test_a_link_that_is_not_worth_verifying_is_left_out_unless_it_was_drawn(sureness, node):
    """Whether a drawn link is verified must not depend on what was drawn."""
    assert grown_by(Reach(Foresight(), [0.5, 0.5], 0.0, node, drawn=True), sureness) == len(sureness)
    reach = Reach(Foresight(), [0.5, 0.5], 0.0, node)
    levels = grown_by(reach, sureness)
    assert sum(reach.likely) / 2 >= node or levels == 1
    assert reach.drafted == levels + (levels < len(sureness))


@pytest.mark.parametrize("dear", [1, 2, 3, 4])
def test_chains_go_on_past_links_that_are_dear_to_those_that_are_cheap(dear):
    """Kernels for some numbers of rows may take long, or seem to: what lies behind them decides, too."""
    steps = [0.0, 0.0, *[0.9] * dear, 0.0, 0.0]
    reach = Reach(Foresight(), [0.9], 0.2, 0.02, steps=steps, farthest=16)
    assert grown_by(reach, [[0.0]] * 16) == 16
    unlikely = Reach(Foresight(), [0.05], 0.2, 0.02, steps=steps, farthest=16)
    assert grown_by(unlikely, [[-6.0]] * 16) == 1


def test_it_says_what_ended_a_chain_and_how_likely_another_link_was():
    limited = Reach(Foresight(), [0.9], 1e-6, 0.0)
    assert limited.keeps([-0.1]) and limited.goes_on() and not limited.ended
    dear = Reach(Foresight(), [0.1], 0.99, 0.0)
    assert dear.next_chance is None
    assert dear.keeps([-0.1]) and not dear.goes_on() and dear.ended
    assert dear.next_chance == pytest.approx(dear.foresight.chance_at(1, 0.1))
    left_out = Reach(Foresight(), [0.9], 0.1, 0.9)
    assert left_out.keeps([-0.01]) and left_out.goes_on() and not left_out.keeps([-5.0])
    assert left_out.ended and left_out.levels == 1
    seen = left_out.foresight.traits(-5.0, 0.9)  # of the link that was seen, not of any
    assert left_out.next_chance == pytest.approx(left_out.foresight.chance(1, seen))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("children", ["top_k", "sampled"])
def test_a_chain_that_ends_is_the_beginning_of_a_whole_one(rows, children):
    lengths = set()
    for seed in range(40):
        head = TableHead(seed, rows, **CHAIN.replace(children=children).to_dict())
        roots, features = torch.full((rows, 1), 20), torch.zeros(rows, 1, 2)
        reach = Reach(Foresight(), [0.5] * rows, 0.05, 0.02, drawn=children == "sampled")
        grown = []
        for one in (None, reach):
            torch.manual_seed(seed)
            sampler = DraftSampler(LogitsProcessorList(), roots) if children == "sampled" else None
            grown.append(grow_tree(head, DraftCache(0), head.tree_config, roots, features, 5, sampler, one))
        whole, tree = grown
        assert tree.max_depth == reach.levels and whole.max_depth == 5
        assert torch.equal(tree.token_ids, whole.token_ids[:, : tree.num_nodes])
        torch.testing.assert_close(tree.scores, whole.scores[:, : tree.num_nodes])
        assert (tree.sampled is None) == (children == "top_k")
        lengths.add(reach.levels)
    assert len(lengths) > 1


# ---------------------------------------------------------------------- the engine
def test_one_chain_instead_of_several_depths():
    menu = trees_to_choose(CPU_TREE, None, lambda tree: None, farthest=FARTHEST)
    assert menu[0] == CPU_TREE and [tree.depth for tree in menu if tree.kind == "chain"] == [FARTHEST]
    assert trees_to_choose(CHAIN, 4, lambda tree: None, farthest=FARTHEST) == (CHAIN.replace(depth=4, total_tokens=5),)
    stops = CHAIN.replace(depth=20, stop_below=0.3)
    assert [
        (tree.depth, tree.stop_below) for tree in trees_to_choose(stops, None, lambda _: None, farthest=FARTHEST)
    ] == [(20, 0)]


def test_accelerators_and_copies_know_no_such_chains(monkeypatch):
    """There a look at the draft is a wait for the device; what only copies is not more or less sure."""
    target = shared_target("llama")
    heads = random_heads(target, "eagle").bind(target)
    assert farthest_chain(heads, target) == FARTHEST
    assert farthest_chain(random_heads(target, "peagle").bind(target), target) == FARTHEST_AT_ONCE
    assert farthest_chain(random_heads(target, "lookup").bind(target), target) == 0
    monkeypatch.setattr(type(heads), "device", torch.device("meta"))
    assert farthest_chain(heads, target) == 0


class Moody:
    """A text in which drafts are accepted in good times, and a head that is the surer the better it is.

    Args:
        level: What a draft level and its node cost, in plain steps.
        seed: Of the random numbers.
    """

    def __init__(self, level: float, seed: int):
        self.level, self.random = level, random.Random(seed)

    def chain(self) -> list[tuple[float, bool]]:
        """Log-probability of every link, and whether it would be accepted."""
        links = []
        for _ in range(FARTHEST):
            chance = self.random.choice([0.15, 0.95, 0.98])
            links.append((math.log(chance), self.random.random() < chance))
        return links

    def seconds(self, levels: int, nodes: int) -> float:
        return 1 + self.level * levels + 0.02 * nodes

    def rate(self, depth: int, rounds: int = 4000) -> float:
        """Tokens per plain step of chains that are always so deep."""
        tokens = sum(1 + accepted_of(self.chain(), depth) for _ in range(rounds))
        return tokens / (rounds * self.seconds(depth, depth))


def accepted_of(chain: list[tuple[float, bool]], depth: int) -> int:
    return next((place for place, (_, good) in enumerate(chain[:depth]) if not good), depth)


@pytest.mark.parametrize("level", [0.05, 0.15, 0.4])
def test_better_than_any_fixed_depth(level):
    """Where heads know when they are wrong: more than the best depth gives, trials and learning included."""
    best = max(Moody(level, 7).rate(depth) for depth in (1, 2, 3, 4, 6, 8))
    rates = []
    for seed in range(3):
        menu = trees_to_choose(CHAIN, None, lambda tree: None, farthest=FARTHEST)
        pace, world, moods, tokens, seconds = Pace(menu, ending=True), Moody(level, seed), [None], 0, 0.0
        for _ in range(600):
            if (choice := pace.choose(100)) == PLAIN:
                pace.record_plain(1.0)
                tokens, seconds = tokens + 1, seconds + 1
                continue
            chain, reach = world.chain(), pace.reach(choice, moods)
            levels = grown_by(reach, [[sureness] for sureness, _ in chain])
            accepted, spent = accepted_of(chain, levels), world.seconds(reach.drafted, levels)
            reach.learn([accepted])
            pace.record_round(choice, spent, [accepted], reach)
            tokens, seconds = tokens + 1 + accepted, seconds + spent
        rates.append(tokens / seconds)
        assert _usual_tree(pace, 0).depth == pytest.approx(pace.costs.levels[0], abs=0.5)
    assert sum(rates) / 3 > 1.02 * best, (rates, best)


@pytest.mark.parametrize("unlucky", [1, 3, 6])
def test_bad_luck_at_the_beginning_decides_nothing_for_ever(unlucky):
    """Whatever the first chains gave: trees that are good enough do not keep a better chain from being tried again."""
    menu = trees_to_choose(CPU_TREE, None, lambda tree: None, farthest=FARTHEST)
    pace, moods, chosen = Pace(menu, ending=True), [None], []
    for _ in range(3000):
        if (choice := pace.choose(100)) == PLAIN:
            pace.record_plain(1.0)
            continue
        chosen.append(menu[choice].kind)
        if chosen[-1] != "chain":
            number = min(menu[choice].depth, 6)
            seconds, told = max(1.3, (1 + number) / 3.1), [Favourites(number, number)]  # 3.1 of plain steps at most
            pace.record_round(choice, seconds, [number], told=told)
            continue
        reach = pace.reach(choice, moods)
        levels = grown_by(reach, [[-0.1]] * FARTHEST)
        number = 0 if chosen.count("chain") <= unlucky else min(levels, 6)  # 4.4 of plain steps
        reach.learn([number])
        pace.record_round(choice, 1 + 0.1 * levels, [number], reach)
    assert chosen[-300:].count("chain") > 250


def test_first_chains_are_short_whatever_the_head_says():
    """A head that is sure of everything would draft the deepest chain at once, which costs many plain steps."""
    pace, levels = Pace((CHAIN.replace(depth=16, total_tokens=17),), ending=True), []
    pace.record_plain(1.0)
    for _ in range(12):
        reach = pace.reach(0, [None])
        levels.append(grown_by(reach, [[-1e-4]] * 16))
        reach.learn([levels[-1]])
        pace.record_round(0, 1 + 0.05 * levels[-1], [levels[-1]], reach)
    assert levels[:3] == [3, 3, 3] and levels[3] == 6 and max(levels) == 16


def test_levels_that_were_hardly_drafted_are_drafted_to_see_them():
    """Else a chain that once ended early would go on ending there, and nobody learn what lies deeper."""
    pace, depths = Pace((CHAIN,), ending=True), []
    pace.record_plain(1.0)
    for levels in (1, 3, 3, 2, 5):
        depths.append(pace.costs.levels_to_draft(0, 0)[0])
        pace.costs.record(0, 1.5, levels)
    assert [*depths, pace.costs.levels_to_draft(0, 0)[0]] == [0, 0, 0, 1, 2, 3]
    chance = Foresight().chance_at(1, 0.5) * Foresight().chance(0, Foresight().traits(-0.3, 0.5))
    for known, goes_on in ((None, False), (2, False), (1, True), (0, True)):
        reach = Reach(Foresight(), [0.5], chance / 0.8, 0.0, known=known)
        assert reach.keeps([-0.3]) and reach.goes_on() == goes_on


# Costs of rounds over chains by links, in plain steps. Kernels are made for some numbers of rows.
ROWS = {"dip": [2.2, 3.1, 2.68, 2.95], "jump": [1.35, 1.75, 2.5, 2.8], "smooth": [1.4, 1.8, 2.2, 2.6]}


@pytest.mark.parametrize(("kernels", "tau", "best"), [
    ("dip", 3, 3), ("dip", 4, 3), ("jump", 3, 2), ("jump", 4, 2), ("smooth", 3, 2), ("smooth", 4, 3),
])  # fmt: skip
def test_kernels_that_are_made_for_some_numbers_of_rows(kernels, tau, best):
    """As many drafts are right in every round, and the head says nothing of it."""
    costs = [*ROWS[kernels], *(ROWS[kernels][-1] + 0.4 * more for more in range(1, 13))]
    menu = trees_to_choose(CHAIN, None, lambda tree: None, farthest=FARTHEST)
    for seed in range(3):
        rng, moods, tokens, seconds = random.Random(seed), [None], 0, 0.0
        pace = Pace(menu, ending=True)
        for step in range(1000):
            if step == 300:
                tokens, seconds = 0, 0.0
            if (choice := pace.choose(100)) == PLAIN:
                pace.record_plain(1 + 0.05 * rng.gauss(0, 1))
                tokens, seconds = tokens + 1, seconds + 1
                continue
            reach = pace.reach(choice, moods)
            levels = grown_by(reach, [[-9 + 0.3 * rng.gauss(0, 1)] for _ in range(FARTHEST)])
            accepted, stall = min(levels, tau - 1), 6 if rng.random() < 0.01 else 1
            reach.learn([accepted])
            pace.record_round(choice, costs[levels - 1] * (1 + 0.05 * rng.gauss(0, 1)) * stall, [accepted], reach)
            tokens, seconds = tokens + 1 + accepted, seconds + costs[levels - 1]
        assert tokens / seconds > 0.94 * min(best + 1, tau) / costs[best - 1], (seed, pace.costs.steps(0)[:5])


def test_what_numbers_of_links_cost_is_asked_anew_in_another_context():
    """Three links are dear in a short context. In a long one they are not: few rounds tell so."""
    costs, unit = Costs((CHAIN,), ending={0}), 0.01
    costs.record(PLAIN, unit)

    def draft(rounds, dear):
        for number in range(rounds):
            levels = 2 + number % 3
            costs.record(PLAIN, unit)
            costs.record(0, unit * (1.2 + 0.2 * levels + dear * (levels == 3)), levels)
        return costs.steps(0)

    short = draft(93, 1.5)
    assert short[3] > 0.8 and short[3] > short[2] + 0.5
    costs.begin_context()
    costs.record(PLAIN, unit)
    long = draft(24, 0.0)
    assert abs(long[3]) < 0.2, long


@settings(max_examples=20, deadline=None)
@given(accepted=st.floats(0, 1), sureness=st.floats(-6, 0), level=st.floats(0.01, 1.0), seed=st.integers(0, 9))
def test_never_far_below_plain_steps(accepted, sureness, level, seed):
    """Whatever heads say of themselves."""
    menu = trees_to_choose(CHAIN, None, lambda tree: None, farthest=FARTHEST)
    pace, rng, moods, tokens, seconds = Pace(menu, ending=True), random.Random(seed), [None], 0, 0.0
    for _ in range(800):
        choice = pace.choose(100)
        tokens += 1
        if choice == PLAIN:
            pace.record_plain(1.0)
            seconds += 1
            continue
        reach = pace.reach(choice, moods)
        levels = grown_by(reach, [[sureness]] * FARTHEST)
        number = next((place for place in range(levels) if rng.random() >= accepted), levels)
        reach.learn([number])
        spent = 1 + level * reach.drafted + 0.02 * levels
        pace.record_round(choice, spent, [number], reach)
        tokens, seconds = tokens + number, seconds + spent
    assert tokens / seconds >= 0.97


def draft_only(monkeypatch, children: str) -> list[int]:
    """Every round drafts the chain that ends where it likes; returns the levels its rounds had, as they come."""
    levels, learn = [], Reach.learn

    def choose(pace: Pace, *_: object) -> int:
        return next(n for n, tree in enumerate(pace.menu) if n in pace._ending and tree.children == children)

    def noted(reach: Reach, num_accepted: list[int]) -> None:
        levels.append(reach.levels)
        learn(reach, num_accepted)

    monkeypatch.setattr(Pace, "choose", choose)
    monkeypatch.setattr(Reach, "learn", noted)
    return levels


@pytest.mark.parametrize("children", ["top_k", "sampled"])
def test_sampled_texts_have_the_targets_distribution(children, monkeypatch):
    """Chains that end by how probable the links drawn before were."""
    levels = draft_only(monkeypatch, children)
    monkeypatch.setattr(
        Pace, "reach", lambda pace, choice, moods, *_: Reach(Foresight(), [0.5], 0.075, 0.03, children == "sampled")
    )
    target, samples = five_token_target(), 200
    heads = random_heads(target)
    heads.forget_tree()
    heads.adaptive, heads.exact_seed = True, False
    counts = Counter(tuple(sample(target, heads, 6).tolist()[:3]) for _ in range(samples))
    statistic, freedom = chi_square(counts, target_distribution(target, {}, 3), samples)
    assert statistic < critical_value(freedom)
    assert len(set(levels)) > 1


@pytest.mark.parametrize("method", ["eagle", "poss", "medusa", "eagle3", "peagle", "dspark"])
def test_greedy_text_is_the_targets(method, monkeypatch):
    levels = draft_only(monkeypatch, "top_k")
    target, ids = shared_target("llama"), prompt()
    heads = random_heads(target, method)
    heads.forget_tree()
    heads.adaptive = True
    for _ in range(3):
        assert torch.equal(plain(target, ids, 40, assistant_model=heads), plain(target, ids, 40))
    assert levels


def test_rounds_that_a_budget_ended_are_no_measure(monkeypatch):
    """Chains that would have gone on are as long as the budget was, not as they like to be."""
    levels, counted = draft_only(monkeypatch, "top_k"), []
    monkeypatch.setattr(Pace, "reach", lambda pace, choice, moods, *_: Reach(Foresight(), [0.5], 0.0, 0.0))
    monkeypatch.setattr(Pace, "record_round", lambda *args: counted.append(args[4].levels))
    target, ids = shared_target("llama"), prompt()
    heads = random_heads(target)
    heads.forget_tree()
    heads.adaptive = True
    plain(target, ids, FARTHEST + 12, assistant_model=heads)
    assert min(levels) < FARTHEST and set(counted) == {FARTHEST}


def test_batches_and_streams_whose_sequences_end(monkeypatch):
    """Every sequence has a mood of its own, which goes and comes with it."""
    draft_only(monkeypatch, "top_k")
    target = shared_target("llama")
    inputs, alone = batch_of()
    heads = random_heads(target, "poss")
    heads.forget_tree()
    heads.adaptive = True
    assert_rows(greedy(target, inputs, assistant_model=heads), 19, alone_texts(target, alone))
    requests = [
        {"input_ids": ids, "max_new_tokens": new} for ids, new in zip(itertools.cycle([prompt()]), (3, 20, 7, 12))
    ]
    texts = {text.index: text.token_ids for text in generate_stream(target, heads, requests, max_batch=2)}
    expected = plain(target, prompt(), 20)[0, prompt().shape[1] :].tolist()
    assert [texts[n] for n in range(4)] == [expected[:new] for new in (3, 20, 7, 12)]
