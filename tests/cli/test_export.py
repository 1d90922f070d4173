"""`specheads export`: what it prints and writes, and its exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.targets import own_target

from hf_specheads import EagleHead, PossHead, load_heads
from hf_specheads.cli import main


@pytest.fixture
def saved(target, eagle_heads: EagleHead, poss_heads: PossHead, tmp_path: Path) -> Path:
    """A folder with a target, EAGLE heads and POSS heads."""
    target.save_pretrained(tmp_path / "target")
    eagle_heads.save_pretrained(tmp_path / "eagle")
    poss_heads.save_pretrained(tmp_path / "poss")
    return tmp_path


def test_export_to_sglang(saved: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["export", str(saved / "poss"), str(saved / "out"), "--to", "sglang", "--target", "org/target"]) == 0
    printed = capsys.readouterr().out
    for words in ("wrote poss heads for sglang", "- only specialist 0 of 2", "--model-path org/target",
                  "--speculative-algorithm EAGLE", f"--speculative-draft-model-path {saved / 'out'}",
                  "--speculative-num-steps 4 --speculative-eagle-topk 3",
                  "--speculative-num-draft-tokens 9"):  # fmt: skip
        assert words in printed
    assert load_heads(saved / "out").config.method == "eagle"


def test_the_target_is_loaded_only_where_it_is_needed(saved: Path, capsys: pytest.CaptureFixture) -> None:
    command = ["export", str(saved / "eagle"), str(saved / "out"), "--to", "vllm"]
    assert main(command) == 2
    assert "pass the loaded target (`target=`, `--target`)" in capsys.readouterr().err
    assert not (saved / "out").exists()
    assert main([*command, "--target", str(saved / "target")]) == 0
    printed = capsys.readouterr().out
    assert "the bias of `fc` was moved into the written embedding" in printed
    assert (
        f'vllm serve {saved / "target"} --speculative-config \'{{"model": "{saved / "out"}", "method": "eagle"'
        in printed
    )
    assert "fc.bias" not in load_file(saved / "out" / "model.safetensors")


def test_types_and_existing_folders(saved: Path, capsys: pytest.CaptureFixture) -> None:
    command = ["export", str(saved / "eagle"), str(saved / "out"), "--to", "eagle", "--dtype", "bfloat16"]
    assert main(command) == 0
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(saved / "out" / "model.safetensors").values())
    assert main(command) == 2
    assert "not empty" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0


def test_a_wrong_target_is_refused(saved: Path, capsys: pytest.CaptureFixture) -> None:
    own_target("llama", seed=3).save_pretrained(saved / "other")
    command = ["export", str(saved / "eagle"), str(saved / "out"), "--to", "vllm", "--target", str(saved / "other")]
    assert main(command) == 2
    assert "fingerprint" in capsys.readouterr().err


def test_somebody_who_waits_is_told(saved: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    """At a terminal, what is read and what is written; nothing with `--quiet`, or where nobody looks."""
    command = ["export", str(saved / "poss"), "--to", "sglang", "--target", "org/target"]
    assert main([*command[:2], str(saved / "unseen"), *command[2:]]) == 0
    assert "Writing" not in capsys.readouterr().err
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True, raising=False)
    assert main([*command[:2], str(saved / "seen"), *command[2:]]) == 0
    assert f"Writing {saved / 'seen'} for sglang ..." in capsys.readouterr().err
    assert main([*command[:2], str(saved / "quiet"), *command[2:], "--quiet"]) == 0
    assert "Writing" not in capsys.readouterr().err
