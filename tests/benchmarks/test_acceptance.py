"""Measurements of acceptance run end to end on tiny random models; n-alpha against chains drafted by generating."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest

from benchmarks.acceptance import acceptance, curves, questions

INPUTS = ("feature+shifted_token", "feature+token", "token", "feature")


def test_acceptance_reports_every_mode_tree_and_depth(measure_pair, pair):
    facts = {"steps": 10, "training_flops": 1e12, "hours": 0.5, "log_history": []}
    (pair / "poss" / "training_facts.json").write_text(json.dumps(facts))
    words = ("--depths", "2", "3", "--trees", "chain", "16 nodes", "--modes", "greedy", "temperature 1")
    heads = measure_pair("acceptance", ["eagle", "poss"], *words)["heads"]
    for mode in ("greedy", "temperature 1"):
        for tree in ("chain", "16 nodes"):
            assert list(heads["poss"]["measured"][mode][tree]) == ["2", "3"]
    assert heads["poss"]["training_flops"] == 1e12
    assert "training_flops" not in heads["eagle"]
    cell = heads["eagle"]["measured"]["greedy"]["chain"]["3"]
    assert cell["identical"] and cell["interval"][0] <= cell["acceptance_length"] <= cell["interval"][1]
    tokens, rounds = questions.counts_from(cell["counts"])
    assert sum(tokens) / sum(rounds) == pytest.approx(cell["acceptance_length"], rel=1e-4)


def test_prompts_in_a_batch_count_as_each_alone(measure_pair, pair):
    words = ("--depths", "3", "--trees", "16 nodes", "--batch_size")
    together, alone = (measure_pair("acceptance", ["poss"], *words, size)["heads"]["poss"] for size in ("2", "1"))
    assert (
        together["measured"]["greedy"]["16 nodes"]["3"]["counts"]
        == (alone["measured"]["greedy"]["16 nodes"]["3"]["counts"])
    )


def test_heads_of_one_name_are_refused_before_anything_is_measured(measure_pair, pair, tmp_path):
    """They would be one column, with the weights of one and the facts of the other."""
    shutil.copytree(pair / "poss", tmp_path / "others" / "poss")
    with pytest.raises(ValueError, match="would both be called 'poss' in the results; rename a folder"):
        measure_pair("acceptance", ["poss", str(tmp_path / "others" / "poss")], "--depths", "2", "--trees", "chain")


def test_heads_are_told_apart_by_prompts_that_agree_on_the_difference():
    def cell(tokens):
        return {"6": {"counts": " ".join(f"{count}/10" for count in tokens)}}

    worse, better, noisy = [30, 50, 20, 40] * 10, [31, 51, 21, 41] * 10, [31, 20, 51, 42] * 10
    assert acceptance.told_apart(cell(better), cell(worse), "6")
    assert not acceptance.told_apart(cell(noisy), cell(worse), "6")
    assert not acceptance.told_apart(cell(worse), cell(worse), "6")
    assert questions.difference(cell(better), cell(worse), "6").mean == pytest.approx(0.1)


def test_questions_are_answered_by_seed_where_both_heads_were_measured():
    def head(tokens):
        counts = " ".join(f"{count}/10" for count in tokens)
        return {"measured": {"greedy": {"chain": {depth: {"counts": counts} for depth in ("4", "8")}}}}

    worse, better = [30, 50, 20, 40] * 10, [31, 51, 21, 41] * 10
    heads = {"hass": head(better), "eagle": head(worse), "hass-seed1": head(worse), "eagle-seed1": head(worse)}
    heads |= {"poss3-seed1": head(worse), "medusa": head(worse)}
    provenance = {"processor": "one", "threads": 1, "commit": "abc", "uncommitted_changes": False, "command": "x",
                  "date": "today", "versions": {"torch": "2", "transformers": "5"}}  # fmt: skip
    result = {"modes": ["greedy"], "trees": {"chain": {}}, "depths": [4, 8], "heads": heads, "num_prompts": 40}
    lines = questions.answers_table({**result, "provenance": provenance}).splitlines()
    first = "| HASS over EAGLE, equal compute | 0.10 (0.10 to 0.10) | 0.10 (0.10 to 0.10) | ahead |"
    assert first in lines
    answered = [line.split("|")[1].strip() for line in lines if line.startswith("| ")][1:]
    assert answered == [
        "HASS over EAGLE, equal compute",
        "HASS over EAGLE, equal compute, seed 1",
        "POSS-3 over EAGLE, equal compute, seed 1",
        "POSS-3 over HASS, equal compute, seed 1",
    ]
    assert sum(line.endswith("| not told apart |") for line in lines) == 3


def test_groups_of_prompts_have_their_own_acceptance(measure_pair, pair):
    entries = [{"name": str(n), "group": "ab"[n % 2], "thinking": n == 1, "prompt": f"w{n} w7 w8"} for n in range(4)]
    (pair / "prompts.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    result = measure_pair("acceptance", ["eagle"], "--depths", "2", "--trees", "chain")
    cell = result["heads"]["eagle"]["measured"]["greedy"]["chain"]["2"]
    assert list(cell["groups"]) == ["a", "not thinking", "b", "thinking"]
    tokens, rounds = questions.counts_from(cell["counts"])
    assert cell["groups"]["a"] == pytest.approx((tokens[0] + tokens[2]) / (rounds[0] + rounds[2]), rel=1e-4)
    assert cell["groups"]["thinking"] == pytest.approx(tokens[1] / rounds[1], rel=1e-4)


def test_slopes_are_of_the_last_part_of_a_training(tmp_path: Path) -> None:
    """Evaluations before the first step, and losses between evaluations, are no points of a curve."""
    log = [{"step": 0, "eval_expected_acceptance_length": 1.0}, {"step": 5, "loss": 3.0}]
    log += [{"step": step, "eval_expected_acceptance_length": tau} for step, tau in ((10, 2.0), (20, 2.5), (40, 2.9))]
    facts = {"log_history": log, "training_flops": 80e12, "steps": 40, "recipe": {"starts_from": "eagle-base"}}
    (tmp_path / "training_facts.json").write_text(json.dumps(facts))
    found = curves.measure(argparse.Namespace(heads=[str(tmp_path)]))["heads"][tmp_path.name]
    assert found["tau"] == [2.0, 2.5, 2.9] and found["compute"] == 80.0
    assert found["slope"] == pytest.approx(0.4 / 40)
