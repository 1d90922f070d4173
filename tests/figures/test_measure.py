"""What figures are drawn from, on tiny models: numbers that fit together, and commands that refuse in one line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from support.heads import random_heads
from support.targets import own_target, shared_target

from hf_specheads import DraftLanguageModel
from hf_specheads.cli import main
from hf_specheads.figures.measure import Sweeps, measure, sweeps_of, training_curve

FEW = {"depths": (1, 3), "nodes": (4,), "batch_sizes": (1, 2), "max_n": 2, "max_new_tokens": 12, "repeats": 1}
PROMPTS = ["w5 w6 w7 w8", "w50 w40 w30"]


def test_numbers_fit_together(tokenizer) -> None:
    target = shared_target()
    heads = {"same": DraftLanguageModel.from_model(target), "random": random_heads(target)}
    results = json.loads(json.dumps(measure(target, heads, PROMPTS, tokenizer, Sweeps(**FEW))))
    same, other = results["heads"]["same"], results["heads"]["random"]
    assert same["depths"]["3"]["tau"] > same["depths"]["1"]["tau"] > 1.8, "it drafts what the target says"
    assert set(same["depths"]["3"]["pos_acc"]) == {1.0}
    for point in (*same["depths"].values(), *other["depths"].values()):
        assert len(point["reached"]) == len(point["pos_acc"]) and point["reached"][0] <= point["rounds"]
        assert all(later <= first for first, later in itertools.pairwise(point["reached"]))
    assert other["depths"]["3"]["tau"] >= 1.0 and other["nodes"]["4"]["rounds"] >= 5
    assert len(other["n_alpha"]) == 3 and all(0 <= value <= 1 for value in other["n_alpha"])
    for facts in (same, other):
        assert set(facts["batches"]) == {"1", "2"}
        assert set(facts["depths"]["1"]["milliseconds"]) == {"draft", "target"}
    assert results["plain"]["tokens_per_second"] > 0 and set(results["plain"]["batches"]) == {"1", "2"}
    assert sweeps_of(results["settings"]) == Sweeps(**FEW)
    assert heads["random"].tree_config.kind == "dynamic" and not heads["random"].profile, "heads are as they were"


def test_without_a_clock_nothing_is_timed(tokenizer) -> None:
    target = own_target("bloom")
    heads = {"heads": random_heads(target)}
    results = measure(target, heads, [torch.tensor([5, 6, 7, 8])], tokenizer, Sweeps(**FEW, timing=False))
    assert (
        set(results["heads"]["heads"]["depths"]["1"]) == {"tau", "pos_acc", "reached", "rounds"}
        and not results["plain"]
    )
    assert "nodes" not in results["heads"]["heads"] and "no draft trees" in results["skipped"][0]


def test_curves_of_a_training(tmp_path: Path) -> None:
    assert training_curve(tmp_path) == {}
    history = [{"step": 1, "loss": 5.0}, {"step": 2, "eval_acceptance_length": 2.5}, {"step": 2, "loss": 4.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert training_curve(tmp_path) == {"loss": [[1, 5.0], [2, 4.0]], "tau": [[2, 2.5]]}


def test_figures_need_heads_and_prompts(tokenizer) -> None:
    with pytest.raises(ValueError, match="got 0 heads and 1 prompts"):
        measure(shared_target(), {}, ["w5"], tokenizer)


def test_the_command(target, poss_heads, tokenizer, tmp_path: Path, capsys) -> None:
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    poss_heads.save_pretrained(tmp_path / "poss3")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w5 w6 w7"}\n')
    command = ["figures", "--pair", str(tmp_path), "--prompts", str(tmp_path / "prompts.jsonl"), "--no-timing"]
    command += ["--depths", "1", "2", "--nodes", "4", "--max-new-tokens", "12", "--only", "tau", "--formats", "svg"]
    assert main([*command, "--output", str(tmp_path / "out"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts["figures"]) == ["tau"] and Path(facts["page"]).is_file()
    again = ["figures", "--from", str(tmp_path / "out" / "results.json"), "--only", "tau", "--formats", "svg"]
    assert main([*again, "--output", str(tmp_path / "again")]) == 0
    first, second = (tmp_path / name / "tau.svg" for name in ("out", "again"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--only", "pie"], "unknown figures ['pie']"), (["--nodes", "1"], "at least 2"),
     (["--from", "{folder}/x.json"], "holds no results"), (["--pair", "{folder}/gone"], "pass --pair FOLDER")],
)  # fmt: skip
def test_one_line_for_wrong_input(words: list[str], said: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "x.json").write_text("{}")
    words = [word.replace("{folder}", str(tmp_path)) for word in words]
    assert main(["figures", "--output", str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1 and not (tmp_path / "out").exists()
