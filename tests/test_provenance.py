"""Versions, git's answers and the machine's name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
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


MODEL = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse2 avx avx2"


@pytest.mark.parametrize(
    ("described", "name"),
    [
        (f"{MODEL} fma\n", "AMD EPYC, AVX2"),
        (f"{MODEL} avx512f\n\n{MODEL} avx512f\n", "AMD EPYC, AVX-512"),
        (f"{MODEL} avx512f avx512_bf16\n", "AMD EPYC, AVX-512 with bf16"),
        (f"{MODEL} avx512f avx512_bf16 amx_tile amx_bf16\n", "AMD EPYC, AMX"),
        ("processor\t: 0\nFeatures\t: fp asimd sve bf16\n", f"{provenance.architecture()}, SVE"),
        ("model name\t: Virtual\n", "Virtual"),
        ("", provenance.architecture()),
    ],
)
def test_processors_of_one_name_are_told_apart_by_their_instructions(described: str, name: str) -> None:
    """A tree tuned on one of them is not the tree of another (`machine_key`)."""
    assert provenance._named(described) == name
