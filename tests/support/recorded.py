"""Generations of Medusa and Hydra heads recorded with the authors' code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_specheads import DraftHead, load_heads
from support.trees import path_of

GOLDENS = Path(__file__).resolve().parents[1] / "recordings" / "goldens"


def recording(name: str, file: str = "case.json") -> dict[str, Any]:
    """Reads a file of a recording."""
    return json.loads((GOLDENS / name / file).read_text())


def recorded_pair(name: str, case: dict[str, Any]) -> tuple[Any, DraftHead]:
    """Loads target and heads of a recording, with its static tree."""
    target = AutoModelForCausalLM.from_pretrained(GOLDENS / name / "target", dtype=torch.float32).eval()
    choices = case["settings"]["tree_choices"]
    heads = load_heads(GOLDENS / name / "draft", dtype=torch.float32, kind="static", choices=choices)
    heads.trace = True
    return target, heads


def generate(target: Any, heads: DraftHead, ids: list[int], count: int, **options: Any) -> list[int]:
    """Returns the new tokens after a prompt."""
    inputs = torch.tensor([ids])
    out = target.generate(
        inputs, attention_mask=torch.ones_like(inputs), assistant_model=heads, max_new_tokens=count, **options
    )
    return out[0, len(ids) :].tolist()


def token_paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """Returns the tokens on the path from the root to every node."""
    return {tuple(tokens[n] for n in path_of(parents, node)) for node in range(len(tokens))}
