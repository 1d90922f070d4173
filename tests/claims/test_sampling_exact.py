"""Sampling with draft heads has exactly the target's processed distribution.

Enumeration: a script replaces the draws of a generation so that they give one chosen output. The product of the
probabilities of these draws is the probability that the algorithm gives to this output. Over all outputs of a 5-token
vocabulary, this is the algorithm's whole distribution, without any chance. In addition, a chi-square test uses the
real random numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from support.distributions import (
    VOCAB,
    chi_square,
    critical_value,
    five_token_target,
    largest_error,
    sample,
    script_draws,
    target_distribution,
)
from support.heads import OPTIONS, random_heads

from hf_specheads import AutoDraftHead, DraftTreeConfig
from hf_specheads.generation.verification import rules
from hf_specheads.heads.auto import METHODS

LENGTH = 3
SLOW = pytest.mark.slow
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 3, "temperature": 1.4},
    "top-p": {"top_p": 0.8},
    "all": {"temperature": 1.7, "top_k": 4, "top_p": 0.9},
    "repetition": {"repetition_penalty": 1.8, "temperature": 0.7, "top_k": 4},
}


def heads_for(target, exact_seed: bool, **tree: Any):
    heads = random_heads(target, **({"depth": 3, "top_k": 2, "total_tokens": 6} | tree))
    heads.exact_seed = exact_seed
    return heads


# ---------------------------------------------------------------------- the algorithm's distribution, by enumeration


class Script:
    """Replaces the draws: every node draws the token that the wanted output has at its depth.

    Nodes beside the path draw a token as well. This changes nothing, because draws are independent.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spoil: Any = None):
        self.wanted: tuple[int, ...] = ()
        self.emitted, self.probability, self.spoil = 0, 1.0, spoil
        script_draws(monkeypatch, self.draw)
        for name in ("verify_all_nodes", "verify_token_by_token"):
            monkeypatch.setattr(rules, name, self.wrapped(getattr(rules, name)))

    def wrapped(self, verify: Any) -> Any:
        at_once = verify.__name__ == "verify_all_nodes"

        def verify_scripted(tree, *args, **options):
            self.depths, self.probabilities = tree.depths[0].tolist(), []
            if self.spoil is not None:
                place = 0 if at_once else 1  # of the logits
                args = [*args[:place], self.spoil(tree, args[place]), *args[place + 1 :]]
            (accepted,) = verify(tree, *args, **options)
            left = len(self.wanted) - self.emitted
            for step, (node, token) in enumerate(zip(accepted.nodes[:left], accepted.token_ids[:left], strict=True)):
                row = self.probabilities[0][node] if at_once else self.probabilities[step][0]
                self.probability *= row[token].item()
            self.emitted += len(accepted.token_ids[:left])
            return [accepted]

        return verify_scripted

    def draw(self, probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        assert num_samples == 1
        step = len(self.probabilities)
        self.probabilities.append(probabilities)
        depths = self.depths if len(probabilities) == len(self.depths) > 1 else [step]
        places = [min(self.emitted + depth, len(self.wanted) - 1) for depth in depths]
        return torch.tensor([[self.wanted[place]] for place in places])

    def run(self, wanted: tuple[int, ...], generate: Any) -> float:
        """Returns the probability of one output, and checks that the output comes out as scripted."""
        self.wanted, self.emitted, self.probability = wanted, 0, 1.0
        assert tuple(generate().tolist()) == wanted
        return self.probability


def algorithm_distribution(
    script: Script, target, heads, setting: dict[str, Any], first: int | None = None
) -> dict[tuple[int, ...], float]:
    """Returns the probabilities of all outputs, or of those that begin with the token `first`."""
    outputs = itertools.product(range(VOCAB) if first is None else [first], *[range(VOCAB)] * (LENGTH - 1))
    return {wanted: script.run(wanted, lambda: sample(target, heads, **setting)) for wanted in outputs}


@pytest.mark.parametrize(
    ("setting", "exact_seed"),
    [
        ("all", True),
        ("plain", False),
        # Cases with penalties run in test_sampling_matrix.py by default.
        *(
            pytest.param(*case, marks=SLOW)
            for case in (("repetition", True), ("all", False), ("top-p", False), ("top-k", True))
        ),
    ],
    ids=lambda value: {True: "token by token", False: "all nodes at once"}.get(value, value),
)
def test_enumerated_distribution(setting, exact_seed, monkeypatch):
    target = five_token_target()
    expected = target_distribution(target, SETTINGS[setting], LENGTH)
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-5)
    heads = heads_for(target, exact_seed)
    found = algorithm_distribution(Script(monkeypatch), target, heads, SETTINGS[setting])
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-5)
    assert largest_error(found, expected) < 1e-5


def test_enumerated_distribution_of_a_chain(monkeypatch):
    target = five_token_target()
    expected = target_distribution(target, SETTINGS["top-k"], LENGTH)
    heads = heads_for(target, False, kind="chain")
    found = algorithm_distribution(Script(monkeypatch), target, heads, SETTINGS["top-k"])
    assert largest_error(found, expected) < 1e-5


FAMILIES = ("dflash", "jetspec", "dspark", "dflash2", "domino", "peagle", "mtp", "lookup")


@pytest.mark.parametrize(
    ("method", "exact_seed"),
    [
        ("domino", False),
        *(
            pytest.param(m, e, marks=pytest.mark.slow)
            for m in FAMILIES
            for e in (True, False)
            if (m, e) != ("domino", False)
        ),
    ],
    ids=lambda value: {True: "token by token", False: "all nodes at once"}.get(value, value),
)
def test_enumerated_distribution_of_families(method, exact_seed, monkeypatch):
    """Enumerates block drafters, P-EAGLE, MTP layers and copies, with trees."""
    target = five_token_target()
    levels = {"feature_layers": (0, -1)} if "feature_layers" in config_fields(method) else {}
    tree = DraftTreeConfig(depth=2, top_k=2, total_tokens=5)
    options = {**OPTIONS.get(method, {}), **levels, **({"selector_top_k": 3} if method == "dflash2" else {})}
    heads = AutoDraftHead.from_target(target, method, tree_config=tree, **options).eval()
    heads.exact_seed, heads.adaptive = exact_seed, False
    found = algorithm_distribution(Script(monkeypatch), target, heads, SETTINGS["all"])
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-5)
    assert largest_error(found, target_distribution(target, SETTINGS["all"], LENGTH)) < 1e-5


def config_fields(method):
    return {field.name for field in dataclasses.fields(METHODS[method].config_class)}


def _bonus_without_temperature(temperature: float) -> Any:
    """The authors' oversight: the token after a fully accepted path is drawn from the raw logits."""

    def spoil(tree, logits):
        if tree.num_nodes == 1:
            return logits
        is_parent = torch.zeros(tree.num_nodes, dtype=torch.bool).index_fill(0, tree.parents[0, 1:], True)
        return torch.where(is_parent[None, :, None], logits, logits * temperature)

    return spoil


@pytest.mark.parametrize("exact_seed", [True, False], ids=["token by token", "all nodes at once"])
def test_planted_bug_is_found_by_enumeration(exact_seed, monkeypatch):
    """Only enumerates the outputs that begin like the likeliest one."""
    target = five_token_target()
    expected = target_distribution(target, SETTINGS["temperature"], LENGTH)
    first = max(expected, key=expected.__getitem__)[0]
    part = {output: probability for output, probability in expected.items() if output[0] == first}
    script, heads = Script(monkeypatch, spoil=_bonus_without_temperature(0.6)), heads_for(target, exact_seed, depth=1)
    found = algorithm_distribution(script, target, heads, SETTINGS["temperature"], first)
    assert found.keys() == part.keys() and largest_error(found, part) > 1e-3


# ---------------------------------------------------------------------- the real random numbers


def sampled_statistic(exact_seed: bool, setting: dict[str, Any], **tree: Any) -> tuple[float, float]:
    """Returns chi-square of two late tokens of longer outputs, and its critical value.

    The very last token is left out, because no draft is made for it.
    """
    samples, length, late = 200, 6, slice(-3, -1)
    target = five_token_target()
    expected: Counter = Counter()
    for output, probability in target_distribution(target, setting, length).items():
        expected[output[late]] += probability
    heads = heads_for(target, exact_seed, **tree)
    torch.manual_seed(1234)
    counts = Counter(tuple(sample(target, heads, length, **setting)[late].tolist()) for _ in range(samples))
    assert heads.last_stats.rounds < length
    statistic, freedom = chi_square(counts, expected, samples)
    assert freedom >= 5
    return statistic, critical_value(freedom)


# All five tokens are children, so a draft is always accepted, and every other token is a bonus token.
EVERY_TOKEN = {"depth": 1, "top_k": 5, "total_tokens": 6}
CHI_SQUARE = {
    "at once": (False, {"temperature": 0.8, "top_k": 4, "top_p": 0.95}, {}),
    "token by token": (True, {"temperature": 0.8, "top_k": 4, "top_p": 0.95}, {}),
    "repetition": (False, {"temperature": 0.9, "repetition_penalty": 1.4}, {}),
    "many bonus tokens": (False, {"temperature": 0.4}, EVERY_TOKEN),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c == "many bonus tokens" else SLOW) for c in CHI_SQUARE])
def test_sampled_distribution(case):
    exact_seed, setting, tree = CHI_SQUARE[case]
    statistic, critical = sampled_statistic(exact_seed, setting, **tree)
    assert statistic < critical


@pytest.mark.slow  # by default, the bug is found by enumeration
def test_planted_bug_is_found_by_sampling(monkeypatch):
    """Control: the test fails when the bonus token ignores the temperature."""
    original, spoil = rules.verify_all_nodes, _bonus_without_temperature(0.4)

    def spoiled(tree, logits, *args):
        return original(tree, spoil(tree, logits), *args)

    monkeypatch.setattr(rules, "verify_all_nodes", spoiled)
    statistic, critical = sampled_statistic(False, {"temperature": 0.4}, **EVERY_TOKEN)
    assert statistic > critical
