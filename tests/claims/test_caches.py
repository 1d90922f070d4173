"""Caches other than the default one: the text of plain decoding, or a refusal in one sentence before any forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.batches import batch_of, greedy
from support.caches import states_of
from support.families import tiny_target
from support.faults import At, Fault, FaultyStreamer
from support.heads import random_heads
from support.stubs import CountForwards, StubHead, counted
from support.targets import own_target, plain, prompt, shared_target
from transformers import Cache, DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import QuantizedLayer
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

from hf_specheads import UnsupportedGenerationError
from hf_specheads.cache import recurrent

NEW = 30
MIXED = (0, 0, 1, 0, None, 0, 0, 0, 0, 2)
CHAIN = {"kind": "chain", "depth": 4}
FP8: dict[str, Any] = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}


class Coarse(QuantizedLayer):
    """Quantises in groups of rows, like quanto and HQQ, which are not installed here."""

    def _quantize(self, tensor, axis):
        return (tensor * 4).round() / 4

    def _dequantize(self, q_tensor):
        return q_tensor


def coarse_cache(target) -> Cache:
    return Cache(layers=[Coarse(residual_length=4) for _ in range(target.config.num_hidden_layers)])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_eight_bit_floats(family):
    target, ids = shared_target(family, initializer_range=1.0), prompt()
    expected = plain(target, ids, NEW, **FP8)
    assert not torch.equal(expected, plain(target, ids, NEW)), "quantising plays no part"
    for ranks in (MIXED, (0,), (None,), (0, None)):
        heads = StubHead(target, expected, ranks, **CHAIN)
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads, **FP8), expected)
    assert torch.equal(plain(target, ids, NEW, assistant_model=random_heads(target, **CHAIN), **FP8), expected)


def test_eight_bit_floats_in_a_conversation():
    target, texts = shared_target("llama"), []
    lengths = []
    for with_heads in (False, True):
        cache, ids = QuantizedCache("fp8", target.config), prompt()
        for turn in range(2):
            heads = {"assistant_model": StubHead(target, texts[turn], MIXED, **CHAIN)} if with_heads else {}
            text = plain(target, ids, 12, past_key_values=cache, **heads)
            texts += [] if with_heads else [text]
            assert torch.equal(text, texts[turn])
            lengths.append((cache.get_seq_length(), cache.layers[0]._quantized_keys[0].shape[-2]))
            ids = torch.cat([text, prompt(5, seed=turn)], dim=1)
    assert lengths[:2] == lengths[2:]


def test_planted_bug_rejected_rows_stay_quantised(monkeypatch):
    target, ids = shared_target("llama"), prompt()
    expected = plain(target, ids, NEW, **FP8)
    monkeypatch.setattr(recurrent, "restore", lambda layer, contents: None)
    heads = StubHead(target, expected, MIXED, **CHAIN)
    assert not torch.equal(plain(target, ids, NEW, assistant_model=heads, **FP8), expected)


def refused(words: str, target, ids: torch.Tensor, tree: dict[str, Any], **options: Any) -> None:
    heads = StubHead(target, ids, **tree)
    with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match=words):
        plain(target, ids, 8, assistant_model=heads, **options)
    assert forwards.count == 0


# Result of a call with each kind of cache: the same text as plain decoding with that cache, or a refusal with these
# words.
SAME = "the same text"
IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "dynamic": {"tree": SAME, "chain": SAME, "batch": SAME, "batch of chains": SAME},
    "static": {"tree": SAME, "chain": SAME, "batch": SAME, "batch of chains": SAME},
    "sliding_window": {"tree": SAME, "batch": SAME},
    "hybrid": {"tree": SAME},
    "hybrid_chunked": {"tree": SAME},
    "offloaded": {"tree": "'offloaded'", "batch of chains": "'offloaded'"},
    "offloaded_static": {"tree": "'offloaded_static'"},
    "offloaded_hybrid": {"chain": "'offloaded_hybrid'"},
    "offloaded_hybrid_chunked": {"batch": "'offloaded_hybrid_chunked'"},
    "quantized": {"tree": "with_tree", "chain": SAME, "batch": "with_tree", "batch of chains": SAME},
}


def test_the_table_has_all_there_are():
    assert set(IMPLEMENTATIONS) == set(ALL_CACHE_IMPLEMENTATIONS)


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    ("name", "kind", "family"),
    [
        (name, kind, family)
        for name, row in IMPLEMENTATIONS.items()
        for kind in row
        for family in ("llama", "qwen2-window")
        if (name, family) != ("quantized", "qwen2-window")  # transformers only quantises layers with full attention
    ],
)
def test_cache_implementations(name, kind, family):
    target, expectation = shared_target(family), IMPLEMENTATIONS[name][kind]
    inputs, _ = batch_of() if "batch" in kind else batch_of((19,))
    options = {"cache_implementation": name} | (FP8 if name == "quantized" else {})
    tree = CHAIN if "chain" in kind else {}
    if expectation != SAME:
        heads = StubHead(target, inputs["input_ids"], **tree)
        with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match=expectation):
            greedy(target, inputs, assistant_model=heads, **options)
        assert forwards.count == 0
        return
    expected = greedy(target, inputs, **options)
    heads = StubHead.of_batch(target, inputs, expected, MIXED, **tree)
    assert torch.equal(greedy(target, inputs, assistant_model=heads, **options), expected)
    assert max(heads.last_stats.num_accepted[0]) >= 2


@pytest.mark.parametrize(
    ("family", "compiled"),
    [("llama", False), ("qwen2-window", False), pytest.param("qwen2-window", True, marks=pytest.mark.slow)],
)
def test_a_static_cache_that_is_handed_in_and_given_back(family, compiled):
    """The buffers stay where they are, and hold what plain decoding leaves in them."""
    target = own_target(family) if compiled else shared_target(family)
    held: list[dict[str, torch.Tensor]] = []
    texts: list[torch.Tensor] = []
    for with_heads in (False, True):
        cache, ids, addresses = StaticCache(config=target.config, max_cache_len=64), prompt(), []
        for turn in range(2):
            options: dict[str, Any] = {}
            if with_heads:
                heads = random_heads(target) if compiled else StubHead(target, texts[turn], MIXED)
                graphs = counted(target, heads) if compiled else []
                options["assistant_model"] = heads
            text = plain(target, ids, 12, past_key_values=cache, **options)
            texts += [] if with_heads else [text]
            assert torch.equal(text, texts[turn])
            assert not (compiled and with_heads) or len(graphs) > 0
            held.append({"length": torch.tensor(int(cache.get_seq_length())), **states_of(cache)})
            addresses.append([layer.keys.data_ptr() for layer in cache.layers])
            ids = torch.cat([text, prompt(5, seed=turn)], dim=1)
        assert addresses[0] == addresses[1]
    for ours, theirs in zip(held[2:], held[:2], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], atol=1e-4, rtol=1e-4)


def test_what_is_refused():
    target, ids = shared_target("llama"), prompt()
    refused("Fp8QuantizedLayer.*with_tree", target, ids, {}, **FP8)
    for tree in ({}, CHAIN):
        refused("class Coarse", target, ids, tree, past_key_values=coarse_cache(target))
    static = {"cache_implementation": "static"}
    refused("StaticLayer", shared_target("bloom"), ids, CHAIN, **static)  # has no room for tokens that may be rejected
    heads = StubHead(target, ids, **CHAIN)
    heads.loop = "transformers"
    with pytest.raises(UnsupportedGenerationError, match="StaticLayer"):
        plain(target, ids, 8, assistant_model=heads, **static)


def test_groups_of_rows_are_quantised_otherwise():
    """Shows why these caches are refused: their logits depend on the number of tokens in a forward. Those of 8-bit
    floats do not."""
    target = shared_target("llama")
    text = plain(target, prompt(), NEW)
    for make, same in ((coarse_cache, False), (lambda target: QuantizedCache("fp8", target.config), True)):
        logits = []
        for width in (1, 3):
            cache = make(target)
            parts = text.split([19, *[width] * (NEW // width)], dim=1)
            with torch.no_grad():
                logits.append(torch.cat([target(part, past_key_values=cache).logits for part in parts], dim=1))
        difference = float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())
        assert (difference < 1e-4) is same, difference


# ---------------------------------------------------------------------- conversations of several at once
CONVERSATIONS = {"llama": {}, "qwen2-window": {}, "bloom": CHAIN, "lfm2": CHAIN, "qwen3_next": CHAIN}


def target_of(family: str):
    if family == "qwen3_next":
        return tiny_target(family, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    return shared_target(family)


@pytest.mark.covering(1)
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("family", CONVERSATIONS)
def test_conversations_in_batches(family, ends):
    """A cache is passed in, given back, and passed in again. Rows that end before others are padded."""
    target, inputs = target_of(family), batch_of((19, 4, 12), vocab=90)[0]
    if ends:
        first = greedy(target, inputs)
        options: dict[str, Any] = {"eos_token_id": int(first[1, 19 + 7]), "pad_token_id": 0}
    else:
        options = {}
    texts: list[torch.Tensor] = []
    held: list[dict[str, torch.Tensor]] = []
    for with_heads in (False, True):
        cache, turn_inputs = DynamicCache(config=target.config), inputs
        for turn in range(2):
            asked = dict(options)
            if with_heads:
                # Heads see what is new to the cache. In the second turn this is no padding, but the last token of the
                # first turn.
                starts = turn_inputs["attention_mask"].argmax(1) if turn == 0 else [texts[0].shape[1] - 1] * 3
                truths = [text[start:] for text, start in zip(texts[turn], starts, strict=True)]
                asked["assistant_model"] = StubHead(target, truths, MIXED, **CONVERSATIONS[family])
                asked["assistant_model"].adaptive = False
            text = greedy(target, turn_inputs, past_key_values=cache, **asked)
            texts += [] if with_heads else [text]
            assert torch.equal(text, texts[turn])
            held.append(states_of(cache))
            follow = torch.cat([prompt(5, seed=row, vocab=90) for row in range(3)])
            ids = torch.cat([text, follow], dim=1)
            mask = torch.ones_like(ids)
            mask[:, :19] = inputs["attention_mask"]
            if ends and turn == 0:  # masks the padding after the end of a row
                mask[:, 19 : text.shape[1]] = (text[:, 19:] != 0).long()
            turn_inputs = {"input_ids": ids, "attention_mask": mask}
        if with_heads:
            accepted = [n for row in asked["assistant_model"].last_stats.num_accepted for n in row]
            assert ends or max(accepted) >= 2
    for ours, theirs in zip(held[2:], held[:2], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], atol=2e-4, rtol=2e-4)


def test_a_batch_gives_its_cache_back_in_a_dict():
    target, inputs = shared_target("llama"), batch_of()[0]
    got = greedy(target, inputs, assistant_model=random_heads(target), return_dict_in_generate=True)
    expected = greedy(target, inputs, return_dict_in_generate=True)
    ours, theirs = states_of(got.past_key_values), states_of(expected.past_key_values)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=1e-4, rtol=1e-4)


def test_an_interrupted_batch_of_a_recurrent_target_leaves_an_empty_cache():
    """The empty cache can be passed in again, whatever sequences had left the batch."""
    target, inputs = target_of("qwen3_next"), batch_of((9, 4, 7), vocab=90)[0]
    cache, heads = DynamicCache(config=target.config), random_heads(target, **CHAIN)
    first = greedy(target, inputs)
    options = {"past_key_values": cache, "assistant_model": heads, "eos_token_id": int(first[1, 9 + 2])}
    with pytest.raises(Fault):
        greedy(target, inputs, streamer=FaultyStreamer(At(9)), **options)
    assert cache.get_seq_length() == 0
    assert torch.equal(greedy(target, inputs, **options), greedy(target, inputs, eos_token_id=int(first[1, 9 + 2])))


def test_an_offloaded_cache(monkeypatch):
    """Real offloading needs an accelerator's streams, so the test only sets the cache's flag, which is what counts."""
    target, ids = shared_target("llama"), prompt()
    cache = DynamicCache(config=target.config)
    cache.offloading = True
    for tree in ({}, CHAIN):
        refused("on the CPU", target, ids, tree, past_key_values=cache)
