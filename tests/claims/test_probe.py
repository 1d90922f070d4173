"""The probe runs targets before their first rounds, and refuses those that ignore masks or positions."""

from __future__ import annotations

import pytest
import torch
from support.families import tiny_target
from support.stubs import CountForwards, StubHead
from support.targets import own_target, plain, prompt, shared_target
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specheads import DraftHead, UnsupportedGenerationError
from hf_specheads.generation import probe, refusals
from hf_specheads.generation.probe import RoundKind, context_length, difference, probe_problem

TREE, CHAIN = RoundKind(tree=True), RoundKind(tree=False)
KINDS = (TREE, CHAIN, RoundKind(True, ragged=True), RoundKind(True, static=True), RoundKind(False, rolled_back=True))
NEW = 24


@pytest.fixture(autouse=True)
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftHead, "probe", True)
    monkeypatch.setattr(probe, "_verdicts", {})


class DeafToPositions(LlamaForCausalLM):
    """Accepts `position_ids`, but counts slots instead."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        return super().forward(input_ids, attention_mask=attention_mask, **kwargs)


class DeafToMasks(LlamaForCausalLM):
    """Accepts masks, but ignores 4D ones and attends causally by slots."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        if attention_mask is not None and attention_mask.dim() == 4:
            attention_mask = None
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)


def planted(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    like = own_target("llama")
    target = kind(LlamaConfig(**like.config.to_dict())).eval()
    target.load_state_dict(like.state_dict())
    target.generation_config = like.generation_config
    return target


@pytest.mark.parametrize("kind", [DeafToPositions, DeafToMasks])
def test_planted_targets(kind):
    """Trees would be silently wrong. Chains are right, because their slots are their positions."""
    target, ids = planted(kind), prompt()
    expected = plain(target, ids, NEW)
    tree, chain = (StubHead(target, expected, (0, 1, None, 0), **options) for options in ({}, {"kind": "chain"}))
    with pytest.raises(UnsupportedGenerationError, match=r"not those of plain decoding.*with_tree\(kind='chain'\)"):
        plain(target, ids, NEW, assistant_model=tree)
    assert torch.equal(plain(target, ids, NEW, assistant_model=chain), expected)
    tree.probe = False
    assert not torch.equal(plain(target, ids, NEW, assistant_model=tree), expected), "the plant does no harm"


def test_local_layers_of_gpt_neo_are_found_by_structure_and_by_numbers(monkeypatch):
    target, ids = tiny_target("gpt_neo"), prompt()
    expected = plain(target, ids, NEW)
    tree = StubHead(target, expected, (0, 1, None, 0))
    with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match="a mask of its own"):
        plain(target, ids, NEW, assistant_model=tree)
    assert forwards.count == 0
    monkeypatch.setattr(refusals, "own_mask", lambda target: None)
    with pytest.raises(UnsupportedGenerationError, match="not those of plain decoding"):
        plain(target, ids, NEW, assistant_model=tree)


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2", "gpt-oss"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_targets_that_verify_as_they_decode(family, kind):
    assert probe_problem(shared_target(family), kind) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_low_precision_is_no_problem(dtype):
    for kind in KINDS:
        assert probe_problem(own_target("llama").to(dtype), kind) is None
    assert probe_problem(planted(DeafToMasks).to(dtype), TREE) is not None


def test_the_context_exceeds_windows_up_to_a_bound():
    assert context_length(shared_target("mistral")) > 12
    assert context_length(shared_target("mistral", sliding_window=2048)) == probe.SHORT_CONTEXT


def test_once_per_process_and_no_forward_of_the_call():
    target, ids = shared_target("llama"), prompt()
    expected = plain(target, ids, NEW)
    heads = StubHead(target, expected)
    with CountForwards(target) as first:
        plain(target, ids, NEW, assistant_model=heads)
    assert first.count == heads.last_stats.target_forwards + 4
    assert heads.last_stats.probe_seconds > 0
    with CountForwards(target) as second:
        plain(target, ids, NEW, assistant_model=heads)
    assert second.count == heads.last_stats.target_forwards


def test_the_probe_draws_nothing_from_the_seed():
    target = shared_target("llama")
    before = torch.get_rng_state()
    assert probe_problem(target, TREE) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_difference_is_measured_in_the_spread_of_the_logits():
    logits = torch.randn(1, 3, 50, generator=torch.Generator().manual_seed(0)) * 7
    nudged = logits + 7e-4 * torch.randn(1, 3, 50, generator=torch.Generator().manual_seed(1))
    assert difference(logits, nudged, torch.float32) is None
    assert difference(logits, logits + 0.05 * logits.roll(1, -1), torch.float32) is not None
    assert difference(logits, logits + 0.05 * logits.roll(1, -1), torch.bfloat16) is None
    assert difference(logits, logits.roll(1, -1), torch.bfloat16) is not None
    assert difference(logits, logits * torch.nan, torch.bfloat16) is not None
