"""Recurrent and hybrid targets: chains give plain decoding's text and leave plain decoding's states."""

from __future__ import annotations

import copy
import functools
import inspect
from collections import Counter
from typing import Any

import pytest
import torch
from support.caches import states_of
from support.distributions import chi_square, critical_value
from support.families import tiny_target
from support.faults import At, Fault, FaultyCriterion, FaultyStreamer, forward_fault
from support.heads import random_heads
from support.rounding import forwards_over, why_texts_differ
from support.stubs import CountForwards, StubHead
from support.targets import plain, prompt
from transformers import DynamicCache, MaxLengthCriteria, StoppingCriteriaList

from hf_specheads import AutoDraftHead, DraftHead, UnsupportedGenerationError
from hf_specheads.cache import recurrent
from hf_specheads.cache.layers import contents_of
from hf_specheads.generation import probe
from hf_specheads.target.recurrence import CONTINUE_FROM_STATES, DO_NOT_CONTINUE

NEW = 20
MIXED = (0, 0, 1, 0, None, 0, 0, 0, 0, 0, 0, 2)
CHAIN = {"kind": "chain", "depth": 4}
# Gated delta rule alternating with attention; state spaces alone; compressed attention; state and attention in one
# layer.
SHAPES = (
    "qwen3_next",
    "mamba2",
    *(pytest.param(m, marks=pytest.mark.slow) for m in ("deepseek_v4", "falcon_h1", "zaya")),
)
EXTRA: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"num_hidden_layers": 2},
    "falcon_h1": {"num_hidden_layers": 2},
    "mamba2": {"num_hidden_layers": 2, "state_size": 16},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}


@functools.cache
def target_of(model_type: str):
    return tiny_target(model_type, **EXTRA.get(model_type, {}))


@functools.cache
def plain_text(model_type: str) -> torch.Tensor:
    return plain(target_of(model_type), prompt(), NEW)


def oracle(model_type: str, ranks=MIXED, **tree: Any) -> StubHead:
    return StubHead(target_of(model_type), plain_text(model_type), ranks, **(CHAIN | tree))


def name_of(target) -> str:
    return "cache_params" if "cache_params" in inspect.signature(target.forward).parameters else "past_key_values"


def new_cache(target) -> DynamicCache:
    return DynamicCache(config=target.config.get_text_config(decoder=True))


def assert_same_states(ours, theirs) -> None:
    ours, theirs = states_of(ours), states_of(theirs)
    assert ours.keys() == theirs.keys() and len(ours) > 0
    for name, value in ours.items():
        assert value.shape == theirs[name].shape, name
        torch.testing.assert_close(value, theirs[name], atol=2e-4, rtol=2e-4, msg=lambda m, name=name: f"{name}: {m}")


def plain_cache(target, ids: torch.Tensor, new_tokens: int):
    """Returns the cache of plain decoding after it has emitted this many tokens."""
    cache = new_cache(target)
    plain(target, ids, new_tokens, **{name_of(target): cache})
    return cache


# ---------------------------------------------------------------------- which families
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in ("qwen3_next", "mamba2", "falcon_h1") else pytest.mark.slow)
        for name in sorted(CONTINUE_FROM_STATES)
    ],
)
def test_families_that_continue_from_states(model_type):
    """Logits and states are the same from forwards over several tokens as from forwards over one token, and therefore
    text and cache are, too."""
    target, ids, text = target_of(model_type), prompt(), plain_text(model_type)
    one, several = (forwards_over(target, text, [19, width, 1]) for width in (1, 6))
    assert float((one - several).abs().max()) < 1e-4 * float(one.abs().max())
    heads, cache = oracle(model_type), new_cache(target)
    got = plain(target, ids, NEW, assistant_model=heads, **{name_of(target): cache})
    assert why_texts_differ(target, text, got, ids.shape[1]) in (None, "tie")
    accepted = heads.last_stats.num_accepted[0]
    assert max(accepted) >= 3 and min(accepted) <= 2
    assert heads.last_stats.target_forwards < NEW
    assert_same_states(cache, plain_cache(target, ids, NEW))


@pytest.mark.parametrize("model_type", ["jamba", "mamba", "nemotron_h", "zamba2"])
def test_families_that_do_not(model_type):
    """These families are rightly refused: several tokens in one forward give other logits."""
    target, ids = tiny_target(model_type), prompt()
    text = plain(target, ids, 8)
    several = forwards_over(target, text, [19, 8])
    if model_type != "mamba":  # token by token, the logits are those of plain decoding
        one = forwards_over(target, text, [19, 1])
        assert float((one - several).abs().max()) > 1e-4 * float(one.abs().max())
    heads = StubHead(target, text, **CHAIN)
    with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError) as refused:
        plain(target, ids, 8, assistant_model=heads)
    assert forwards.count == 0
    assert DO_NOT_CONTINUE[model_type] in str(refused.value)


def test_a_family_that_nobody_has_looked_at(monkeypatch):
    target = copy.deepcopy(target_of("qwen3_next"))
    monkeypatch.setattr(target.config, "model_type", "of_next_year")
    with pytest.raises(UnsupportedGenerationError, match="nobody has shown"):
        plain(target, prompt(), 8, assistant_model=StubHead(target, prompt(), **CHAIN))


@pytest.mark.parametrize("model_type", SHAPES)
def test_targets_are_tried(model_type, monkeypatch):
    monkeypatch.setattr(DraftHead, "probe", True)
    monkeypatch.setattr(probe, "_verdicts", {})
    assert probe.probe_problem(target_of(model_type), probe.RoundKind(tree=False, recurrent=True)) is None
    monkeypatch.setattr(probe, "_verdicts", {})
    monkeypatch.setattr(recurrent, "restore", lambda layer, contents: None)
    found = probe.probe_problem(target_of(model_type), probe.RoundKind(tree=False, recurrent=True))
    assert found is not None and "not those of plain decoding" in found


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("tree", "words"), [({"kind": "dynamic"}, r"with_tree\(kind='chain'\)"), ({"kind": "chain"}, "own")]
)
def test_trees_and_other_loops_are_refused(tree, words):
    target, heads = target_of("qwen3_next"), oracle("qwen3_next", **tree)
    heads.loop = "own" if tree["kind"] == "dynamic" else "transformers"
    with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match=words):
        plain(target, prompt(), NEW, assistant_model=heads)
    assert forwards.count == 0


@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba2"])
@pytest.mark.parametrize("saved", [{}, {"kind": "chain", "depth": 4, "lookup": 3}], ids=["none", "with copies"])
def test_heads_without_a_chosen_tree_draft_chains(model_type, saved):
    """A user who calls `generate` with heads as they are gets chains, whatever tree was saved with them."""
    target, ids = target_of(model_type), prompt()
    heads = random_heads(target, "eagle", **saved)
    if not saved:
        heads.forget_tree()
    got = plain(target, ids, 12, assistant_model=heads)
    assert why_texts_differ(target, plain(target, ids, 12), got, ids.shape[1]) in (None, "tie")
    assert heads.last_stats.rounds > 0
    heads.tree_config = heads.tree_config  # from here on, the tree is a user's choice
    with pytest.raises(UnsupportedGenerationError, match="draft a chain instead"):
        plain(target, ids, 12, assistant_model=heads)


# ---------------------------------------------------------------------- rounds
@pytest.mark.covering(1)
@pytest.mark.parametrize("model_type", SHAPES)
@pytest.mark.parametrize("depth", [1, 7])
@pytest.mark.parametrize("ranks", [MIXED, (0,), (None,), (0, None)], ids=["mixed", "right", "wrong", "by turns"])
def test_depths(model_type, depth, ranks):
    got = plain(target_of(model_type), prompt(), NEW, assistant_model=oracle(model_type, ranks, depth=depth))
    assert torch.equal(got, plain_text(model_type))


def test_accepted_tokens_do_not_pile_up():
    """Uses chains that always lose a token, so that no chain is accepted as a whole."""
    target, ids = target_of("qwen3_next"), prompt()
    text = plain(target, ids, 60)
    heads = StubHead(target, text, (0, None, 0), **CHAIN)
    widths: list[int] = []
    hook = target.register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1] if args else 0))
    try:
        got = plain(target, ids, 60, assistant_model=heads)
    finally:
        hook.remove()
    assert torch.equal(got, text)
    assert heads.last_stats.plain_steps > 0, "never caught up without a draft"
    assert max(widths) <= recurrent.MOST_WAITING + 2 * 5
    assert sum(n + 1 for n in heads.last_stats.num_accepted[0]) + heads.last_stats.plain_steps == 59


@pytest.mark.parametrize(
    ("model_type", "method"),
    [*(("qwen3_next", method) for method in ("eagle", "poss", "eagle3", "medusa", "hydra")), ("mamba2", "poss")],
)
def test_heads_made_for_a_target(model_type, method):
    target = target_of(model_type)
    levels = {"feature_layers": (0, 1, -1)} if method == "eagle3" else {}
    heads = AutoDraftHead.from_target(target, method, tree_config=CHAIN | {"depth": 3}, **levels).eval()
    heads.adaptive = False
    assert torch.equal(plain(target, prompt(), NEW, assistant_model=heads), plain_text(model_type))


def test_adaptive_rounds_and_returned_outputs():
    target, heads = target_of("qwen3_next"), oracle("qwen3_next")
    heads.adaptive = True
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
    got, expected = plain(target, prompt(), NEW, assistant_model=heads, **asked), plain(target, prompt(), NEW, **asked)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.scores), torch.stack(expected.scores), atol=1e-3, rtol=1e-3)
    for ours, theirs in zip(got.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours[-1], theirs[-1], atol=1e-3, rtol=1e-3)
    assert_same_states(got.past_key_values, expected.past_key_values)


def test_a_padded_prompt():
    target, ids = target_of("qwen3_next"), prompt()
    padded = {"input_ids": torch.nn.functional.pad(ids, (3, 0)), "max_new_tokens": NEW, "do_sample": False}
    padded["attention_mask"] = torch.nn.functional.pad(torch.ones_like(ids), (3, 0))
    expected = target.generate(**padded)
    heads = StubHead(target, expected[:, 3:], MIXED, **CHAIN)
    assert torch.equal(target.generate(**padded, assistant_model=heads), expected)
    assert max(heads.last_stats.num_accepted[0]) >= 3


@pytest.mark.parametrize("model_type", SHAPES)
def test_conversations(model_type):
    """A cache is passed in, given back, and passed in again with more text."""
    target, name = target_of(model_type), name_of(target_of(model_type))
    texts = []
    for with_heads in (False, True):
        cache, ids = new_cache(target), prompt()
        for turn in range(2):
            options: dict[str, Any] = {name: cache}
            if with_heads:
                options["assistant_model"] = StubHead(target, texts[turn], MIXED, **CHAIN)
            whole = plain(target, ids, 12, **options)
            texts += [] if with_heads else [whole]
            assert torch.equal(whole, texts[turn])
            follow = prompt(5, seed=turn)
            # A cache of states only takes new tokens: the last one emitted and those that follow.
            ids = torch.cat([whole[:, -1:] if name == "cache_params" else whole, follow], dim=1)


# ---------------------------------------------------------------------- sampling
@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba2"])
def test_seeded_samples_are_those_of_plain_decoding(model_type):
    target = target_of(model_type)
    options = {
        "do_sample": True,
        "max_new_tokens": NEW,
        "temperature": 0.7,
        "attention_mask": torch.ones_like(prompt()),
    }
    torch.manual_seed(3)
    expected = target.generate(prompt(), **options)
    heads = StubHead(target, expected, MIXED, **CHAIN)
    torch.manual_seed(3)
    assert torch.equal(target.generate(prompt(), assistant_model=heads, **options), expected)
    assert max(heads.last_stats.num_accepted[0]) >= 2


@pytest.mark.slow
def test_drawn_drafts_follow_the_targets_distribution():
    """Tests tokens 2 and 3 of texts whose drafts are drawn and verified by the ratio rule."""
    target, samples = tiny_target("qwen3_next", vocab_size=6, **EXTRA["qwen3_next"]), 400
    target.generation_config.eos_token_id = None
    ids = torch.tensor([[3, 4, 3, 1, 2, 4]])
    heads = random_heads(target, "eagle", kind="chain", depth=2, children="sampled")
    heads.adaptive = False
    options = {"do_sample": True, "max_new_tokens": 3, "top_k": 0, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        first = target(ids).logits[0, -1].softmax(-1)
        texts = torch.cat([torch.cat([ids, torch.tensor([[a, b]])], 1) for a in range(6) for b in range(6)])
        logits = target(texts).logits[:, -3:].softmax(-1)
    expected = {}
    for row, (a, b) in enumerate((a, b) for a in range(6) for b in range(6)):
        for c in range(6):
            expected[(a, b, c)] = float(first[a] * logits[row, 1, b] * logits[row, 2, c])
    torch.manual_seed(0)
    drawn = Counter(
        tuple(target.generate(ids, assistant_model=heads, **options)[0, 6:].tolist()) for _ in range(samples)
    )
    statistic, freedom = chi_square(drawn, expected, samples)
    assert statistic < critical_value(freedom)


# ---------------------------------------------------------------------- interrupted
class EndsAt(MaxLengthCriteria):
    """A user's own criterion, which must be asked about every token."""


@pytest.mark.covering(1)
@pytest.mark.parametrize("model_type", SHAPES)
@pytest.mark.parametrize("end", (1, 4, 6, 9))
def test_a_criterion_in_mid_text(model_type, end):
    target, cache = target_of(model_type), new_cache(target_of(model_type))
    criteria = StoppingCriteriaList([EndsAt(19 + end)])
    heads = oracle(model_type, (0,), depth=5)
    options = {name_of(target): cache, "stopping_criteria": criteria}
    got = plain(target, prompt(), NEW, assistant_model=heads, **options)
    assert torch.equal(got, plain_text(model_type)[:, : 19 + end])
    assert_same_states(cache, plain_cache(target, prompt(), end))


@pytest.mark.covering(1)
@pytest.mark.parametrize("model_type", ["qwen3_next", "deepseek_v4"])
@pytest.mark.parametrize("at", [2, 5, 9])
def test_a_streamer_that_raises(model_type, at):
    target, cache, streamer = target_of(model_type), new_cache(target_of(model_type)), FaultyStreamer(At(at))
    with pytest.raises(Fault):
        plain(target, prompt(), NEW, assistant_model=oracle(model_type), streamer=streamer, **{name_of(target): cache})
    assert_same_states(cache, plain_cache(target, prompt(), at))


@pytest.mark.parametrize("model_type", SHAPES)
@pytest.mark.parametrize("layer", [0, 1])
def test_a_forward_that_raises(model_type, layer):
    """The states after the error are those before it, without anything that no forward has committed."""
    target, heads = target_of(model_type), oracle(model_type)
    modules = target.get_decoder().layers if hasattr(target.get_decoder(), "layers") else target.backbone.layers
    seen: list[int] = []
    for at in (3, 5):
        cache, streamer = new_cache(target), FaultyStreamer(At())
        with forward_fault(modules[layer], At(at)), pytest.raises(Fault):
            plain(target, prompt(), NEW, assistant_model=heads, streamer=streamer, **{name_of(target): cache})
        emitted = len(streamer.tokens) - 19
        assert_same_states(cache, plain_cache(target, prompt(), emitted))
        seen.append(emitted)
    assert seen[0] < seen[1]


def test_a_criterion_that_raises():
    target, cache = target_of("qwen3_next"), new_cache(target_of("qwen3_next"))
    criteria = StoppingCriteriaList([FaultyCriterion(At(8))])
    with pytest.raises(Fault):
        plain(target, prompt(), NEW, assistant_model=oracle("qwen3_next"), past_key_values=cache,
              stopping_criteria=criteria)  # fmt: skip
    held = cache.get_seq_length()
    assert 19 <= held < 19 + 8
    assert_same_states(cache, plain_cache(target, prompt(), held - 18))


# ---------------------------------------------------------------------- planted
@pytest.mark.parametrize("bug", ["states are not restored", "states are not copied", "nothing is caught up with"])
def test_planted_bugs(bug, monkeypatch):
    if bug == "states are not restored":
        monkeypatch.setattr(recurrent, "restore", lambda layer, contents: None)
    elif bug == "states are not copied":
        monkeypatch.setattr(recurrent, "contents_with_states", contents_of)
    else:
        go_back = recurrent.RecurrentCache._go_back

        def forgets(self):
            go_back(self)
            self.base = self.counts[0]

        monkeypatch.setattr(recurrent.RecurrentCache, "_go_back", forgets)
    target = target_of("qwen3_next")
    got = plain(target, prompt(), NEW, assistant_model=oracle("qwen3_next"))
    assert why_texts_differ(target, plain_text("qwen3_next"), got, 19) == "bug"
