"""Tuning: what it measures adds up, what it finds is used and kept for the machine; the text stays the target's."""

from __future__ import annotations

import sys

import pytest
import torch
from support.heads import OPTIONS, random_heads
from support.stubs import StubHead
from support.targets import plain, prompt, shared_target

from hf_specheads import DraftTreeConfig, load_heads, tune_vocabulary
from hf_specheads.heads.auto import AutoDraftHead
from hf_specheads.tree.default import CPU_TREE, default_tree, machine_key, tuned_tree, without_machine
from hf_specheads.tuning.replay import RecordedDrafts, record_drafts
from hf_specheads.tuning.rounds import TimedRounds, time_rounds
from hf_specheads.tuning.tune import AS_FAST, TunedTree, TuningResult, predict, ranked, shortlist, tune

QUICK = {"max_new_tokens": 10, "repeats": 1, "confirm": 3, "depth": 3, "top_k": 3}
ROUNDS = TimedRounds(
    chain_target={2: 1.0, 5: 4.0},
    tree_target={2: 1.5, 10: 9.5},
    chain_draft={1: 1.0, 3: 2.0},
    dynamic_draft={2: {1: 1.0, 3: 3.0}, 4: {1: 1.0, 3: 5.0}},
    other=0.5,
)


# ---------------------------------------------------------------------- predictions
def test_costs_lie_on_the_lines_between_measured_ones():
    assert ROUNDS.of_chain(2) == pytest.approx(1.5 + 2.0 + 0.5)
    assert ROUNDS.of_dynamic(2, 3, 6) == pytest.approx((2.0 + 3.0) / 2 + 5.5 + 0.5)
    # One node is expanded at the first level and two at the second: 0.5 and 1.0 on top of the first forward.
    paths = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 1, 0))
    assert ROUNDS.of_fixed(paths) == pytest.approx(1.0 + 0.5 + 1.0 + 6.5 + 0.5)


def test_every_stage_of_a_round_is_timed():
    target = shared_target()
    found = time_rounds(target, random_heads(target), [prompt()], 1, max_new_tokens=6)
    assert set(found.chain_target) == set(range(2, 10)) and set(found.chain_draft) == set(range(1, 9))
    assert {2, 4, 8} == set(found.dynamic_draft) and {2, 8} == set(found.dynamic_draft[8])
    times = [*found.chain_target.values(), *found.tree_target.values(), *found.chain_draft.values(), found.other]
    assert min(times) > 0


@pytest.mark.parametrize(("target_seconds", "kind"), [(0.0, "dynamic"), (10.0, "chain")])
def test_predictions_follow_the_costs(target_seconds, kind):
    """Where nodes cost nothing the largest tree wins; where they cost much, few nodes do."""
    target, ids = shared_target(), prompt()
    truth = plain(target, ids, 40)
    heads = StubHead(target, truth, ranks=(0, 1, 0, 2))
    record = record_drafts(target, heads, [ids], 3, 3, 24)
    rounds = TimedRounds(
        chain_target={2: 1.0, 9: 1.0 + 7 * target_seconds},
        tree_target={2: 1.0, 64: 1.0 + 62 * target_seconds},
        chain_draft={1: 0.1, 3: 0.1},
        dynamic_draft={2: {1: 0.1, 3: 0.1}, 8: {1: 0.1, 3: 0.1}},
    )
    found = predict(record, rounds, children="top_k")
    if kind == "chain":
        assert found[0].tree.num_nodes <= 3
    else:
        assert found[0].acceptance_length == max(one.acceptance_length for one in found) > 2


def test_chains_that_stop_are_predicted():
    """A draft that is sure of itself where it is right: stopping saves levels and loses nothing."""
    ranks = torch.tensor([[0, 0, 0]] * 3 + [[1, 0, 0]] * 3)
    sure = torch.tensor([0.9] * 3 + [0.2] * 3).log()[:, None, None]
    children = torch.where(ranks == 0, 0, -1)
    record = RecordedDrafts((sure, sure * 2, sure * 3), (torch.zeros(6, 1).long(),) * 2, children, ranks, (6,))
    rounds = TimedRounds(chain_target={2: 1.0, 4: 1.0}, chain_draft={1: 1.0, 3: 3.0})
    by_stop = {one.tree.stop_below: one for one in predict(record, rounds) if one.tree.depth == 3}
    assert by_stop[0.3].acceptance_length == by_stop[0.0].acceptance_length
    assert by_stop[0.3].predicted > 1.2 * by_stop[0.0].predicted


def test_the_shortlist_holds_every_kind_and_no_twins():
    candidates = [
        TunedTree(DraftTreeConfig(depth=3, top_k=2, total_tokens=nodes), predicted=100.0 - nodes)
        for nodes in (4, 5, 6)
    ]
    candidates += [TunedTree(DraftTreeConfig(depth=2, top_k=2, total_tokens=4), predicted=50.0)]
    candidates += [TunedTree(DraftTreeConfig(kind="chain", depth=depth), predicted=10.0 - depth) for depth in (1, 2)]
    chosen = shortlist(candidates, 3)
    assert [one.predicted for one in chosen] == [9.0, 96.0, 50.0]


# ---------------------------------------------------------------------- end to end
SLOW = ("dspark", "dflash", "jetspec", "dflash2", "domino", "peagle", "mtp", "lookup")
TUNED = {"medusa": {"num_heads": 2}, "dspark": {**OPTIONS["dspark"], "confidence_head": True}}


@pytest.mark.parametrize("method", ["poss", "medusa", *(pytest.param(m, marks=pytest.mark.slow) for m in SLOW)])
def test_tuned_heads_use_their_tree_and_remember_it(method, tmp_path):
    target, ids = shared_target(), prompt()
    heads = AutoDraftHead.from_target(target, method, **TUNED.get(method, OPTIONS.get(method, {}))).eval()
    result = heads.tune(target, [prompt(9), prompt(6, seed=1)[0].tolist()], **QUICK)
    assert heads.tree_config == result.tree == result.trees[0].tree
    measured = [one.measured for one in result.trees]
    assert result.plain > 0
    # Those that no clock tells apart come first, by size; the others by speed.
    tied = [rate >= AS_FAST * max(measured) for rate in measured]
    sizes = [one.tree.num_nodes for one, as_fast in zip(result.trees, tied, strict=True) if as_fast]
    slower = [rate for rate, as_fast in zip(measured, tied, strict=True) if not as_fast]
    assert tied == sorted(tied, reverse=True) and sizes == sorted(sizes) and slower == sorted(slower, reverse=True)
    assert {"chain", "dynamic"} <= {one.tree.kind for one in result.trees}
    assert not heads.predicts_acceptance or {0.3, 0.5, 0.7} <= {one.tree.stop_below for one in result.trees}
    assert str(result).count("\n") >= len(result.trees) and "(before)" in str(result)
    assert torch.equal(plain(target, ids, 16, assistant_model=heads), plain(target, ids, 16))
    heads.save_pretrained(tmp_path)
    assert load_heads(tmp_path).tree_config == result.tree
    assert load_heads(tmp_path, kind="chain", depth=2).tree_config.kind == "chain"
    other = load_heads(tmp_path, dtype=torch.bfloat16)  # tuned for another type
    assert other.config.tuned and other.tree_config == default_tree(other.device, None, other.max_draft_positions)
    assert other.float().tree_config == result.tree


def test_the_whole_block_is_considered(monkeypatch):
    """Of heads that draft all positions in one forward; the others stop where a level costs more than it brings."""
    target = shared_target()
    block = AutoDraftHead.from_target(target, "dflash", num_hidden_layers=1, block_size=12).eval()

    class Asked(Exception):
        pass

    def asked(target, heads, prompts, depth, top_k, **options):
        raise Asked(depth)

    monkeypatch.setattr(sys.modules[tune.__module__], "record_drafts", asked)
    for heads, depth, wanted in ((block, None, 11), (block, 3, 3), (random_heads(target), None, 8)):
        with pytest.raises(Asked, match=f"^{wanted}$"):
            tune(target, heads, [prompt(9)], max_new_tokens=4, depth=depth)


def test_drawn_children_are_tuned_by_their_own_rule():
    target = shared_target()
    heads = random_heads(target, kind="chain", depth=2, children="sampled", draft_temperature=0.7)
    result = tune(target, heads, [prompt(8)], **QUICK, do_sample=True)
    assert {one.tree.children for one in result.trees} == {"sampled"}
    assert result.tree.draft_temperature == 0.7


def test_a_tree_that_is_assigned_and_saved_replaces_the_tuned_one(tmp_path):
    target = shared_target()
    heads = random_heads(target)
    key = machine_key(heads.device, heads.dtype)
    elsewhere = {**key, "machine": "another", "tree_config": DraftTreeConfig(depth=2).to_dict()}
    heads.config.tuned = [elsewhere, {**key, "tree_config": DraftTreeConfig(kind="chain", depth=3).to_dict()}]
    heads.forget_tree()
    assert heads.tree_config.depth == 3
    heads.tree_config = DraftTreeConfig(kind="chain", depth=5)
    heads.save_pretrained(tmp_path)
    again = load_heads(tmp_path)
    assert again.tree_config.depth == 5 and again.config.tuned == [elsewhere]


def test_threads_belong_to_the_machine(tmp_path):
    heads, threads = random_heads(shared_target()), torch.get_num_threads()
    key = machine_key(heads.device, heads.dtype)
    assert key == {"machine": key["machine"], "dtype": "float32", "threads": threads} and key["machine"]
    tuned = [{**key, "tree_config": {"kind": "chain", "depth": 3}}]
    assert tuned_tree(tuned, key).depth == 3 and without_machine(tuned, key) == []
    assert tuned_tree(tuned, {**key, "threads": threads + 1}) is None
    assert without_machine(tuned, {**key, "threads": threads + 1}) == tuned and tuned_tree(None, key) is None


def test_defaults_follow_the_device():
    published = DraftTreeConfig()
    assert default_tree(torch.device("cpu"), published) == CPU_TREE
    assert default_tree(torch.device("cuda"), published) is published
    assert default_tree(torch.device("cpu"), published, 2).depth == 2
    heads = AutoDraftHead.from_target(shared_target(), "eagle")
    assert heads.tree_config == CPU_TREE and heads.config.tree_config is None


# ---------------------------------------------------------------------- draft vocabularies
def test_the_fastest_vocabulary_is_kept():
    target, prompts = shared_target(), [prompt(), prompt(seed=1)]
    heads = random_heads(target, kind="chain", depth=2)
    found = tune_vocabulary(target, heads, prompts, [20, None, 3], max_new_tokens=8, repeats=1)
    assert {one.size for one in found} == {20, None, 3}
    rates = [one.tokens_per_second for one in found]
    assert rates == sorted(rates, reverse=True)
    assert heads.config.pruned_vocab_size == found[0].size
    coverage = {one.size: one.coverage for one in found}
    assert coverage[None] == 1 and 0 < coverage[3] < coverage[20] <= 1
    assert all(one.acceptance_length >= 1 for one in found)


def test_a_corpus_says_which_tokens():
    target = shared_target()
    heads = random_heads(target, kind="chain", depth=2)
    corpus = [[7, 7, 7, 50, 50], torch.tensor([[8, 50]])]
    (found,) = tune_vocabulary(target, heads, [prompt()], [2], corpus, max_new_tokens=4, repeats=1)
    assert heads.draft_vocabulary.tolist() == [7, 50] and found.coverage == pytest.approx(6 / 7)
    with pytest.raises(ValueError, match="token id 99, outside the target's 99 ids"):
        tune_vocabulary(target, heads, [prompt()], [2], [[99]])
    with pytest.raises(ValueError, match="at least one size"):
        tune_vocabulary(target, heads, [prompt()], [])
    with pytest.raises(ValueError, match="between 1 and 99, got 100"):
        tune_vocabulary(target, heads, [prompt()], [100])


def test_plain_generation_that_is_faster_is_said():
    slow = TunedTree(CPU_TREE, 1.5, 10.0, 9.0, (9.0, 9.0))
    result = TuningResult((slow,), 10.0, slow, {"machine": "x", "dtype": "float32", "threads": 1}, 5, 1.0)
    assert "No tree is faster than plain" in result.table() and result.speed_up == pytest.approx(0.9)
    assert result.entry()["tree_config"] == CPU_TREE.to_dict()


def test_of_trees_as_fast_the_smallest_is_chosen():
    def timed(nodes: int, measured: float) -> TunedTree:
        return TunedTree(DraftTreeConfig(kind="chain", depth=nodes - 1), measured=measured)

    trees = [timed(16, 205.0), timed(8, 204.3), timed(5, 150.0), timed(10, 200.8), timed(14, 202.0)]
    assert [one.tree.num_nodes for one in ranked(trees)] == [8, 14, 16, 10, 5]
