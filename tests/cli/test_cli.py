"""The command line on tiny models: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import argparse
import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.checkpoints import eagle_tensors, write_checkpoint
from transformers import PreTrainedTokenizerFast

from hf_specheads import PossHead, load_heads
from hf_specheads.cli import COMMANDS, build_parser, main
from hf_specheads.cli.demo import answer_problem, read_demo_prompts
from hf_specheads.cli.measure import Sample, run_sample
from hf_specheads.provenance import accelerators
from hf_specheads.trainer import features, regenerate
from hf_specheads.trainer.shipped_pair.chat import answer_text

PROMPTS = [{"name": "one", "prompt": "w5 w6 w7 w8 w9"}, {"name": "two", "prompt": "w50 w40 w30"}]


@pytest.fixture
def pair(target, poss_heads: PossHead, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """A folder in the shape of `model_cards/`: target and POSS heads, with prompts beside them."""
    target.save_pretrained(tmp_path / "pair" / "target")
    tokenizer.save_pretrained(tmp_path / "pair" / "target")
    poss_heads.save_pretrained(tmp_path / "pair" / "poss3")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in PROMPTS))
    return tmp_path / "pair"


def models(pair: Path) -> list[str]:
    return ["--target", str(pair / "target"), "--heads", str(pair / "poss3")]


def demo(pair: Path, *more: str) -> int:
    prompts = pair.parent / "prompts.jsonl"
    return main(["demo", "--pair", str(pair), "--prompts", str(prompts), "--max-new-tokens", "12", *more])


def test_demo(pair: Path, capsys: pytest.CaptureFixture) -> None:
    assert demo(pair) == 0
    printed = capsys.readouterr().out
    for words in ("--- one\nw5 w6 w7 w8 w9", "speed-up", "tau", "pos_acc", "tokens/forward", "plain steps",
                  "assistant_model=heads", "All 2 texts are identical to plain generate"):  # fmt: skip
        assert words in printed
    totals = [line.split() for line in printed.splitlines() if line.startswith("all ")]
    assert len(totals) == 2, "greedy and sampled"
    assert all(total[1] == "24" and total[-1] == "yes" for total in totals)


def test_the_demo_asks_and_checks_where_the_target_chats(pair: Path, tokenizer, capsys: pytest.CaptureFixture) -> None:
    """A right answer by the family's own checker; the tiny target gives none."""
    tokenizer = copy.deepcopy(tokenizer)  # which all tests share
    tokenizer.chat_template = "{% for message in messages %}w1 {{ message['content'] }} {% endfor %}w3"
    tokenizer.save_pretrained(pair / "target")
    assert main(["demo", "--pair", str(pair), "--max-new-tokens", "4", "--limit", "1"]) == 0
    (first, *_), printed = read_demo_prompts(None, chats=True), capsys.readouterr().out
    assert first["messages"][-2]["content"] in printed and first["messages"][-1]["content"] not in printed
    assert "✗" in printed and "✓" not in printed


def test_demo_chats_have_right_answers() -> None:
    chats = read_demo_prompts(None, chats=True)
    assert len({chat["family"] for chat in chats}) == len(chats) == 5
    for chat in chats:
        thinking = chat["chat_template_kwargs"]["enable_thinking"]
        assert answer_problem(chat, answer_text(chat["messages"][-1], thinking)) is None
        assert answer_problem(chat, "I do not know.") is not None


def test_demo_fails_if_a_text_differs(pair: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    import hf_specheads.tuning.turns as turns

    timed, calls = turns.timed_generation, []

    def wrong_once(*args: object, **kwargs: object) -> tuple[list[list[int]], float]:
        calls.append(kwargs)
        (ids,), seconds = timed(*args, **kwargs)
        return [[*ids[:-1], ids[-1] ^ 1] if len(calls) == 1 else ids], seconds

    monkeypatch.setattr(turns, "timed_generation", wrong_once)
    assert demo(pair) == 1
    printed = capsys.readouterr().out
    assert "FAILED: the text differs from plain generate for ['one (greedy)']" in printed
    assert "assistant_model=heads" not in printed


def test_demo_without_the_pair(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    assert main(["demo", "--pair", str(tmp_path / "nowhere")]) == 2
    assert "pass --pair FOLDER" in capsys.readouterr().err
    assert main(["demo", "--pair", str(tmp_path)]) == 2
    assert "there are no draft heads in" in capsys.readouterr().err


def test_demo_prompts() -> None:
    prompts = read_demo_prompts(None)
    assert len(prompts) >= 4 and len({entry["name"] for entry in prompts}) == len(prompts)


def test_generate(pair: Path, tokenizer, target, capsys: pytest.CaptureFixture) -> None:
    arguments = ["generate", *models(pair), "--prompt", "w5 w6 w7", "--max_new_tokens", "10"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    inputs = tokenizer("w5 w6 w7", return_tensors="pt")
    plain = target.generate(**inputs, max_new_tokens=10, do_sample=False)
    assert printed.out.strip() == tokenizer.decode(plain[0, 3:], skip_special_tokens=True)
    assert "10 tokens" in printed.err and "acceptance_length" in printed.err
    assert "tokens_per_forward" in printed.err and "plain steps" in printed.err


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.8", "--top_p", "0.9", "--seed", "3"]])
def test_generate_compared(pair: Path, capsys: pytest.CaptureFixture, sampling: list[str]) -> None:
    arguments = ["generate", *models(pair), "--prompt", "w5 w6 w7", "--max_new_tokens", "10", "--compare", "--mark"]
    assert main([*arguments, *sampling]) == 0
    assert "identical to plain generate; speed-up" in capsys.readouterr().err


@pytest.mark.parametrize(("tie", "code", "said"), [(True, 0, "rounding decides"), (False, 1, "by more than rounding")])
def test_texts_that_differ_once(pair: Path, capsys, monkeypatch, tie: bool, code: int, said: str) -> None:
    """Which trees are drafted depends on measured times: generated again, the texts may be the same."""

    def another_text(*args, **options) -> Sample:
        sample = run_sample(*args, **options)
        sample.token_ids = [*sample.token_ids[:-1], (sample.token_ids[-1] + 1) % 8]
        return sample

    judged = []
    monkeypatch.setattr("hf_specheads.cli.generate.run_sample", another_text)
    monkeypatch.setattr(
        "hf_specheads.diagnosis.difference.part_at_a_tie", lambda *args, **options: judged.append(args) or tie
    )
    arguments = ["generate", *models(pair), "--prompt", "w5 w6", "--max_new_tokens", "6", "--compare", "--json"]
    assert main(arguments) == code
    printed = capsys.readouterr()
    ((_, prompt, ours, plain),) = judged
    assert prompt.shape == (1, 2) and ours[:-1] == plain[:-1] and ours[-1] != plain[-1]
    assert said in printed.err and json.loads(printed.out)["at_a_tie"] is tie


def test_generate_with_another_tree(pair: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["generate", *models(pair), "--prompt", "w5", "--max_new_tokens", "10", "--compare"]
    assert main([*arguments, "--kind", "chain", "--depth", "2"]) == 0
    assert "identical" in capsys.readouterr().err


def test_eval(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["eval", *models(pair), "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "12"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("acceptance_length", "tokens_per_forward", "pos_acc", "plain steps"))
    assert main([*arguments, "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["prompts"] == 2 and numbers["new_tokens"] == 24 and numbers["identical"] is True
    assert 1 <= numbers["acceptance_length"] <= 5 and numbers["speed_up"] > 0
    assert numbers["tokens_per_forward"] == pytest.approx(24 / numbers["target_forwards"])
    assert numbers["tree_config"]["total_tokens"] == 9 and "transformers" in numbers["environment"]
    assert main([*arguments, "--no_plain", "--limit", "1", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["prompts"] == 1 and numbers["speed_up"] is None and numbers["identical"] is None


def test_bench(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    common = ["bench", *models(pair), "--prompts", str(tmp_path / "prompts.jsonl"), "--repeats", "1"]
    common += ["--max-new-tokens", "12"]
    assert main(common) == 0
    assert "heads, every round" in capsys.readouterr().out
    for more, same in (([], True), (["--batch-size", "2"], True), (["--temperature", "0.7"], True)):
        assert main([*common, *more, "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert list(facts["sides"]) == ["plain", "heads, every round", "heads"]
        assert all(side["identical"] is same and side["speed_up"] > 0 for side in facts["sides"].values())
        assert facts["sides"]["plain"]["acceptance_length"] is None
        assert facts["sides"]["heads, every round"]["plain_steps"] == 0
        assert facts["sides"]["heads"]["tokens_per_forward"] >= 1


def test_bench_says_how_many_plain_steps_there_were_and_why(pair: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """Heads that never pay: half of their tokens come from plain steps, which tau alone does not show."""
    from hf_specheads.generation.pace.pace import PLAIN, Pace

    monkeypatch.setattr(Pace, "choose", lambda self, *_: PLAIN)
    arguments = ["bench", *models(pair), "--prompts", str(tmp_path / "prompts.jsonl"), "--repeats", "1"]
    assert main([*arguments, "--max-new-tokens", "12"]) in (0, 1)
    assert re.search(r"^plain steps of heads  \d+", capsys.readouterr().out, flags=re.MULTILINE)


def test_convert(target, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    target.save_pretrained(tmp_path / "target")
    source = write_checkpoint(tmp_path / "theirs", eagle_tensors(2, embedding=False), pickled=True)
    arguments = ["convert", str(source), str(tmp_path / "ours"), "--positions_per_specialist", "3", "--depth", "4"]
    assert main([*arguments, "--target", str(tmp_path / "target"), "--dtype", "bfloat16"]) == 0
    heads = load_heads(tmp_path / "ours")
    assert heads.config.positions_per_specialist == 3 and heads.tree_config.depth == 4
    assert heads.dtype == torch.bfloat16 and heads.config.target["fingerprint"]
    assert main(arguments) == 2  # not empty any more
    assert "--overwrite" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0


def test_train_hands_over(capsys: pytest.CaptureFixture) -> None:
    before = list(sys.argv)
    assert main(["train", "--help"]) == 0
    assert "recipe" in capsys.readouterr().out and sys.argv == before


def test_env(capsys: pytest.CaptureFixture) -> None:
    assert main(["env"]) == 0
    assert "transformers" in capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["torch"] == torch.__version__
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    assert built in facts["torch build"] or torch.version.hip or torch.version.xpu
    assert main(["env", "--json", "--devices"]) == 0
    asked = json.loads(capsys.readouterr().out)
    assert asked["torch threads"] == str(torch.get_num_threads())
    assert set(facts) < set(asked) and asked["accelerators"] == accelerators()


@pytest.mark.parametrize(
    ("script", "said"),
    [("echo 'GPU of 80 GB'; echo 'another one'", "GPU of 80 GB, another one"),
     ("exit 9", "not known: nvidia-smi fails"), (None, "none (nvidia-smi was not found)")],
)  # fmt: skip
def test_env_lists_what_nvidia_smi_does(
    script: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accelerators"].startswith(said)


def test_every_command_has_help(capsys: pytest.CaptureFixture) -> None:
    for command in COMMANDS:
        if command == "train":
            continue
        with pytest.raises(SystemExit) as stop:
            build_parser().parse_args([command, "--help"])
        assert stop.value.code == 0
    assert capsys.readouterr().out


def test_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "hf_specheads", "--version"], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.startswith("hf-specheads ")


# ---------------------------------------------------------------------- options
def options_of(command: str) -> list[argparse.Action]:
    (commands,) = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return [action for action in commands.choices[command]._actions if action.option_strings]


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"train"}))
def test_options_have_one_spelling_a_help_and_their_default(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for action in options_of(command):
        assert "_" not in "".join(action.option_strings) and action.help
        if action.default not in (None, False, argparse.SUPPRESS):
            assert f"default: {action.default}" in shown or "default" in action.help, action.option_strings
    assert {"--json", "--quiet", "--debug"} <= {
        name for action in options_of(command) for name in action.option_strings
    }


def test_underscores_are_understood_and_values_left_alone() -> None:
    words = ["generate", "--target=a_b", "--heads", "c_d", "--max_new_tokens=7", "--top_k", "3", "--prompt=--x_y"]
    args = build_parser().parse_args(words)
    assert (args.target, args.heads, args.max_new_tokens, args.tree_top_k) == ("a_b", "c_d", 7, 3)
    assert args.prompt == "--x_y"
    for module in (regenerate, features):  # whose arguments are the trainer's
        given = ["--target", "a_b", "--data=c_d", "--out", "e_f", "--max_length=9", "--batch_size", "2"]
        args = module.parse_args(given)
        assert (args.target, args.data, args.out, args.max_length, args.batch_size) == (
            "a_b",
            "c_d",
            Path("e_f"),
            9,
            2,
        )


@pytest.mark.parametrize(
    "command", ["demo", "generate", "eval", "bench", "inspect", "tune", "export", "convert", "env"]
)
def test_json_is_all_that_stdout_gets(command: str, pair: Path, tmp_path: Path, capsys) -> None:
    prompts = ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "6"]
    heads = str(pair / "poss3")
    rest = {
        "demo": ["--pair", str(pair), *prompts],
        "generate": [*models(pair), "--prompt", "w5 w6", "--max-new-tokens", "6"],
        "eval": [*models(pair), *prompts],
        "bench": [*models(pair), *prompts, "--repeats", "1"],
        "inspect": [heads],
        "tune": [heads, "--target", str(pair / "target"), *prompts, "--repeats", "1", "--limit", "1", "--dry-run"],
        "export": [heads, str(tmp_path / "out"), "--to", "eagle"],
        "convert": [heads, str(tmp_path / "out")],
        "env": [],
    }[command]
    assert main([command, *rest, "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


def test_an_error_is_one_line_and_a_traceback_under_debug(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["inspect", str(tmp_path / "nowhere")]
    assert main(words) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    with pytest.raises((ValueError, OSError)):
        main([*words, "--debug"])


def test_destinations_are_those_that_can_be_written() -> None:
    from hf_specheads.checkpoints.write import ALL_DESTINATIONS
    from hf_specheads.cli.export import DESTINATIONS

    assert sorted(DESTINATIONS) == sorted(ALL_DESTINATIONS)


def test_bars_are_shown_on_terminals_only_and_not_when_quiet(pair: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    from transformers.utils import logging

    arguments = ["eval", *models(pair), "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "4"]
    monkeypatch.setattr(logging, "_tqdm_active", True)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "")
    for terminal, more, shown in ((True, [], True), (True, ["--quiet"], False), (False, [], False)):
        logging.enable_progress_bar()
        monkeypatch.setattr(type(sys.stderr), "isatty", lambda self, terminal=terminal: terminal, raising=False)
        assert main([*arguments, *more]) == 0
        assert ("prompts: " in capsys.readouterr().err) == shown


# ---------------------------------------------------------------------- bench in the field's dialect
def test_bench_has_the_names_others_use(pair: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    suite = tmp_path / "own.jsonl"
    turns = [{"category": "a", "turns": ["w5 w6 w7"]}, {"category": "b", "turns": ["w9 w8 w7", "w1"]}]
    suite.write_text("".join(json.dumps(entry) + "\n" for entry in turns))
    options = ["--suite", str(suite), "--max-new-tokens", "8", "--repeats", "1", "--kind", "chain", "--depth", "2"]
    assert main(["bench", *models(pair), *options, "--against", str(pair / "poss3"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    side = found["sides"]["heads, every round"]
    assert side["num_draft_tokens"] >= side["num_drafts"] > 0
    assert side["acceptance_length"] == 1 + side["num_accepted_tokens"] / side["num_drafts"]
    assert side["ttft"] > 0 and side["decode_tokens_per_second"] > 0
    assert set(found["groups"]) == {"own", "own/a", "own/b"}
    assert found["groups"]["own"]["num_drafts"] == side["num_drafts"]
    assert found["tau_difference"]["low"] <= 0 <= found["tau_difference"]["high"]
    assert main(["bench", *models(pair), *options]) == 0
    printed = capsys.readouterr().out
    assert "TTFT ms" in printed and "accepted up to position" in printed and "own/b  tau" in printed


def test_bench_wants_prompts_or_a_suite(pair: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", *models(pair)]) == 2
    assert "`--suite ours` needs no network" in capsys.readouterr().err
    assert main(["bench", *models(pair), "--suite", "ours,nothing"]) == 2
    assert "unknown suite 'nothing'" in capsys.readouterr().err
    assert main(["bench", *models(pair), "--suite", "ours", "--thinking", "off"]) == 2
    assert "no `enable_thinking`" in capsys.readouterr().err
