"""Drafters of 2026, in variants that the shared matrices do not include: text and distribution are the target's own.
Trees have branches that draft differently, occur in batches, and are cut by predicted acceptance."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.batches import alone_texts, assert_rows, batch_of, greedy
from support.distributions import (
    chi_square,
    critical_value,
    five_token_target,
    sample,
    target_distribution,
)
from support.heads import OPTIONS, scrambled_heads
from support.targets import DIFFERENT_FAMILIES, plain, prompt, shared_target
from support.trees import TREES
from transformers import set_seed

from hf_specheads import DraftHead
from hf_specheads.generation.sampling import DraftSampler
from hf_specheads.heads.auto import METHODS

NEW = 16
SLIDING = {"sliding_layers": (0,), "sliding_window": 3}
CONFIDENT = {"confidence_head": True, "confidence_with_markov": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dspark, gated": ("dspark", {"markov_head": "gated"}),
    "dspark, rnn": ("dspark", {"markov_head": "rnn", **CONFIDENT}),
    "dspark, idle root": ("dspark", {"anchor_slot": "idle", "block_size": 6, **CONFIDENT}),
    "jetspec, idle root": ("jetspec", {"anchor_slot": "idle", "block_size": 5}),
    "domino, idle root": ("domino", {"anchor_slot": "idle", "plain_positions": 0}),
    "domino, late correction": ("domino", {"plain_positions": 3}),
    "dflash, sliding": ("dflash", SLIDING),
    "dflash, sliding from the root": ("dflash", {**SLIDING, "window_from": "anchor", "sliding_causal": True}),
    "dflash2, all layers slide": ("dflash2", {"sliding_layers": (0, 1), "sliding_window": 4, "conv_kernel_size": 3}),
    "peagle, one layer": ("peagle", {"num_hidden_layers": 1}),
    "mtp, two layers": ("mtp", {"num_mtp_layers": 2}),
}


def heads_of(target: Any, method: str, kind: str = "dynamic", options: dict[str, Any] | None = None) -> DraftHead:
    heads = scrambled_heads(target, method, **{**OPTIONS.get(method, {}), **(options or {})})
    heads.tree_config = TREES[kind]
    return heads


KINDS = ["dynamic", *(pytest.param(kind, marks=pytest.mark.slow) for kind in TREES if kind != "dynamic")]


# ---------------------------------------------------------------------- the text
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_greedy(name: str, kind: str) -> None:
    """Runs alone and in a batch, on a target of one of several families."""
    method, options = VARIANTS[name]
    target = shared_target(DIFFERENT_FAMILIES[len(name + kind) % len(DIFFERENT_FAMILIES)])
    heads = heads_of(target, method, kind, options)
    assert torch.equal(plain(target, prompt(), NEW, assistant_model=heads), plain(target, prompt(), NEW))
    assert heads.last_stats.draft_forwards > 0
    inputs, alone = batch_of((7, 19, 3))
    got = greedy(target, inputs, assistant_model=heads, max_new_tokens=10)
    assert_rows(got, 19, alone_texts(target, alone, max_new_tokens=10))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", [name for name, (_, options) in VARIANTS.items() if CONFIDENT.items() <= options.items()]
)
def test_cut_by_predicted_acceptance(name: str, kind: str) -> None:
    """Uses a threshold near the middle of the predictions, so that rounds of all depths occur."""
    method, options = VARIANTS[name]
    target, ids = shared_target(), prompt()
    heads = heads_of(target, method, kind, options)
    heads.adaptive, heads.trace = False, True
    cut = heads.with_tree(stop_below=0.5)
    assert torch.equal(plain(target, ids, NEW, assistant_model=cut), plain(target, ids, NEW))
    stats = cut.last_stats
    assert len({tree.max_depth for tree in stats.trees}) > 1 or stats.plain_steps > 0


@pytest.mark.parametrize(
    "method", ["dflash", *(pytest.param(m, marks=pytest.mark.slow) for m in ("dspark", "peagle"))]
)
def test_lookup_is_grafted(method: str) -> None:
    """Grafts copies of earlier text onto the tree that the heads draft. The text repeats itself."""
    target = shared_target()
    ids = torch.cat([prompt(8), prompt(8), prompt(8)], dim=1)
    heads = heads_of(target, method)
    heads.adaptive, heads.trace = False, True
    heads = heads.with_tree(lookup=3)
    assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
    sizes = {tree.num_nodes for tree in heads.last_stats.trees}
    assert max(sizes) > TREES["dynamic"].total_tokens


@pytest.mark.parametrize("name", ["dspark, rnn", *(pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS)])
def test_sampled_with_a_seed(name: str) -> None:
    method, options = VARIANTS[name]
    target, ids = shared_target(), prompt()
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": True, "temperature": 0.7}
    texts = []
    for heads in (None, heads_of(target, method, options=options)):
        set_seed(11)
        texts.append(target.generate(ids, assistant_model=heads, **settings))
    assert torch.equal(*texts)


# ---------------------------------------------------------------------- the distribution
ENOUGH = 1000  # samples that reveal the planted bug; with 250, it cannot be told from chance
DRAWN = {"kind": "static", "choices": ((0,), (1,), (0, 0), (0, 1), (1, 0)), "children": "sampled"}
FAMILIES = ("dflash", "jetspec", "dspark", "dflash2", "domino", "peagle", "mtp")
DRAFTERS = ["dflash2", *(pytest.param(method, marks=pytest.mark.slow) for method in FAMILIES if method != "dflash2")]


def statistic_of(method: str, samples: int, **tree: Any) -> tuple[float, float]:
    """Returns chi-square of three sampled tokens against the target's distribution, and its critical value."""
    target, setting = five_token_target(), {"temperature": 0.8, "top_k": 4}
    options = {"selector_top_k": 3} if method == "dflash2" else {}
    heads = scrambled_heads(target, method, **{**OPTIONS[method], "feature_layers": (0, -1), **options}
                            if method != "mtp" else OPTIONS[method])  # fmt: skip
    heads.tree_config = TREES["chain"].replace(**tree)
    heads.adaptive = heads.exact_seed = False
    torch.manual_seed(99)
    counts = Counter(tuple(sample(target, heads, **setting).tolist()) for _ in range(samples))
    statistic, freedom = chi_square(counts, target_distribution(target, setting, 3), samples)
    assert freedom >= 5
    return statistic, critical_value(freedom)


@pytest.mark.parametrize("method", DRAFTERS)
def test_drawn_children_follow_the_target(method: str) -> None:
    """q is the heads' distribution after each branch. With DFlash 2 it covers only a few candidates."""
    statistic, critical = statistic_of(method, ENOUGH, **DRAWN)
    assert statistic < critical


@pytest.mark.slow
@pytest.mark.parametrize("method", FAMILIES)
def test_children_of_best_trees_follow_the_target(method: str) -> None:
    statistic, critical = statistic_of(method, 250, kind="dynamic", depth=2, top_k=2, total_tokens=5)
    assert statistic < critical


@pytest.mark.slow
def test_planted_bug_children_are_not_drawn_from_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: candidates are drawn uniformly, while verification uses the selector's scores."""
    draw = DraftSampler.draw
    monkeypatch.setattr(DraftSampler, "draw", staticmethod(lambda probs, width: draw((probs > 0).float(), width)))
    statistic, critical = statistic_of("dflash2", ENOUGH, **DRAWN)
    assert statistic > critical


def test_all_methods_are_in_the_shared_matrices() -> None:
    """Tests elsewhere that are parametrised by `METHODS` include these families, too."""
    assert set(FAMILIES) | {"lookup"} <= set(METHODS)
