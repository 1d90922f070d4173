"""Versions, git's answers and the machine's name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from hf_specheads import provenance


def test_packages_that_are_not_installed_are_left_out() -> None:
    found = provenance.versions(["torch", "no-such-package-here"])
    assert list(found) == ["python", "torch"] and found["torch"] == torch.__version__


def test_git_answers_in_a_checkout_only(tmp_path: Path, monkeypatch) -> None:
    assert provenance.git(tmp_path, "rev-parse", "HEAD") is None
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert provenance.git(tmp_path, "rev-parse", "--show-prefix") == ""
    monkeypatch.setenv("PATH", "")
    assert provenance.git(tmp_path, "rev-parse", "--show-prefix") is None


def test_the_processor_and_its_cores_name_a_machine_without_accelerator() -> None:
    name = provenance.device_name(torch.device("cpu"))
    assert name == provenance.processor() and name.endswith(" logical cores") and not name.startswith(",")
