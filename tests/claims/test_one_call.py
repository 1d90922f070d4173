"""A call of `generate` reads its heads' settings once, binds the heads once, and is checked for refusal once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.heads import random_heads
from support.targets import own_target, plain, prompt

import hf_specheads
from hf_specheads import DraftHead
from hf_specheads.generation import call
from hf_specheads.generation.options import DraftingOptions
from hf_specheads.heads import base


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often the steps run that must run once per call."""
    counted: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(DraftHead, "bind")
    count(DraftHead, "check_target")
    count(base, "target_fingerprint")
    count(DraftingOptions, "of")
    for name in ("refuse_call", "refuse_options", "refuse_prepared_call", "refuse_processors"):
        count(call, name)
    return counted


ONCE = {
    "bind": 1, "of": 1, "refuse_call": 1, "refuse_options": 1, "refuse_prepared_call": 1, "refuse_processors": 1,
}  # fmt: skip


@pytest.mark.parametrize("way", ["assistant_model", "custom_generate"])
def test_everything_once(way: str, calls: Counter[str]) -> None:
    target, ids = own_target("llama"), prompt()
    heads = random_heads(target)
    if way == "assistant_model":
        options: dict[str, Any] = {"assistant_model": heads}
    else:
        options = {"custom_generate": hf_specheads.speculative_generate, "draft_head": heads}
    calls.clear()
    plain(target, ids, 8, **options)
    assert calls == ONCE | {"check_target": 1, "target_fingerprint": 1}
    calls.clear()
    plain(target, ids, 8, **options)
    assert calls == ONCE, "the heads are bound to this target already"


def test_settings_assigned_during_a_call_are_for_the_next() -> None:
    target, ids = own_target("llama"), prompt()
    heads = random_heads(target)
    expected = plain(target, ids, 20)

    class Meddler:
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            heads.tree_config = heads.tree_config.replace(depth=1, top_k=1, total_tokens=2)
            heads.trace, heads.exact_seed = True, False
            return scores

    text = plain(target, ids, 20, assistant_model=heads, logits_processor=[Meddler()])
    assert torch.equal(text, expected)
    assert max(heads.last_stats.offered[0]) > 1 and not heads.last_stats.trees
    plain(target, ids, 20, assistant_model=heads)
    assert max(heads.last_stats.offered[0]) == 1 and heads.last_stats.trees


def test_checks_do_not_change_the_heads() -> None:
    """A refused call leaves the heads as they were, bound to nothing."""
    target = own_target("llama")
    heads = random_heads(target)
    with pytest.raises(hf_specheads.UnsupportedGenerationError):
        target.generate(prompt(), assistant_model=heads, num_beams=2, max_new_tokens=4)
    with pytest.raises(RuntimeError, match="not bound"):
        _ = heads.borrowed
