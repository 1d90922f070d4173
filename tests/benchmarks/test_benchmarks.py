"""Every benchmark runs end to end on tiny random models. Nothing here looks at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import (
    acceptance,
    bench_round,
    bench_speedup,
    choose_tree,
    common,
    methods,
    training_curve,
    tree_kinds,
)

ROUND_STAGES = {"draft", "target", "accept", "commit", "loop", "whole round"}


def result_of(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


def test_speedup_compares_all_sides_and_finds_the_texts_identical(arguments, pair):
    more = ("--repeats", "2", "--baselines", "--assistant", str(pair / "target"))
    results = arguments("speedup", ["eagle", "poss"], *more)
    assert bench_speedup.main() == 0
    (sides,) = result_of(results, "speedup")["prompt_sets"].values()
    assert list(sides)[:3] == ["plain generate", "eagle", "poss"]
    assert len(sides) == 5
    for name in ("eagle", "poss"):
        assert sides[name]["identical"]
        assert sides[name]["acceptance_length"] >= 1
        assert sides[name]["speed_up_range"][0] <= sides[name]["speed_up"] <= sides[name]["speed_up_range"][1]
    assert sides["plain generate"]["forwards_saved"] == 0
    assert "acceptance_length" not in sides["plain generate"]
    assert "| poss |" in (results / "speedup.md").read_text()


def test_speedup_fails_when_a_text_differs(arguments, monkeypatch):
    arguments("speedup", ["eagle"], "--repeats", "1")
    generate = common.timed_generate

    def wrong(target, inputs, **options):
        ids, seconds = generate(target, inputs, **options)
        return ([*ids[:-1], 5 if ids[-1] != 5 else 6] if "assistant_model" in options else ids), seconds

    monkeypatch.setattr(common, "timed_generate", wrong)
    assert bench_speedup.main() == 1


def test_methods_measures_every_head_greedy_and_sampled(arguments):
    results = arguments("methods", ["eagle", "poss"], "--repeats", "2")
    assert methods.main() == 0
    result = result_of(results, "methods")
    assert list(result["modes"]) == ["greedy", "temperature 1"]
    for sides in result["modes"].values():
        assert list(sides) == ["plain generate", "eagle", "poss"]
        assert all(side["identical"] for side in sides.values())  # sampled too: the same seed, the same tokens
    greedy, sampled = (sides["poss"]["new_tokens"] for sides in result["modes"].values())
    assert greedy > 0 and sampled > 0
    assert len(result["heads"]["eagle"]["wide"]["pos_acc"]) <= 8
    assert "| poss |" in (results / "methods.md").read_text()


def test_tree_kinds_gives_every_kind_the_same_text(arguments, pair):
    tuning = str(pair / "prompts.jsonl")
    results = arguments("tree_kinds", ["poss"], "--repeats", "1", "--tuning", tuning, "--tuning_limit", "1")
    assert tree_kinds.main() == 0
    kinds = result_of(results, "tree_kinds")["heads"]["poss"]
    assert [kinds[kind]["tree"]["kind"] for kind in kinds] == ["chain", "static", "dynamic", "optimal"]
    assert kinds["optimal"]["expected"]["acceptance_length"] >= 1
    assert kinds["chain"]["tree"]["depth"] == kinds["optimal"]["tree"]["depth"]
    assert "| poss | optimal |" in (results / "tree_kinds.md").read_text()


def test_acceptance_reports_every_family_and_depth(arguments, pair):
    facts = {"steps": 10, "training_flops": 1e12, "hours": 0.5, "log_history": []}
    (pair / "poss" / "training_facts.json").write_text(json.dumps(facts))
    results = arguments("acceptance", ["eagle", "poss"], "--depths", "2", "3")
    assert acceptance.main() == 0
    heads = result_of(results, "acceptance")["heads"]
    for family in ("papers", "default"):
        assert list(heads["poss"]["measured"][family]) == ["2", "3"]
    assert heads["poss"]["training_flops"] == 1e12
    assert "training_flops" not in heads["eagle"]
    itself = heads["eagle"]["measured"]["papers"]["2"]["difference"]
    assert itself == {"mean": 0, "low": 0, "high": 0}


def test_round_splits_the_whole_round_into_stages(arguments):
    results = arguments("round", ["poss"], "--repeats", "1")
    bench_round.main()
    result = result_of(results, "round")
    assert set(result["stages"]) == ROUND_STAGES
    parts = sum(stage["milliseconds"] for name, stage in result["stages"].items() if name != "whole round")
    assert parts == pytest.approx(result["round_milliseconds"], rel=1e-3)
    assert 0 < result["outside_share"] < 1
    assert result["rounds"] > 0


def test_timed_calls_leave_the_object_as_it_was(target):
    before = target.forward
    with bench_round.timed_calls(target, "forward") as seconds:
        target(input_ids=torch.tensor([[5]]))
    assert len(seconds) == 1
    assert target.forward == before
    assert "forward" not in vars(target)


def test_choose_tree_ranks_the_last_stage(arguments, monkeypatch, capsys):
    monkeypatch.setattr(choose_tree, "STAGES", ((3, 1, 1), (2, None, 1)))
    grid = ("--depths", "2", "--top_k", "2", "--total_tokens", "4", "6", "9", "--chains", "1", "2")
    results = arguments("choose_tree", ["eagle"], *grid)
    choose_tree.main()
    result = result_of(results, "choose_tree")
    assert result["candidates"] == 4  # 9 nodes do not fit into two levels of two children
    speed_ups = [row["speed_up"] for row in result["ranking"]]
    assert speed_ups == sorted(speed_ups, reverse=True)
    assert len(speed_ups) == 2
    assert "best default tree for eagle" in capsys.readouterr().out


def test_training_curve_counts_the_warm_start(pair, monkeypatch):
    def facts(starts_from, taus):
        history = [{"step": 0, "loss": 1.0}]
        history += [{"step": step, "eval_acceptance_length": tau} for step, tau in taus.items()]
        return {"recipe": {"starts_from": starts_from}, "steps": 100, "training_flops": 2e12, "log_history": history}

    for name, content in {"base": facts(None, {100: 2.0}), "poss": facts("base", {0: 2.0, 50: 2.2, 100: 2.5})}.items():
        (pair / name).mkdir(exist_ok=True)
        (pair / name / "training_facts.json").write_text(json.dumps(content))
    folders = [str(pair / name) for name in ("base", "poss", "eagle")]  # the last one has no facts
    monkeypatch.setattr("sys.argv", ["training_curve.py", "--heads", *folders, "--output", str(pair / "results")])
    training_curve.main()
    result = result_of(pair / "results", "training_curve")
    assert result["axis"] == "training_flops"
    assert [p["training_flops"] for p in result["curves"]["poss"]["points"]] == [2e12, 3e12, 4e12]
    assert set(result["curves"]) == {"base", "poss"}
    assert (pair / "results" / "training_curve.png").stat().st_size > 1000


def test_training_curve_needs_the_run_of_the_warm_start(pair):
    facts = {"recipe": {"starts_from": "base"}, "steps": 2, "log_history": []}
    with pytest.raises(FileNotFoundError, match="warm-started from 'base'"):
        training_curve.curve(facts, pair / "poss")


def test_training_curve_refuses_folders_without_a_curve(pair):
    with pytest.raises(FileNotFoundError, match="eval_acceptance_length"):
        training_curve.collect([str(pair / "eagle")])


def test_results_name_no_folder_outside_the_repository(monkeypatch):
    inside = str(common.ROOT / "model_cards" / "poss3")
    monkeypatch.setattr("sys.argv", ["/x/benchmarks/bench_round.py", "--heads", inside, "/away/heads/poss3", "eagle"])
    facts = common.provenance()
    assert facts["command"] == "python -m benchmarks.bench_round --heads model_cards/poss3 poss3 eagle"
    assert {"commit", "date", "processor", "threads", "versions"} <= set(facts)
