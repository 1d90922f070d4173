"""The command line on tiny models: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.checkpoints import eagle_tensors, write_checkpoint
from transformers import PreTrainedTokenizerFast

from hf_specheads import PossHead, load_heads
from hf_specheads.cli import COMMANDS, build_parser, main
from hf_specheads.cli.demo import read_demo_prompts
from hf_specheads.cli.evaluate import read_prompts

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
    return main(["demo", "--model_cards", str(pair), "--prompts", str(prompts), "--max_new_tokens", "12", *more])


def test_demo(pair: Path, capsys: pytest.CaptureFixture) -> None:
    assert demo(pair) == 0
    printed = capsys.readouterr().out
    for words in ("--- one\nw5 w6 w7 w8 w9", "speed-up", "tau", "pos_acc", "saved", "assistant_model=heads",
                  "All 2 texts are identical to plain generate."):  # fmt: skip
        assert words in printed
    (total,) = [line.split() for line in printed.splitlines() if line.startswith("all ")]
    assert total[1] == "24" and total[-1] == "yes"


def test_demo_fails_if_a_text_differs(pair: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    import hf_specheads.cli.measure as measure

    timed, calls = measure.timed_generation, []

    def wrong_once(*args: object, **kwargs: object) -> tuple[list[list[int]], float]:
        calls.append(kwargs)
        (ids,), seconds = timed(*args, **kwargs)
        return [[*ids[:-1], ids[-1] ^ 1] if len(calls) == 1 else ids], seconds

    monkeypatch.setattr(measure, "timed_generation", wrong_once)
    assert demo(pair) == 1
    printed = capsys.readouterr().out
    assert "FAILED: the text differs from plain generate for ['one']" in printed
    assert "assistant_model=heads" not in printed


def test_demo_without_the_pair(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    assert main(["demo", "--model_cards", str(tmp_path / "nowhere")]) == 2
    assert "pass --model_cards" in capsys.readouterr().err
    assert main(["demo", "--model_cards", str(tmp_path)]) == 2
    assert "does not exist" in capsys.readouterr().err


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


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.8", "--top_p", "0.9", "--seed", "3"]])
def test_generate_compared(pair: Path, capsys: pytest.CaptureFixture, sampling: list[str]) -> None:
    arguments = ["generate", *models(pair), "--prompt", "w5 w6 w7", "--max_new_tokens", "10", "--compare", "--mark"]
    assert main([*arguments, *sampling]) == 0
    assert "identical to plain generate; speed-up" in capsys.readouterr().err


def test_generate_with_another_tree(pair: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["generate", *models(pair), "--prompt", "w5", "--max_new_tokens", "10", "--compare"]
    assert main([*arguments, "--kind", "chain", "--depth", "2"]) == 0
    assert "identical" in capsys.readouterr().err


def test_eval(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["eval", *models(pair), "--prompts", str(tmp_path / "prompts.jsonl"), "--max_new_tokens", "12"]
    assert main([*arguments, "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert "acceptance_length" in printed and "pos_acc" in printed
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert numbers["prompts"] == 2 and numbers["new_tokens"] == 24 and numbers["identical"] is True
    assert 1 <= numbers["acceptance_length"] <= 5 and numbers["speed_up"] > 0
    assert numbers["tree_config"]["total_tokens"] == 9 and "transformers" in numbers["environment"]
    assert main([*arguments, "--no_plain", "--limit", "1", "--json", str(tmp_path / "out.json")]) == 0
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert numbers["prompts"] == 1 and numbers["speed_up"] is None and numbers["identical"] is None


def test_bench(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    common = ["bench", *models(pair), "--prompts", str(tmp_path / "prompts.jsonl"), "--repeats", "1"]
    common += ["--max_new_tokens", "12", "--json", str(tmp_path / "out.json")]
    for more, same in (([], True), (["--batch_size", "2"], True), (["--temperature", "0.7"], True)):
        assert main([*common, *more]) == 0
        assert "heads, every round" in capsys.readouterr().out
        facts = json.loads((tmp_path / "out.json").read_text())
        assert list(facts["sides"]) == ["plain", "heads, every round", "heads"]
        assert all(side["identical"] is same and side["speed_up"] > 0 for side in facts["sides"].values())
        assert facts["sides"]["plain"]["acceptance_length"] is None


def test_prompt_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one prompt\nof two lines")
    messages = [{"role": "user", "content": "hi"}]
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "x"}) + "\n\n" + json.dumps({"messages": messages}) + "\n")
    assert read_prompts([tmp_path / "a.txt", tmp_path / "b.jsonl"]) == ["one prompt\nof two lines", "x", messages]
    for content, words in (('{"question": 1}', "line 1 needs"), ("{", "not valid JSON"), ("", "non-empty prompts")):
        (tmp_path / "c.jsonl").write_text(content)
        with pytest.raises(ValueError, match=words):
            read_prompts([tmp_path / "c.jsonl"])


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
    printed = capsys.readouterr().out
    assert "transformers" in printed and "generate() dispatch  installed" in printed


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
