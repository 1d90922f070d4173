"""The scripts of `examples/`, run with tiny models, and as they stand where that takes minutes (slow)."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hf_specheads import AutoDraftHead, DraftHead, load_heads

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("use", "train", "tune", "diagnose", "publish")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def example(name: str) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Run = Callable[..., Path]


@pytest.fixture(params=["chat"])
def run(request: pytest.FixtureRequest, target, eagle_heads, tokenizer, tmp_path: Path) -> Run:
    """Runs an example on a tiny pair, whose tokenizer has a chat template or has none; returns where it works."""
    tokenizer.chat_template = TEMPLATE if request.param == "chat" else None
    for name, model in (("target", target), ("target", tokenizer), ("heads", eagle_heads)):
        model.save_pretrained(tmp_path / name)
    tokenizer.chat_template = None
    prompts = [{"prompt": f"w{i} w{i + 1} w5"} for i in range(4, 6)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")

    def run_example(name: str, *more: object, heads: bool = True) -> Path:
        arguments = ["--target", tmp_path / "target", *(["--heads", tmp_path / "heads"] if heads else []), *more]
        example(name).main([str(argument) for argument in arguments])
        return tmp_path

    return run_example


def test_every_script_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NAMES)


def test_prompts_are_what_the_scripts_read() -> None:
    lines = (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) >= 4 and all(json.loads(line)["prompt"] for line in lines)


@pytest.mark.parametrize("run", ["chat", "text"], indirect=True)
def test_use(run: Run, capsys: pytest.CaptureFixture) -> None:
    run("use", "--prompt", "w5 w6 w7", "--max-new-tokens", 12)
    said = capsys.readouterr().out
    assert said.count("the same text: True") == 2 and "tokens per round" in said


def test_train(run: Run, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    small = ("--texts-per-prompt", 6, "--text-tokens", 8, "--steps", 3)
    run("train", "--prompts", tmp_path / "prompts.jsonl", *small, "--output", tmp_path / "trained", heads=False)
    trained = load_heads(tmp_path / "trained")
    torch.manual_seed(0)
    assert trained.config.method == "eagle" and "after 3 steps" in capsys.readouterr().out
    assert trained.config.feature_statistics  # which the trainer stores, of the texts it has seen


def test_texts_to_train_on_end_where_the_target_ends_them(target, tokenizer) -> None:
    target.generation_config.eos_token_id = [2, *range(9, 99, 3)]
    tokenizer.chat_template = None
    rows = example("train").write_texts(target, tokenizer, ["w5 w6", "w7 w8 w3"], 4, 12)
    assert len(rows) == 8
    for row in rows:
        given = row["loss_mask"].index(1)
        assert given in (2, 3) and row["loss_mask"] == [0] * given + [1] * (len(row["input_ids"]) - given)
        ends = [token in target.generation_config.eos_token_id for token in row["input_ids"][given:]]
        assert not any(ends[:-1]) and (ends[-1] or len(ends) == 12)


@pytest.mark.slow
def test_tune(run: Run, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    small = ("--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 6, "--repeats", 1)
    run("tune", *small, "--output", tmp_path / "tuned")
    assert "plain generate" in capsys.readouterr().out
    assert load_heads(tmp_path / "tuned").config.tuned


def test_diagnose_of_own_heads(run: Run, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    run("diagnose", "--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 12, "--output", tmp_path / "mended")
    assert "Where acceptance is lost" in capsys.readouterr().out


def test_publish(run: Run, target, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run("publish", "--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", 8, "--output", tmp_path / "published")
    assert "same texts: True" in capsys.readouterr().out
    heads: DraftHead = load_heads(tmp_path / "published" / "heads")
    assert heads.config.method == "eagle"
    card = (tmp_path / "published" / "heads" / "README.md").read_text(encoding="utf-8")
    measured = json.loads((tmp_path / "published" / "measured.json").read_text(encoding="utf-8"))
    assert f"{measured['acceptance_length']:.2f}" in card and "apache-2.0" in card


@pytest.mark.slow
def test_use_as_it_stands(capsys: pytest.CaptureFixture) -> None:
    example("use").main([])
    assert capsys.readouterr().out.count("the same text: True") == 2


@pytest.mark.slow
def test_train_as_it_stands(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """A hundred steps teach heads something: the numbers are those of `generate` on held-out texts."""
    example("train").main(["--output", str(tmp_path / "heads")])
    said = capsys.readouterr().out.splitlines()
    line = next(line for line in said if line.startswith("tokens per round on held-out texts"))
    before, after = map(float, re.findall(r"\d+\.\d+", line))
    assert after > before + 0.3


@pytest.mark.slow
def test_tune_as_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    example("tune").main(["--output", str(tmp_path)])
    assert "saved in" in capsys.readouterr().out


@pytest.mark.slow
def test_diagnose_names_and_mends_what_it_planted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    shipped = load_heads(EXAMPLES.parent / "model_cards" / "eagle3").config.feature_layers
    example("diagnose").main(["--output", str(tmp_path)])
    said = capsys.readouterr().out
    assert "looking again" in said and "accepts as trained" in said.splitlines()[-1]
    assert load_heads(tmp_path).config.feature_layers == shipped


@pytest.mark.slow
def test_publish_as_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    example("publish").main(["--output", str(tmp_path)])
    assert "same texts: True" in capsys.readouterr().out and AutoDraftHead.from_pretrained(tmp_path / "heads")
