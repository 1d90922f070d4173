"""Rope that changes at a length: no node of a tree may reach past this length while the plain call stays below it."""

from __future__ import annotations

import pytest
import torch
from support.stubs import StubHead
from support.targets import own_target, prompt

from hf_specheads.generation import candidates
from hf_specheads.generation.drafting.lookup import TextLookup

LIMIT = 48
LENGTHS = range(30, 42)


def target_of(family: str):
    """Makes a target whose budget ends at the limit. Both sets of factors differ, so crossing the limit changes the
    text."""
    like = own_target(family)
    half = like.config.hidden_size // like.config.num_attention_heads // 2
    like.config.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": LIMIT,
        "short_factor": [1.0] * half, "long_factor": [1.0 + 3 * i for i in range(half)], "partial_rotary_factor": 1.0,
    }  # fmt: skip
    like.config.max_position_embeddings, like.config.original_max_position_embeddings = 4 * LIMIT, LIMIT
    target = type(like)(like.config).eval()
    target.generation_config = like.generation_config
    return target


@pytest.fixture(autouse=True)
def copies(monkeypatch):
    """Makes text lookup always find something to copy."""
    monkeypatch.setattr(TextLookup, "continuations", lambda _, nodes, device: torch.full((1, nodes), 7, device=device))


def same_texts(family: str) -> list[bool]:
    """Tells for a dozen prompts, whose texts end exactly at the limit, whether heads that are always right give the
    same text."""
    target, same = target_of(family), []
    for length in LENGTHS:
        ids = prompt(length, seed=length)
        options = {"attention_mask": torch.ones_like(ids), "max_length": LIMIT, "do_sample": False}
        expected = target.generate(ids, **options)
        # Copies continue past the budget. Nodes there must not change what lies before.
        heads = StubHead(target, expected, (0, 0, 1, 0, None, 0, 0, 1), depth=2, top_k=3, total_tokens=8, lookup=8)
        same.append(torch.equal(target.generate(ids, **options, assistant_model=heads), expected))
    return same


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_budgets_at_the_limit(family):
    assert all(same_texts(family))


def test_trees_over_the_limit_change_the_text(monkeypatch):
    """Control: copies are only clipped by the context length."""
    monkeypatch.setattr(candidates, "rope_limit", lambda target: None)
    assert not all(same_texts("llama"))
