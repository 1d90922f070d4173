"""Measurements of draft trees run end to end on tiny random models. Nothing here looks at a time."""

from __future__ import annotations

import pytest

from benchmarks.trees import choose


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


def test_choose_ranks_the_last_stage(measure_pair, monkeypatch):
    monkeypatch.setattr(choose, "STAGES", ((3, 1, 1), (2, None, 1)))
    grid = ("--depths", "2", "--top_k", "2", "--total_tokens", "4", "6", "9", "--chains", "1", "2")
    result = measure_pair("choose", ["eagle"], *grid)
    assert result["candidates"] == 4  # 9 nodes do not fit into two levels of two children
    speed_ups = [row["speed_up"] for row in result["ranking"]]
    assert speed_ups == sorted(speed_ups, reverse=True)
    assert len(speed_ups) == 2
