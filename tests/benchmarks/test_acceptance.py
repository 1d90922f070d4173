"""Measurements of acceptance run end to end on tiny random models; n-alpha against chains drafted by generating."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.acceptance import acceptance, n_alpha, questions, training_curve
from hf_specheads import AutoDraftHead

INPUTS = ("feature+shifted_token", "feature+token", "token", "feature")


def test_methods_measures_every_head_greedy_and_sampled(measure_pair):
    result = measure_pair("methods", ["eagle", "poss"], "--repeats", "2")
    assert list(result["modes"]) == ["greedy", "temperature 1"]
    for sides in result["modes"].values():
        assert list(sides) == ["plain generate", "eagle", "poss"]
        assert all(side["identical"] for side in sides.values())  # sampled too: the same seed, the same tokens
    greedy, sampled = (sides["poss"]["new_tokens"] for sides in result["modes"].values())
    assert greedy > 0 and sampled > 0
    assert len(result["heads"]["eagle"]["wide"]["pos_acc"]) <= 8


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


def test_training_curve_counts_the_warm_start(pair, measure):
    def facts(starts_from, taus):
        history = [{"step": 0, "loss": 1.0}]
        history += [{"step": step, "eval_acceptance_length": tau} for step, tau in taus.items()]
        return {"recipe": {"starts_from": starts_from}, "steps": 100, "training_flops": 2e12, "log_history": history}

    for name, content in {"base": facts(None, {100: 2.0}), "poss": facts("base", {0: 2.0, 50: 2.2, 100: 2.5})}.items():
        (pair / name).mkdir(exist_ok=True)
        (pair / name / "training_facts.json").write_text(json.dumps(content))
    folders = [str(pair / name) for name in ("base", "poss", "eagle")]  # the last one has no facts
    result = measure("training_curve", "--heads", *folders)
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


def right_in_a_row(target, heads, text, root, depth):
    """Draft positions of the chain after a root that agree with the text, all of them drafted on true tokens."""
    with torch.no_grad():
        features = target(text[:, :root], output_hidden_states=True).hidden_states[-1]
        cache, found = heads.new_draft_cache(), []
        state, logits = heads.start_draft(cache, text[:, : root + 1], features)
        for position in range(1, depth + 1):
            found.append(int(logits.argmax()) == int(text[0, root + position]))
            if position < depth:
                token = text[:, root + position : root + position + 1]
                visible = torch.ones(1, 1, position, dtype=torch.bool)
                state, logits = heads.extend_draft(cache, position, token, state, visible)
    return found


@pytest.mark.parametrize(
    ("method", "options"),
    [("eagle", {"inputs": inputs}) for inputs in INPUTS]
    + [("poss", {"num_specialists": 2, "positions_per_specialist": 1}), ("medusa", {"num_heads": 3})],
)
def test_agreement_is_that_of_drafted_chains(target, method, options):
    prompt_length, max_n = 4, 2
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():  # target and draft choose between two tokens, and agree every other time
        target.lm_head.weight.mul_(0.01)[10].mul_(1e3)
        target.lm_head.weight[11] = -target.lm_head.weight[10]
    heads = AutoDraftHead.from_target(target, method, **options).eval().bind(target)
    text = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
    found = n_alpha.agreement(target, heads, text, prompt_length, max_n)
    first = prompt_length + max_n + 1  # of the tokens compared
    assert found.shape == (max_n + 1, text.shape[1] - first)
    assert 0 < found.sum() < found.numel()
    for n in range(max_n + 1):
        for column in range(found.shape[1]):
            chain = right_in_a_row(target, heads, text, first + column - n - 1, n + 1)
            assert bool(found[n, column]) == chain[n], (n, column)


def test_n_alpha_of_several_heads(measure_pair, pair, target):
    AutoDraftHead.from_target(target, "eagle", inputs="token").save_pretrained(pair / "token")
    AutoDraftHead.from_target(target, "medusa", num_heads=2).save_pretrained(pair / "medusa")
    result = measure_pair("n_alpha", ["eagle", "token", "medusa"], "--max_n", "2")
    assert [facts["inputs"] for facts in result["heads"].values()] == ["feature+shifted_token", "token", None]
    assert [len(facts["n_alpha"]) for facts in result["heads"].values()] == [3, 3, 2]
    assert all(0 <= value <= 1 for facts in result["heads"].values() for value in facts["n_alpha"])
    assert result["positions"] == 2 * (10 - 3)
    table = n_alpha.table(result)
    assert "| medusa | - | - |" in table and "2-alpha" in table
