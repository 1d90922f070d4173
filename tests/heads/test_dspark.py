"""DSpark: slots corrected by what was drafted before them, the same in drafting and training; cuts by confidence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.batches import alone_texts, assert_rows, batch_of, greedy
from support.blocks import slots_both_ways
from support.heads import scrambled_heads
from support.targets import plain, prompt, shared_target
from transformers import set_seed

from hf_specheads import AutoDraftHead, DraftHead

KINDS = ("vanilla", "gated", "rnn")


def heads_of(kind: str = "vanilla", **options: Any) -> DraftHead:
    options = {"num_hidden_layers": 2, "block_size": 4, "markov_rank": 6, "markov_head": kind, **options}
    return scrambled_heads(shared_target(), "dspark", **options).bind(shared_target())


@pytest.mark.parametrize("anchor_slot", ["drafts", "idle"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_training_says_what_drafting_says(kind: str, anchor_slot: str) -> None:
    """Logits and predicted acceptance of every slot after true tokens."""
    heads = heads_of(kind, anchor_slot=anchor_slot)
    for slot in slots_both_ways(heads):
        torch.testing.assert_close(slot.drafted.logits(slot.held), slot.logits, rtol=1e-4, atol=1e-4)
        confidence = heads.predicted_acceptance(slot.cache, slot.position, slot.before)[:, 0]
        torch.testing.assert_close(slot.drafted.confidence(slot.held).sigmoid(), confidence, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_branches_draft_differently(kind: str) -> None:
    """A node's children depend on its token; with a recurrent head, on those before it too."""
    heads = heads_of(kind)
    features = torch.randn(1, 5, len(heads.feature_layers) * heads.config.feature_size)
    cache = heads.new_draft_cache()
    state, _ = heads.start_draft(cache, torch.tensor([[0, 1, 2, 3, 4, 5]]), features)
    tokens = torch.tensor([[7, 8]])
    states, logits = heads.extend_draft(cache, 1, tokens, state.expand(-1, 2, -1), None)
    assert (logits[:, 0] - logits[:, 1]).abs().max() > 1e-3
    again = heads.extend_draft(cache, 2, torch.tensor([[9, 9]]), states, None)[1]
    differs = bool((again[:, 0] - again[:, 1]).abs().max() > 1e-4)
    assert differs == (kind == "rnn")


@torch.no_grad()
def test_a_recurrent_head_reads_an_idle_root() -> None:
    """Its state has gone through the root's slot, with the root's token, as in the training of `speculators`, the one
    library that has such heads."""
    heads, target = heads_of("rnn", anchor_slot="idle"), shared_target()
    ids, features = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]), torch.randn(1, 5, heads.fc.in_features)
    block = heads.draft_block(heads.new_draft_cache(), ids[:, :6], features)[0]
    markov, state, expected = heads.markov_head, torch.zeros(6), []
    for hidden, before in zip(block, (9, 9, 2, 6), strict=True):
        kept, new, out = markov.joint_proj(torch.cat([state, markov.markov_w1.weight[before], hidden])).chunk(3)
        expected.append(target.lm_head(hidden) + markov.markov_w2(out.tanh()))
        state = kept.sigmoid() * state + (1 - kept.sigmoid()) * new.tanh()
    cache = heads.new_draft_cache()
    state, logits = heads.start_draft(cache, ids[:, :6], features)
    for position, wanted in enumerate(expected[1:]):
        if position:
            state, logits = heads.extend_draft(cache, position, ids[:, 5 + position : 6 + position], state, None)
        torch.testing.assert_close(logits[0, 0], wanted, rtol=1e-4, atol=1e-5)


class Sure:
    """Predicted acceptance by a rule of the tokens, so that cuts fall everywhere."""

    def __init__(self, heads: DraftHead, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(type(heads), "predicted_acceptance", staticmethod(self))

    def __call__(self, cache: Any, position: int, token_ids: torch.Tensor) -> torch.Tensor:
        return (token_ids % 5 != position) * 0.9


@pytest.mark.parametrize("kind", ["chain", "dynamic"])
def test_cuts_keep_the_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, ids, heads = shared_target(), prompt(), heads_of()
    Sure(heads, monkeypatch)
    heads.adaptive, heads.trace = False, True
    cut = heads.with_tree(kind=kind, depth=4, top_k=2, total_tokens=7, stop_below=0.5)
    assert torch.equal(plain(target, ids, 30, assistant_model=cut), plain(target, ids, 30))
    stats = cut.last_stats
    assert stats.plain_steps > 0, "rounds without a draft"
    depths = {tree.max_depth for tree in stats.trees}
    assert len(depths) > 1 and stats.draft_forwards >= stats.rounds
    assert sum(n + 1 for n in stats.num_accepted[0]) + stats.plain_steps == 29
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": True, "temperature": 0.7}
    set_seed(5)
    expected = target.generate(ids, **options)
    set_seed(5)
    assert torch.equal(target.generate(ids, assistant_model=cut, **options), expected)


def test_cuts_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    target, heads = shared_target(), heads_of("rnn")
    Sure(heads, monkeypatch)
    heads.adaptive = False
    inputs, alone = batch_of((7, 19, 3))
    cut = heads.with_tree(kind="chain", depth=4, stop_below=0.5)
    assert_rows(greedy(target, inputs, assistant_model=cut), 19, alone_texts(target, alone))


def test_impossible_configs() -> None:
    with pytest.raises(ValueError, match=r"markov_head.*vanilla.*other"):
        AutoDraftHead.from_target(shared_target(), "dspark", markov_head="other")
    with pytest.raises(ValueError, match="markov_rank"):
        AutoDraftHead.from_target(shared_target(), "dspark", markov_rank=0)
