"""Every option of `generate` has the same effect as without draft heads: on ids, streams, scores, states and the
cache."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.heads import random_heads
from support.stubs import CountForwards, StubHead
from support.targets import VOCAB, plain, prompt, shared_target
from support.tokenizers import byte_tokenizer
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)

from hf_specheads.generation.verification import rules

NEW = 30
MIXED = (0, 1, 0, 2, 0, None, 0, 0, 1)
HEADS = {"tree": {}, "chain": {"kind": "chain", "depth": 4}}


class Recorder:
    """A streamer that records what it is given."""

    def __init__(self):
        self.ids, self.ends = [], 0

    def put(self, value):
        self.ids += value.flatten().tolist()

    def end(self):
        self.ends += 1


class StopAt(StoppingCriteria):
    """A user's criterion, which also checks that it is shown one score per new token."""

    def __init__(self, token: int):
        self.token, self.seen = token, 0

    def __call__(self, input_ids, scores, **kwargs):
        self.seen += 1
        assert scores is None or len(scores) == self.seen
        return torch.tensor([input_ids[0, -1].item() == self.token])


class EveryCallCounts(LogitsProcessor):
    """Bans another token at every call. The text is only right with one call per emitted token, in order."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.index_fill(1, torch.arange(self.calls % 3, VOCAB, 3), -1e9)


def only_neighbours(batch: int, ids: torch.Tensor) -> list[int]:
    """A `prefix_allowed_tokens_fn` that depends on the last token."""
    return [(int(ids[-1]) * 3 + step) % 96 + 3 for step in range(0, 40, 2)]


# name -> function that makes the options from the new tokens of plain generation without options
OPTIONS: dict[str, Any] = {
    "repetition_penalty": lambda c: {"repetition_penalty": 1.5},
    "no_repeat_ngram": lambda c: {"no_repeat_ngram_size": 1},
    "min_new_tokens": lambda c: {"min_new_tokens": 20, "eos_token_id": c[5]},
    "eos inside a draft": lambda c: {"eos_token_id": c[13]},
    "list of eos": lambda c: {"eos_token_id": [c[17], c[11]]},
    "eos first": lambda c: {"eos_token_id": c[0]},
    "bad_words": lambda c: {"bad_words_ids": [[c[3]], [c[8], c[9]]]},
    "suppress_tokens": lambda c: {"suppress_tokens": [c[2], c[6]]},
    "begin_suppress_tokens": lambda c: {"begin_suppress_tokens": [c[0]]},
    "sequence_bias": lambda c: {"sequence_bias": {(c[4],): -9.0, (c[7], c[8]): -9.0}},
    "max_length": lambda c: {"max_length": 31, "max_new_tokens": None},
    "max_new_tokens=1": lambda c: {"max_new_tokens": 1},
    "max_new_tokens=2": lambda c: {"max_new_tokens": 2},
    "max_new_tokens=3": lambda c: {"max_new_tokens": 3},
    "custom criterion": lambda c: {"stopping_criteria": StoppingCriteriaList([StopAt(c[12])])},
    "stateful processor": lambda c: {"logits_processor": LogitsProcessorList([EveryCallCounts()])},
    "exponential decay": lambda c: {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 4},
    "forced_eos": lambda c: {"forced_eos_token_id": c[1], "max_new_tokens": 11},
    "guidance": lambda c: {"guidance_scale": 3.0},
    "guidance from a prompt": lambda c: {"guidance_scale": 3.0, "negative_prompt_ids": torch.tensor([c[:7]])},
    "encoder_repetition_penalty": lambda c: {"encoder_repetition_penalty": 1.8},
    "watermark": lambda c: {"watermarking_config": WatermarkingConfig(bias=6.0)},
    "prefix_allowed_tokens_fn": lambda c: {"prefix_allowed_tokens_fn": only_neighbours},
    "sample": lambda c: {"do_sample": True, "temperature": 0.8},
    "sample top-k top-p": lambda c: {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.3},
    "sample repetition": lambda c: {"do_sample": True, "repetition_penalty": 1.3, "top_k": 0},
    "sample guidance": lambda c: {"do_sample": True, "guidance_scale": 1.5},
    "sample min-p typical": lambda c: {"do_sample": True, "min_p": 0.02, "typical_p": 0.9},
}
UNCHANGED_TEXT = ("plain",)
TEXT_OPTIONS = {"plain": lambda c: {}} | OPTIONS


def generate(target, ids, seed: int = 11, **options: Any) -> tuple[Any, Recorder]:
    """Makes one call that requests everything that `generate` can return."""
    recorder = Recorder()
    everything = {
        "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, "streamer": recorder,
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True,
    }  # fmt: skip
    torch.manual_seed(seed)
    return target.generate(ids, **(everything | options)), recorder


@functools.cache
def reference(family: str) -> list[int]:
    return plain(shared_target(family), prompt(), 40)[0, 19:].tolist()


def assert_same(theirs: Any, ours: Any) -> None:
    """Checks that ids, scores, logits, hidden states and cache of two dict outputs agree."""
    assert ours.sequences[0].tolist() == theirs.sequences[0].tolist()
    for name in ("scores", "logits"):
        mine, plain_ones = getattr(ours, name), getattr(theirs, name)
        assert len(mine) == len(plain_ones), name
        for a, b in zip(mine, plain_ones, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert len(ours.hidden_states) == len(theirs.hidden_states)
    for a, b in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    for a, b in zip(ours.past_key_values.layers, theirs.past_key_values.layers, strict=True):
        assert a.get_seq_length() == b.get_seq_length()
        torch.testing.assert_close((a.keys, a.values), (b.keys, b.values), atol=1e-4, rtol=1e-4)


@pytest.mark.covering(1)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("option", TEXT_OPTIONS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_option(family, option, heads):
    target, ids = shared_target(family), prompt()
    tokens, options = reference(family), TEXT_OPTIONS[option]
    theirs, plain_stream = generate(target, ids, **options(tokens))
    if option not in UNCHANGED_TEXT:
        assert theirs.sequences[0, 19:].tolist() != tokens[:NEW], "the option has no effect here: a weak test"
    stub = StubHead(target, theirs.sequences, MIXED, **HEADS[heads])
    ours, stream = generate(target, ids, assistant_model=stub, **options(tokens))
    assert_same(theirs, ours)
    assert (stream.ids, stream.ends) == (plain_stream.ids, plain_stream.ends)
    if theirs.sequences.shape[1] > 19 + 8:
        assert stub.last_stats.acceptance_length > 1.2, "too little was accepted to prove anything"


@pytest.mark.parametrize("option", ["plain", "sample top-k top-p", "stateful processor"])
def test_gemma_and_untrained_heads(option):
    target, ids = shared_target("gemma2"), prompt()
    tokens = reference("gemma2")
    theirs, _ = generate(target, ids, **TEXT_OPTIONS[option](tokens))
    for heads in (random_heads(target, "poss"), StubHead(target, theirs.sequences, MIXED)):
        ours, _ = generate(target, ids, assistant_model=heads, **TEXT_OPTIONS[option](tokens))
        assert_same(theirs, ours)


def test_stop_strings():
    target, ids = shared_target("llama"), prompt()
    tokens, tokenizer = reference("llama"), byte_tokenizer()
    options = {"stop_strings": [tokenizer.decode(tokens[11:13])], "tokenizer": tokenizer}
    theirs, _ = generate(target, ids, **options)
    assert theirs.sequences.shape[1] == 19 + 13
    for tree in HEADS.values():
        ours, _ = generate(target, ids, assistant_model=StubHead(target, plain(target, ids), **tree), **options)
        assert_same(theirs, ours)


def test_stopping_in_a_fully_accepted_draft_cuts_text_cache_and_statistics():
    """The draft is always right, and longer than what may be emitted."""
    target, ids = shared_target("mistral"), prompt()
    tokens = reference("mistral")
    for position in range(1, 9):
        if tokens[position] in tokens[:position]:
            continue
        theirs, _ = generate(target, ids, eos_token_id=tokens[position])
        stub = StubHead(target, plain(target, ids), (0,))
        ours, _ = generate(target, ids, assistant_model=stub, eos_token_id=tokens[position])
        assert_same(theirs, ours)
        assert sum(n + 1 for n in stub.last_stats.num_accepted[0]) == position


@pytest.mark.covering(1)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
def test_left_padded_prompt(family, heads):
    target = shared_target(family)
    ids = torch.cat([prompt(6, seed=3), prompt(8)], dim=1)
    mask = torch.ones_like(ids)
    mask[:, :6] = 0
    theirs, _ = generate(target, ids, attention_mask=mask)
    unmasked, _ = generate(target, ids)
    assert not torch.equal(theirs.sequences, unmasked.sequences), "the padding has no effect here: a weak test"
    for draft in (StubHead(target, theirs.sequences, MIXED, **HEADS[heads]), random_heads(target, **HEADS[heads])):
        ours, _ = generate(target, ids, attention_mask=mask, assistant_model=draft)
        assert_same(theirs, ours)


@pytest.mark.covering(1)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_cache_handed_over_in_both_directions(family, heads):
    target, ids = shared_target(family), prompt()
    whole = plain(target, ids, 40)
    stub = StubHead(target, whole, MIXED, **HEADS[heads])
    first = {"return_dict_in_generate": True}
    ours = plain(target, ids, 20, assistant_model=stub, **first)
    continued = plain(target, ours.sequences, 20, past_key_values=ours.past_key_values)
    assert torch.equal(continued, whole)
    for draft in (random_heads(target, "poss", **HEADS[heads]), StubHead(target, whole, MIXED, **HEADS[heads])):
        theirs = plain(target, ids, 20, **first)
        continued = plain(target, theirs.sequences, 20, past_key_values=theirs.past_key_values, assistant_model=draft)
        assert torch.equal(continued, whole)


@pytest.mark.parametrize("turns", [1, 2])
def test_padding_does_not_change_what_is_drafted(turns):
    """The heads must know which of their rows are padding, also when they start after a cache that was passed in."""
    target = shared_target("llama")
    new_tokens, options = 12, {"do_sample": False, "return_dict_in_generate": True}

    def conversation(padding: int, heads=None) -> torch.Tensor:
        ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), prompt(8)], dim=1)
        mask = (ids != 0).long()
        if turns == 2:
            first = target.generate(ids, attention_mask=mask, max_new_tokens=1, **options)
            ids = torch.cat([first.sequences, prompt(6, seed=1)], dim=1)
            mask = torch.cat([mask, mask.new_ones(1, 7)], dim=1)
            options["past_key_values"] = first.past_key_values
        last = target.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, assistant_model=heads, **options)
        options.pop("past_key_values", None)
        return last.sequences[0, padding:]

    trees = {}
    for padding in (0, 9):
        heads = random_heads(target, "poss")
        heads.trace = True
        assert torch.equal(conversation(padding, heads), conversation(padding))
        trees[padding] = [tree.token_ids.tolist() for tree in heads.last_stats.trees]
    assert trees[0] == trees[9]


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("chunk", [1, 5, 8, 64])
def test_chunked_prefill(family, chunk):
    target, ids = shared_target(family), prompt()
    expected = plain(target, ids, NEW, prefill_chunk_size=chunk)
    one_piece, in_chunks = random_heads(target), random_heads(target)
    for heads, options in ((one_piece, {}), (in_chunks, {"prefill_chunk_size": chunk})):
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads, **options), expected)
    assert in_chunks.last_stats.num_accepted == one_piece.last_stats.num_accepted, "features of some chunk are missing"


@pytest.mark.covering(1)
@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_prompt_as_embeddings(family, with_ids):
    target, ids = shared_target(family), prompt()
    embeds = target.get_input_embeddings()(ids).detach()
    inputs = {"inputs_embeds": embeds, "attention_mask": torch.ones_like(ids)} | (
        {"input_ids": ids} if with_ids else {}
    )
    options = {"max_new_tokens": NEW, "do_sample": False}
    expected = target.generate(**inputs, **options)
    assert expected.shape[1] == NEW + with_ids * 19
    for tree in HEADS.values():
        assert torch.equal(
            target.generate(**inputs, **options, assistant_model=random_heads(target, **tree)), expected
        )


def test_prompt_longer_than_the_context_of_the_target():
    target, ids = shared_target("llama", max_position_embeddings=16), prompt(19)
    assert torch.equal(plain(target, ids, 12, assistant_model=random_heads(target)), plain(target, ids, 12))
    learned = shared_target("gpt2", n_positions=16)
    with pytest.raises(IndexError) as theirs:
        plain(learned, ids, 12)
    with pytest.raises(IndexError) as ours:
        plain(learned, ids, 12, assistant_model=random_heads(learned))
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("input_ids", "options"),
    [
        (torch.zeros(1, 0, dtype=torch.long), {}),
        (None, {}),
        (prompt(), {"max_new_tokens": 0}),
        (prompt(), {"max_length": 5, "max_new_tokens": None}),
        (prompt(), {"max_new_tokens": -1}),
        (prompt(), {"temperature": -1.0, "do_sample": True}),
        (prompt(), {"no_such_option": 3}),
    ],
    ids=["empty", "none", "max_new_tokens=0", "max_length below prompt", "negative", "temperature", "unknown"],
)
def test_impossible_calls_behave_as_without_heads(input_ids, options):
    target = shared_target("llama")
    options = {"max_new_tokens": 6, "do_sample": False} | options

    def outcome(**heads):
        try:
            return target.generate(input_ids, **options, **heads).tolist()
        except Exception as error:
            return type(error), str(error)

    assert outcome(assistant_model=random_heads(target)) == outcome()


def test_a_prompt_of_one_token_and_a_bos_only_prompt():
    target = shared_target("llama")
    for ids in (prompt(1), None):
        options = {"max_new_tokens": 12, "do_sample": False}
        expected = target.generate(ids, **options)
        with CountForwards(target) as forwards:
            assert torch.equal(target.generate(ids, **options, assistant_model=StubHead(target, expected)), expected)
        assert forwards.count <= 5


def test_an_interrupted_call_leaves_the_cache_as_it_was_then(monkeypatch):
    """A cache of the user is empty while its rows are held elsewhere. An error must not lose the rows."""
    target, ids = shared_target("mistral"), prompt()
    cache = DynamicCache(config=target.config)
    calls = 0

    def interrupted(*args):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return verify(*args)

    verify = rules.verify_all_nodes
    monkeypatch.setattr(rules, "verify_all_nodes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plain(target, ids, 30, past_key_values=cache, assistant_model=random_heads(target))
    tokens = cache.get_seq_length()
    assert tokens >= ids.shape[1]
    expected = DynamicCache(config=target.config)
    text = plain(target, ids, 30)
    target(text[:, :tokens], past_key_values=expected)
    for ours, theirs in zip(cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-5, rtol=1e-5)
