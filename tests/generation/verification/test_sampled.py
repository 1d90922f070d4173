"""Children drawn from the draft: the rule that verifies them is exact, by enumeration and by chi-square.

Enumeration: every order in which children can be drawn, weighted by its probability, and for every decision the
measure of the uniform numbers that accept, found by bisection through the real code. Nothing is left to chance, and no
formula of the code is repeated. Each proof has a planted bug that it must find.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.distributions import (
    chi_square,
    critical_value,
    five_token_target,
    sample,
    script_draws,
    target_distribution,
)
from support.heads import random_heads
from support.targets import plain, prompt, shared_target
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import TemperatureLogitsWarper

from hf_specheads.errors import UnsupportedGenerationError
from hf_specheads.generation.sampling import WAITS_OF_A_DRAW, DraftSampler, TokenSampler
from hf_specheads.generation.stopping import StopRule
from hf_specheads.generation.verification import sampled as verification_sampled
from hf_specheads.generation.verification.sampled import (
    accept_children,
    verify_sampled_at_once,
    verify_sampled_token_by_token,
)
from hf_specheads.tree.draft_tree import DraftTree, SampledChildren

NEVER = StopRule(StoppingCriteriaList())


def drawn_orders(draft: list[float], width: int) -> list[tuple[tuple[int, ...], float]]:
    """Every order `width` tokens can be drawn in without replacement, with its probability.

    When the tokens of positive probability run out, the others follow in ascending order.
    """
    orders: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(width):
        longer = []
        for tokens, probability in orders:
            left = [0.0 if token in tokens else q for token, q in enumerate(draft)]
            if sum(left) == 0:
                longer.append(((*tokens, min(set(range(len(draft))) - set(tokens))), probability))
            longer += [((*tokens, t), probability * q / sum(left)) for t, q in enumerate(left) if q > 0]
        orders = longer
    return orders


def measure(accepts: Any, rows: int) -> torch.Tensor:
    """Per row, the measure of the uniform numbers u for which `accepts(u)` holds: an interval [0, a)."""
    low, high = torch.zeros(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.float64)
    for _ in range(54):
        middle = (low + high) / 2
        accepted = accepts(middle)
        low, high = torch.where(accepted, middle, low), torch.where(accepted, high, middle)
    return torch.where(high == 1.0, 1.0, low)


# ---------------------------------------------------------------------- one node


def emitted_distribution(target: torch.Tensor, draft: torch.Tensor, orders: list) -> torch.Tensor:
    """Distribution [V] of the token emitted at a node with target p [V] and draft q [V]."""
    tokens = torch.tensor([order for order, _ in orders])
    rows, width = tokens.shape
    p, q = target.expand(rows, -1), draft.expand(rows, -1)
    reached = torch.tensor([probability for _, probability in orders], dtype=torch.float64)
    emitted = torch.zeros_like(target)
    uniforms = torch.ones(rows, width, dtype=torch.float64)
    for rank in range(width):

        def accepts(u: torch.Tensor, rank: int = rank) -> torch.Tensor:
            columns = torch.arange(width) == rank
            return accept_children(p, q, tokens, torch.where(columns, u[:, None], uniforms))[0] == rank

        accepted = measure(accepts, rows)
        emitted.index_add_(0, tokens[:, rank], reached * accepted)
        reached = reached * (1 - accepted)
    residual = accept_children(p, q, tokens, uniforms)[1]
    return emitted + (reached[:, None] * residual).sum(0)


def random_distribution(seed: int, vocab: int = 4, zeros: tuple[int, ...] = (), spread: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(vocab, generator=generator, dtype=torch.float64)
    logits[list(zeros)] = -torch.inf
    return logits.softmax(-1)


NODES = {
    "apart": (random_distribution(1), random_distribution(2)),
    "target without some": (random_distribution(3, zeros=(0, 2)), random_distribution(4)),
    "draft without some": (random_distribution(5), random_distribution(6, zeros=(1, 3))),
    "one draft token": (random_distribution(7), random_distribution(8, zeros=(0, 1, 2))),
    "nothing in common": (random_distribution(9, zeros=(0, 1)), random_distribution(10, zeros=(2, 3))),
    "equal": (random_distribution(11), random_distribution(11)),
    "nearly equal": (random_distribution(11), random_distribution(11) + torch.tensor([1, -1, 1, -1]) * 1e-17),
}


@pytest.mark.parametrize("width", [1, 3, 4])
@pytest.mark.parametrize("case", NODES)
def test_a_node_emits_the_targets_distribution(case, width):
    target, draft = NODES[case]
    orders = drawn_orders(draft.tolist(), width)
    assert sum(probability for _, probability in orders) == pytest.approx(1.0)
    assert (emitted_distribution(target, draft, orders) - target).abs().max() < 1e-14


def node_error(orders: Any = None) -> float:
    target, draft = random_distribution(1, vocab=6), random_distribution(2, vocab=6)
    orders = orders or drawn_orders(draft.tolist(), 2)
    return (emitted_distribution(target, draft, orders) - target).abs().max().item()


def test_planted_bug_rejected_siblings_keep_their_probability(monkeypatch):
    assert node_error() < 1e-14
    monkeypatch.setattr(verification_sampled, "_without", lambda draft, token: draft)
    assert node_error() > 1e-2


def test_planted_bug_no_residual_after_a_rejection(monkeypatch):
    monkeypatch.setattr(verification_sampled, "_rest", lambda target, draft: (target, torch.ones(1)))
    assert node_error() > 1e-2


def test_planted_bug_the_rule_of_drawn_children_on_the_most_probable_ones():
    favourites = tuple(random_distribution(2, vocab=6).topk(2).indices.tolist())
    assert node_error([(favourites, 1.0)]) > 1e-2


def test_surplus_children_are_never_accepted():
    """A warper may leave fewer tokens than the tree has children."""
    target, draft = torch.full((1, 4), 0.25), torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    accepted, residual = accept_children(target, draft, torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0.9, 0.9, 0, 0]]))
    assert accepted.item() == -1
    torch.testing.assert_close(residual, torch.tensor([[0.0, 0.0, 0.5, 0.5]]))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), width=st.integers(1, 5), equal=st.booleans())
def test_properties_of_a_decision(seed, width, equal):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(3, 6, generator=generator).mul(3).softmax(-1)
    draft = target if equal else torch.randn(3, 6, generator=generator).mul(3).softmax(-1)
    tokens = torch.stack([torch.randperm(6, generator=generator)[:width] for _ in range(3)])
    accepted, residual = accept_children(target, draft, tokens, torch.rand(tokens.shape, generator=generator))
    torch.testing.assert_close(residual.sum(-1), torch.ones(3))
    assert residual.min() >= 0
    for row, rank in enumerate(accepted.tolist()):
        rejected = tokens[row] if rank < 0 else tokens[row, :rank]
        assert not residual[row, rejected].any(), "a rejected token is never the bonus token"
    assert not equal or (accepted == 0).all()


# ---------------------------------------------------------------------- a whole round

VOCAB, TEMPERATURE = 3, 0.6
SHAPES = {
    "chain": ((0,), (0, 0)),
    "tree": ((0,), (1,), (0, 0), (0, 1), (1, 0)),
}


def table_logits(path: tuple[int, ...], draft: bool) -> torch.Tensor:
    """Logits [V] after a path: the target's, or the draft's."""
    seed = hash((path, draft)) % 2**31
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * (1.5 if draft else 1.0)


@functools.cache
def drawn_round(paths: tuple[tuple[int, ...], ...]) -> tuple[DraftTree, torch.Tensor, torch.Tensor]:
    """Every draft of a round as one row of a batch: tree, target logits [B, N, V], probability [B] of being drawn."""
    all_paths = ((), *paths)
    inner = [path for path in all_paths if any(other[:-1] == path for other in paths)]
    orders = drawn_orders(list(range(1, VOCAB + 1)), max(path[-1] for path in paths) + 1)  # all orders; any weights
    tokens, weights, probs, logits = [], [], [], []
    for choice in itertools.product([order for order, _ in orders], repeat=len(inner)):
        drawn, weight, words = dict(zip(inner, choice, strict=True)), 1.0, {(): ()}
        for path in paths:
            words[path] = (*words[path[:-1]], drawn[path[:-1]][path[-1]])
        for path in inner:
            q = table_logits(words[path], draft=True).softmax(-1).tolist()
            weight *= dict(drawn_orders(q, len(choice[0])))[drawn[path]]
        tokens.append([VOCAB, *(words[path][-1] for path in paths)])
        weights.append(weight)
        probs.append(torch.stack([table_logits(words[path], draft=True).softmax(-1) for path in inner]))
        logits.append(torch.stack([table_logits(words[path], draft=False) for path in all_paths]))
    node_of = {path: node for node, path in enumerate(all_paths)}
    width = len(orders[0][0])
    sampled = SampledChildren(
        torch.stack(probs),
        torch.tensor([node_of[path] for path in inner]),
        torch.tensor([[node_of.get((*path, rank), -1) for rank in range(width)] for path in inner]),
    )
    ids = torch.tensor(tokens)
    parents = torch.tensor([-1, *(node_of[path[:-1]] for path in paths)]).expand_as(ids)
    depths = torch.tensor([len(path) for path in all_paths]).expand_as(ids)
    tree = DraftTree(ids, parents, depths, torch.zeros(ids.shape), max(map(len, paths)), sampled)
    return tree, torch.stack(logits), torch.tensor(weights, dtype=torch.float64)


class Round:
    """Runs one round of every draft with scripted random numbers."""

    def __init__(self, shape: str, monkeypatch: pytest.MonkeyPatch):
        self.tree, self.logits, self.weights = drawn_round(SHAPES[shape])
        self.rows = len(self.weights)
        self.sampler = TokenSampler(LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE)]), do_sample=True)
        children = self.tree.sampled.children.tolist()
        self.place = {node: (e, r) for e, row in enumerate(children) for r, node in enumerate(row) if node > 0}
        self.siblings = {node: children[e][:r] for node, (e, r) in self.place.items()}
        parents = self.tree.sampled.parents.tolist()
        self.children = {parent: [c for c in row if c > 0] for parent, row in zip(parents, children, strict=True)}
        monkeypatch.setattr(torch, "rand", lambda shape, device, dtype: self.uniforms)
        script_draws(monkeypatch, self.draw)

    def draw(self, probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        self.bonus = probs.double()
        return probs.argmax(-1, keepdim=True)

    def run(self, accepted: list[int], rejected: list[int], node: int | None = None, u: Any = None) -> list[list[int]]:
        """Nodes of each row's path, when some nodes are accepted, others rejected, and one is tested with u [B]."""
        self.uniforms = torch.full((self.rows, *self.tree.sampled.children.shape), 0.5, dtype=torch.float64)
        for value, nodes in ((0.0, accepted), (1.0, rejected), (u, [] if node is None else [node])):
            for number in nodes:
                self.uniforms[(slice(None), *self.place[number])] = value
        return [a.nodes for a in verify_sampled_at_once(self.tree, self.logits, self.sampler, False)]

    def way_to(self, node: int) -> tuple[list[int], list[int]]:
        """Nodes to accept and to reject on the way to `node`, itself left out."""
        parent = self.tree.parents[0].tolist()
        above = [node]
        while parent[above[-1]] > 0:
            above.append(parent[above[-1]])
        return above[1:], [sibling for n in above for sibling in self.siblings[n]]

    def acceptance(self, node: int) -> torch.Tensor:
        """Probability [B] of accepting `node` once its parent is reached and its elder siblings are rejected."""
        accepted, rejected = self.way_to(node)
        return measure(
            lambda u: torch.tensor([node in path for path in self.run(accepted, rejected, node, u)]), self.rows
        )

    def distribution(self) -> dict[tuple[int, ...], float]:
        """Probability of the next tokens, as many as the tree is deep and one more; later ones by the target."""
        length = self.tree.max_depth + 1
        result = dict.fromkeys(itertools.product(range(VOCAB), repeat=length), 0.0)
        chance = {node: self.acceptance(node) for node in self.place}
        for last in range(self.tree.num_nodes):
            accepted, rejected = self.way_to(last) if last else ([], [])
            accepted = [*accepted, last] if last else []
            weight = self.weights.clone()
            for node in accepted:
                weight *= chance[node]
            for node in rejected + self.children.get(last, []):
                weight *= 1 - chance[node]
            self.run(accepted, rejected + self.children.get(last, []))
            order = sorted(accepted)
            for row in (weight > 1e-15).nonzero()[:, 0].tolist():
                path = tuple(self.tree.token_ids[row, order].tolist())
                for output in result:
                    if output[: len(path)] == path:
                        bonus = self.bonus[row, output[len(path)]].item()
                        result[output] += weight[row].item() * bonus * continuation(output, len(path) + 1)
        return result


def continuation(output: tuple[int, ...], start: int) -> float:
    """Probability of the tokens from `start` on, under the target at the tests' temperature."""
    probability = 1.0
    for step in range(start, len(output)):
        logits = table_logits(output[:step], draft=False)
        probability *= (logits / TEMPERATURE).softmax(-1)[output[step]].item()
    return probability


def round_error(shape: str, monkeypatch: pytest.MonkeyPatch) -> float:
    found = Round(shape, monkeypatch).distribution()
    return max(abs(found[output] - continuation(output, 0)) for output in found)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_round_emits_the_targets_distribution(shape, monkeypatch):
    assert round_error(shape, monkeypatch) < 1e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_planted_bug_bonus_token_from_the_raw_logits(shape, monkeypatch):
    original = verification_sampled._bonus_distribution
    monkeypatch.setattr(
        verification_sampled,
        "_bonus_distribution",
        lambda drawn, scores, residual, best: original(drawn, scores * TEMPERATURE, residual, best),
    )
    assert round_error(shape, monkeypatch) > 1e-3


@settings(max_examples=40, deadline=None)
@given(row=st.integers(0, 215), seed=st.integers(0, 10**6), shape=st.sampled_from(sorted(SHAPES)))
def test_both_walks_agree_on_the_same_random_numbers(row, seed, shape):
    tree, logits, _ = drawn_round(SHAPES[shape])
    row, generator = row % len(logits), torch.Generator().manual_seed(seed)
    part = slice(row, row + 1)
    sampled = replace(tree.sampled, probs=tree.sampled.probs[part])
    tree = DraftTree(
        tree.token_ids[part], tree.parents[part], tree.depths[part], tree.scores[part], tree.max_depth, sampled
    )
    uniforms = torch.rand(1, *sampled.children.shape, generator=generator)
    last = torch.rand((), generator=generator)
    sampler = TokenSampler(LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE)]), do_sample=True)
    ids = torch.zeros(1, 1, dtype=torch.long)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda shape, device, dtype: uniforms)
        script_draws(patch, lambda probs, num_samples: (probs.cumsum(-1) < last).sum(-1, keepdim=True))
        (at_once,) = verify_sampled_at_once(tree, logits[part], sampler, True)
        (walked,) = verify_sampled_token_by_token(tree, ids, logits[part], sampler, NEVER, None)
    assert (at_once.nodes, at_once.token_ids) == (walked.nodes, walked.token_ids)
    for ours, theirs in zip(at_once.scores, walked.scores, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert at_once.host_syncs == 1
    assert walked.host_syncs == 1 + len(walked.token_ids)


def test_trees_of_most_probable_children_are_refused():
    tree, logits, _ = drawn_round(SHAPES["chain"])
    tree = replace(tree, sampled=None)
    sampler = TokenSampler([], True)
    with pytest.raises(ValueError, match="were not drawn"):
        verify_sampled_at_once(tree, logits, sampler, False)
    with pytest.raises(ValueError, match="were not drawn"):
        verify_sampled_token_by_token(tree, torch.zeros(1, 1).long(), logits[:1], sampler, NEVER, None)


# ---------------------------------------------------------------------- whole generations

STATIC = {"kind": "static", "choices": ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))}
CHAIN = {"kind": "chain", "depth": 2}
GENERATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "chain": (CHAIN, {"temperature": 0.8, "top_p": 0.95}, "own"),
    "static tree": (STATIC, {"temperature": 0.8, "top_k": 4}, "own"),
    "static tree, token by token": (STATIC, {"temperature": 0.9, "repetition_penalty": 1.4}, "own"),
    "chain in the loop of transformers": (CHAIN, {"temperature": 0.7}, "transformers"),
}


def generation_statistic(case: str, samples: int = 80) -> tuple[float, float]:
    """Chi-square of the two tokens before the last, for which no draft is made; and its critical value."""
    tree, setting, loop = GENERATIONS[case]
    length, late = 4, slice(-3, -1)
    target = five_token_target()
    expected: Counter = Counter()
    for output, probability in target_distribution(target, setting, length).items():
        expected[output[late]] += probability
    heads = random_heads(target, children="sampled", draft_temperature=0.4, **tree)
    heads.loop = loop
    torch.manual_seed(77)
    counts = Counter(tuple(sample(target, heads, length, **setting)[late].tolist()) for _ in range(samples))
    assert heads.last_stats.num_accepted
    statistic, freedom = chi_square(counts, expected, samples)
    assert freedom >= 4
    return statistic, critical_value(freedom)


# By default rounds of chains are enumerated above, and drawn many times in claims/test_sampling_matrix.py.
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c == "static tree" else pytest.mark.slow) for c in GENERATIONS]
)
def test_sampled_generations_follow_the_target(case):
    statistic, critical = generation_statistic(case)
    assert statistic < critical


def test_planted_bug_is_found_by_sampled_generations(monkeypatch):
    """The same test fails when the children are the most probable ones, under the rule for drawn ones."""
    monkeypatch.setattr(DraftSampler, "draw", staticmethod(lambda probs, width: probs.topk(width, dim=-1).indices))
    statistic, critical = generation_statistic("static tree")
    assert statistic > critical


@pytest.mark.parametrize("tree", [CHAIN, STATIC], ids=["chain", "static"])
def test_greedy_decoding_takes_the_most_probable_children(tree):
    target, ids = shared_target(), prompt()
    drawn, favourites = random_heads(target, children="sampled", **tree), random_heads(target, **tree)
    drawn.trace = favourites.trace = True
    assert torch.equal(plain(target, ids, assistant_model=drawn), plain(target, ids))
    plain(target, ids, assistant_model=favourites)
    for ours, theirs in zip(drawn.last_stats.trees, favourites.last_stats.trees, strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)


def test_one_host_sync_per_round():
    target, ids = shared_target(), prompt()
    heads = random_heads(target, children="sampled", **STATIC)
    target.generate(ids, do_sample=True, top_k=0, max_new_tokens=12, assistant_model=heads)
    assert heads.last_stats.host_syncs == heads.last_stats.rounds + 1 + WAITS_OF_A_DRAW  # and the prefill's
    assert not heads.last_stats.lossy


def test_traced_trees_do_without_the_draft_distributions():
    target, ids = shared_target(), prompt()
    heads = random_heads(target, children="sampled", **STATIC)
    heads.trace = True
    target.generate(ids, do_sample=True, max_new_tokens=6, assistant_model=heads)
    assert [tree.sampled for tree in heads.last_stats.trees] == [None] * heads.last_stats.rounds


def test_a_lossy_option_of_transformers_is_refused():
    target = shared_target()
    with pytest.raises(UnsupportedGenerationError, match="assistant_ensemble_weight, which is lossy"):
        target.generate(prompt(), assistant_model=random_heads(target), assistant_ensemble_weight=0.5, do_sample=True)
