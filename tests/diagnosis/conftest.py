"""Tiny heads that have learnt a few texts of a tiny target by heart, so that what is planted in them shows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.targets import own_target, prompt
from transformers import LlamaForCausalLM

from hf_specheads import AutoDraftHead, DraftHead
from hf_specheads.diagnosis.evidence import Evidence, capture, continue_texts
from hf_specheads.diagnosis.teacher_forced import own_text

LEVELS = (2, 4, 6)
PROMPTS = [prompt(12, seed=seed) for seed in range(6)]
NEW_TOKENS = 24


@pytest.fixture(scope="session")
def deep() -> LlamaForCausalLM:
    """Eight layers, texts that depend on what was said before."""
    return own_target("llama", num_hidden_layers=8, initializer_range=0.12)


@pytest.fixture(scope="session")
def evidence(deep: LlamaForCausalLM) -> Evidence:
    texts = continue_texts(deep, PROMPTS, NEW_TOKENS)
    return capture(deep, texts, [12] * len(texts))


def train(
    heads: DraftHead,
    evidence: Evidence,
    steps: int = 60,
    passes: int = 2,
    shift: int = 0,
    label: int = 0,
    where: torch.Tensor | None = None,
    scale: float = 1.0,
) -> DraftHead:
    """Teaches heads the texts of an evidence.

    Args:
        heads: Bound to their target.
        evidence: Texts and features.
        steps: Of Adam.
        passes: Draft positions.
        shift: Rows get the feature of the token that many tokens before their own.
        label: What is learnt is the token that many places after the right one.
        where: bool [B, T], tokens to learn.
        scale: Of `fc` before training: what is fed back is far from normed.
    """
    with torch.no_grad():
        heads.fc.weight.mul_(scale)
    optimizer = torch.optim.Adam([weight for weight in heads.parameters() if weight.requires_grad], lr=1e-2)
    features = evidence.features(heads.feature_layers).roll(shift, dims=1)
    wanted = own_text(evidence, 0) if where is None else where
    vocabulary = heads.trained_vocabulary
    slot_of = torch.arange(99) if vocabulary is None else torch.full((99,), -100)
    if vocabulary is not None:
        slot_of[vocabulary] = torch.arange(len(vocabulary))
    labels = torch.where(wanted, slot_of[evidence.token_ids.roll(-label, dims=1)], -100)
    for _ in range(steps):
        rows = evidence.rows(features, heads.borrowed.embed_tokens, heads.borrowed.lm_head)
        loss = torch.zeros(())
        for position, drafted in enumerate(heads.unroll(rows, passes)):
            reach = 2 + drafted.offset
            known = rows.documents[:, : labels.shape[1] - reach] >= 0
            logits = drafted.logits(drafted.hidden[:, : labels.shape[1] - reach][known]).float()
            loss = loss + torch.nn.functional.cross_entropy(logits, labels[:, reach:][known])
            if position + 1 == passes:
                break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return heads.eval()


def fresh(target: LlamaForCausalLM, method: str = "eagle3", **options: Any) -> DraftHead:
    torch.manual_seed(5)
    options = {"feature_layers": LEVELS, **options} if method == "eagle3" else options
    tree = {"kind": "chain", "depth": 2, "top_k": 1, "total_tokens": 3}
    heads = AutoDraftHead.from_target(target, method, tree_config=tree, **options)
    return heads.bind(target, follow=False)


@pytest.fixture(scope="session")
def learnt(deep: LlamaForCausalLM, evidence: Evidence) -> Callable[..., DraftHead]:
    """Heads that have learnt the texts, trained once for every way of doing so; a copy of them."""
    made: dict[str, DraftHead] = {}

    def heads(method: str = "eagle3", options: dict[str, Any] | None = None, **training: Any) -> DraftHead:
        key = repr((method, sorted((options or {}).items(), key=str), sorted(training)))
        if key not in made:
            made[key] = train(fresh(deep, method, **(options or {})), evidence, **training)
        one = copy.deepcopy(made[key])
        one.bind(deep, follow=False)
        return one

    return heads
