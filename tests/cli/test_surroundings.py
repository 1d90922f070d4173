"""Commands in surroundings nobody wished for: pipes without a reader, encodings without letters, wrong folders."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from hf_specheads import EagleHead
from hf_specheads.cli import env, main
from hf_specheads.cli.arguments import load_tokenizer
from hf_specheads.cli.display import brackets, marked_text, use_colour
from hf_specheads.cli.generate import read_prompt
from hf_specheads.cli.push import name_after


def said(capsys: pytest.CaptureFixture) -> str:
    """The one line that a command printed for its error."""
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


# ---------------------------------------------------------------------- where output goes
def test_a_reader_that_has_gone_ends_a_command_in_silence(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    """As in `specheads demo | head -1`: what was printed before has been flushed, and a second flush finds nothing."""
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(env, "run", lambda args: print("gone", flush=True))  # noqa: T201
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["env"]) == 141
        pipe.write("goes nowhere")  # as Python's own flush at the end
    assert not capsys.readouterr().err


def test_other_pipes_that_break_are_errors(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    def breaks(args: object) -> int:
        raise BrokenPipeError(32, "the server hung up")

    monkeypatch.setattr(env, "run", breaks)
    assert main(["env"]) == 2
    assert "the server hung up" in said(capsys)


def test_an_interrupted_command_says_nothing(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    from hf_specheads.cli.handed_over import HandedOver

    def interrupted(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(env, "run", interrupted)
    monkeypatch.setattr(HandedOver, "hand_over", interrupted)
    assert main(["env"]) == 130 and main(["train", "--config", "eagle"]) == 130
    assert not capsys.readouterr().err


def test_letters_that_an_encoding_lacks_are_escaped(monkeypatch) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    monkeypatch.setattr(env, "run", lambda args: sys.stdout.write("naïve ✓\n") and 0)
    assert main(["env"]) == 0
    sys.stdout.flush()
    assert printed.getvalue() == b"na\\xefve \\u2713\n"
    text = marked_text([0, 1], [(1, 0), (1, 1)], lambda ids: "ab"[: len(ids)], colour=False)
    assert text == "a[[b]]" and brackets(io.TextIOWrapper(printed, encoding="utf-8")) == ("⟦", "⟧")


def test_a_dumb_terminal_is_not_coloured(monkeypatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.delenv("NO_COLOR", raising=False)
    for kind, coloured in (("xterm", True), ("dumb", False)):
        monkeypatch.setenv("TERM", kind)
        assert use_colour(terminal) is coloured


def test_prompts_are_utf_8_whatever_the_locale(monkeypatch) -> None:
    class Arguments:
        prompt = "Grüße".encode().decode("ascii", "surrogateescape")  # as Python reads words under LC_ALL=C

    assert read_prompt(Arguments) == "Grüße"


# ---------------------------------------------------------------------- what a folder is
def test_a_folder_instead_of_a_file(pair: Path, capsys: pytest.CaptureFixture) -> None:
    models = ["--target", str(pair / "target"), "--heads", str(pair / "eagle")]
    assert main(["eval", *models, "--prompts", str(pair)]) == 2
    assert f"{str(pair)!r} is a folder, but a file was expected" in said(capsys)


@pytest.fixture
def pair(target, eagle_heads: EagleHead, tmp_path: Path) -> Path:
    target.save_pretrained(tmp_path / "a pair" / "target")
    eagle_heads.save_pretrained(tmp_path / "a pair" / "eagle")
    return tmp_path / "a pair"


@pytest.mark.parametrize("command", ["generate", "demo", "app"])
def test_a_target_without_a_tokenizer(command: str, pair: Path, capsys: pytest.CaptureFixture) -> None:
    given = {
        "generate": ["--target", str(pair / "target"), "--heads", str(pair / "eagle"), "--prompt", "w1"],
        "demo": ["--pair", str(pair)],
        "app": ["--pair", str(pair)],
    }[command]
    if command == "app":
        pytest.importorskip("gradio")
    assert main([command, *given]) == 2
    line = said(capsys)
    assert f"the folder {str(pair / 'target')!r} holds no tokenizer" in line and "save_pretrained" in line


def test_a_tokenizer_that_is_there_and_broken_is_not_called_missing(
    pair: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.save_pretrained(pair / "target")
    assert len(load_tokenizer(str(pair / "target"))) == len(tokenizer)
    (pair / "target" / "tokenizer.json").write_text("{")
    with pytest.raises(Exception) as broken:
        load_tokenizer(str(pair / "target"))
    assert "holds no tokenizer" not in str(broken.value)


# ---------------------------------------------------------------------- where heads are written
def test_impossible_names_of_repositories_are_refused_before_anything_is_written(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name in ("impossible name!", "a/b/c", "org/-name"):
        assert main(["push", str(pair / "eagle"), name, "--to-folder", str(tmp_path / "out")]) == 2
        line = said(capsys)
        assert f"{name!r} is not a valid name of a repository" in line and "OWNER/NAME" in line
    assert not (tmp_path / "out").exists()


def test_a_folder_of_any_name_becomes_a_repository_of_a_possible_one(pair: Path, tmp_path: Path) -> None:
    assert name_after(tmp_path / "my heäds--2") == "my-he-ds-2" and name_after(Path("/")) == "draft-heads"
    out = tmp_path / "my heäds"
    assert main(["push", str(pair / "eagle"), "--to-folder", str(out), "--custom-generate"]) == 0
    assert 'REPOSITORY = "my-he-ds"' in (out / "custom_generate" / "generate.py").read_text(encoding="utf-8")
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))


def test_an_export_says_how_to_write_all_the_same(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["export", str(pair / "eagle"), str(pair / "target"), "--to", "eagle"]) == 2
    line = said(capsys)
    assert "--overwrite" in line and "overwrite=True" in line
