"""Tiny heads that have learnt a few texts of a tiny target by heart, so that what is planted in them shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from benchmarks.diagnosis.lab import Lab
from hf_specheads import DraftHead
from hf_specheads.diagnosis.evidence import Evidence


@pytest.fixture(scope="session")
def lab() -> Lab:
    """The tiny pair; no shipped one."""
    return Lab(target=None, prompts=[], new_tokens=0, pair=Path("nowhere"))


@pytest.fixture(scope="session")
def deep(lab: Lab) -> LlamaForCausalLM:
    """Eight layers, texts that depend on what was said before."""
    return lab.tiny_target


@pytest.fixture(scope="session")
def evidence(lab: Lab) -> Evidence:
    return lab.texts()


@pytest.fixture(scope="session")
def learnt(lab: Lab) -> Callable[..., DraftHead]:
    """Heads that have learnt the texts, trained once for every way of doing so; a copy of them."""

    def heads(method: str = "eagle3", options: dict[str, Any] | None = None, **training: Any) -> DraftHead:
        return lab.tiny(method, options, **training).heads

    return heads
