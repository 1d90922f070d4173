"""Measurements of draft trees run end to end on tiny random models. Nothing here looks at a time."""

from __future__ import annotations

import argparse
import math

import pytest
import torch

from benchmarks import figure
from benchmarks.trees import default, grid, replay
from hf_specheads import DraftTreeConfig
from hf_specheads.generation.pace.pace import Pace
from hf_specheads.tuning.replay import RecordedDrafts
from hf_specheads.tuning.rounds import TimedRounds


@pytest.mark.slow
def test_tune_compares_with_the_best_of_the_grid(measure_pair, monkeypatch, pair):
    monkeypatch.setattr("hf_specheads.tuning.rounds.TIMED_CHAINS", (1, 2))
    monkeypatch.setattr("hf_specheads.tuning.rounds.TIMED_TREES", ((2, 2, 3), (3, 2, 6), (2, 4, 8)))
    grid = ("--depths", "1", "2", "--top_k", "2", "--total_tokens", "4", "--chains", "1", "2")
    tuning = ("--tuning", str(pair / "prompts.jsonl"), "--tuning_limit", "1")
    (found,) = measure_pair("tune", ["eagle"], "--repeats", "1", *grid, *tuning)["heads"].values()
    assert set(found["trees"]) == {"tuned", "best of the grid", "saved", "default of the device", "published"}
    assert found["grid_size"] == 4  # chains of 1 and 2, one dynamic tree, EAGLE-1's
    assert found["tuned_over_grid"] > 0 and all(row["identical"] for row in found["trees"].values())


def test_kinds_of_trees_give_the_same_text(measure_pair, pair):
    tuning = ("--tuning", str(pair / "prompts.jsonl"), "--tuning_limit", "1")
    kinds = measure_pair("kinds", ["poss"], "--repeats", "1", *tuning)["heads"]["poss"]
    assert [kinds[kind]["tree"]["kind"] for kind in kinds] == ["chain", "static", "dynamic", "optimal"]
    assert kinds["optimal"]["expected"]["acceptance_length"] >= 1
    assert kinds["chain"]["tree"]["depth"] == kinds["optimal"]["tree"]["depth"]
    assert all(kind["identical"] for kind in kinds.values())


def test_the_grid_holds_trees_that_can_be_drafted():
    args = argparse.Namespace(depths=[2, 5], top_k=[2], total_tokens=[4, 6, 9], chains=[1, 2, 5])
    trees = grid.grid(args, deepest=2)
    assert [tree.kind for tree in trees] == ["chain", "chain", "dynamic", "dynamic"]  # 9 nodes do not fit
    assert max(tree.depth for tree in trees) == 2 and len(grid.grid(args, deepest=None)) == 7


def test_every_stage_keeps_the_fastest_trees(monkeypatch):
    trees, stages = [DraftTreeConfig(kind="chain", depth=depth) for depth in range(1, 9)], []

    def compare_trees(target, heads, group, prompts, max_new_tokens, repeats):
        """Chains of 3 are the fastest, the others the slower the further they are from it."""
        stages.append((len(group), len(prompts), repeats))
        return {name: {"tree": tree.to_dict(), "speed_up": -abs(tree.depth - 3)} for name, tree in group.items()}

    monkeypatch.setattr(grid, "compare_trees", compare_trees)
    assert grid.fastest(None, None, trees, [1, 2, 3], 8, ((4, 1, 1), (2, 3, 2))) == trees[2]
    assert stages == [(6, 1, 1), (2, 1, 1), (4, 3, 2)]


def test_the_default_against_the_grid(measure_pair, monkeypatch, tmp_path):
    monkeypatch.setattr(default, "STAGES", ((1, 1, 1),))
    grid = ("--depths", "2", "--top_k", "2", "--total_tokens", "4", "--chains", "1")
    settings = ("--batch_sizes", "1", "2", "--temperatures", "0", "0.7", "--contexts", "3", "--repeats", "1")
    result = measure_pair("default", ["eagle"], *grid, *settings)
    found = result["measured"]
    assert [(one["batch"], one["temperature"]) for one in found] == [(1, 0), (1, 0.7), (2, 0), (2, 0.7)]
    for one in found:
        assert set(one["sides"]) == {"plain generate", "default", "best of the grid"} and one["grid_size"] == 4
        assert one["temperature"] > 0 or one["sides"]["default"]["identical"]
        assert one["temperature"] == 0 or "identical" not in one["sides"]["default"]
        fastest = max(one["sides"][side]["tokens_per_second"] for side in ("plain generate", "best of the grid"))
        assert one["first"]["interval"] is None or one["batch"] == 1, "of one batch in one pass nothing is known"
        low, high = one["interval"] or (0, math.inf)
        assert low <= one["default_over_grid"] <= high
        assert one["default_over_grid"] == pytest.approx(one["sides"]["default"]["tokens_per_second"] / fastest, 0.01)
    assert result["least_over_grid"] == min(one["default_over_grid"] for one in found)
    assert result["least_over_plain_at_first"] == min(one["first"]["default_over_plain"] for one in found) > 0
    assert result["surely_enough"] + result["surely_less"] <= len(found)
    assert "on the first pass" in default.table(result) and "% interval" in default.table(result)
    figure.draw_default(tmp_path / "a.png", {"default": result})
    figure.draw_default(tmp_path / "b.png", {"default": result})
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_no_batch_of_such_prompts(measure_pair):
    with pytest.raises(ValueError, match="do not fill a batch of 2 with 100 tokens"):
        measure_pair("default", ["eagle"], "--batch_sizes", "2", "--contexts", "100")


def test_the_choice_replayed(measure_pair, monkeypatch):
    """On recorded drafts, in several orders: what is best is not beaten by a fixed tree that was looked at."""
    monkeypatch.setattr("hf_specheads.tuning.rounds.TIMED_CHAINS", (1, 2))
    monkeypatch.setattr("hf_specheads.tuning.rounds.TIMED_TREES", ((2, 2, 3), (3, 2, 6), (2, 4, 8)))
    monkeypatch.setattr(replay, "SEEDS", 2)
    result = measure_pair("replay", ["eagle"])
    (found,) = result["heads"].values()
    assert found["speed_up"] >= 1 and set(found["choices"]) == {replay.ENDING, replay.SEVERAL}
    for shares in (one for machines in found["choices"].values() for one in machines.values()):
        assert 0 < shares["least"] <= shares["later"]
    assert replay.ENDING in replay.table(result)


MACHINE = replay.MACHINES["calm"]


def recording_of(ranks: list[list[int]], one_forward: bool = False) -> replay.Recording:
    """A text at whose places the true tokens have these ranks; a level costs 0.1 plain steps, a node nothing."""
    depth, places = len(ranks[0]), len(ranks)
    drafts = RecordedDrafts(
        scores=tuple(torch.full((places, 1 if level == 0 else 2, 2), -0.5 * (level + 1)) for level in range(depth)),
        frontiers=tuple(torch.tensor([[0, 1]]).expand(places, -1) for _ in range(depth - 1)),
        true_children=torch.tensor(ranks), true_ranks=torch.tensor(ranks), lengths=(places,),
    )  # fmt: skip
    rounds = TimedRounds(chain_target={1: 1.0, 5: 1.0}, chain_draft={1: 0.1, 4: 0.4})
    return replay.Recording(drafts, rounds, 1.0, [0, places], one_forward)


def test_what_rounds_cost_and_give_wherever_they_begin():
    recording = recording_of([[0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]])
    assert recording.favourites == [2, 1, 0, 3, 3]
    assert recording.sureness[0] == pytest.approx([-0.5, -0.5, -0.5])
    chains = [DraftTreeConfig(kind="chain", depth=depth, top_k=1, total_tokens=depth + 1) for depth in (1, 3)]
    assert [recording.accepted(chain) for chain in chains] == [[1, 1, 0, 1, 1], [2, 1, 0, 3, 3]]
    assert recording.always(None) == 5
    assert recording.always(chains[0]) == pytest.approx(3 * 1.1), "from the places 0, 2 and 3"
    assert recording.always(chains[1]) == pytest.approx(2 * 1.3), "from the places 0 and 3"
    assert recording.seconds_of_links(3, 2) == pytest.approx(1.3)


def test_in_a_replay_nothing_is_lost_of_a_text():
    """Rounds that are drafted in every order of events give all tokens, at a cost between the best and the worst."""
    recording = recording_of([[0, 0, 1]] * 300)
    menu = (DraftTreeConfig(kind="chain", depth=3, top_k=1, total_tokens=4),)
    first, *later = replay.passes(recording, menu, True, MACHINE, seed=3)
    assert len(later) == replay.PASSES - 1
    assert all(100 * 1.2 <= spent <= 300 for spent in (first, *later)) and max(later) < 100 * 1.3


def test_a_replay_knows_what_further_links_of_block_drafters_cost(monkeypatch):
    """All their positions come of one forward, so that a link costs what verifying it does."""
    menu, worth = (DraftTreeConfig(kind="chain", depth=3, top_k=1, total_tokens=4),), {True: [], False: []}
    reach = Pace.reach

    def spied(*args):
        found = reach(*args)
        worth[recording.one_forward].append((found.link, found.node))
        return found

    monkeypatch.setattr(Pace, "reach", spied)
    for recording in (recording_of([[0, 0, 1]] * 60, one) for one in (True, False)):
        list(replay.passes(recording, menu, True, MACHINE, seed=3))
    assert worth[True] and all(link == node for link, node in worth[True])
    known = worth[False][len(worth[False]) // 2 :]
    assert known and all(link > node for link, node in known)
