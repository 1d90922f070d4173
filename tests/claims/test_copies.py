"""Several sequences of one prompt: each is an independent sample, and the prompt is read once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.batches import NEW, alone_texts, batch_of, greedy
from support.distributions import PROMPT, chi_square, critical_value, five_token_target, target_distribution
from support.heads import METHODS_BY_KIND, random_heads, scramble
from support.images import image_inputs, image_target
from support.stubs import StubCache, StubHead
from support.targets import deep_target, shared_target
from transformers import CompileConfig

from hf_specheads import speculative_generate
from hf_specheads.generation import loop

COPIES = 3
LENGTHS = (19, 4)
RANKS = (0, 0, 1, 0, None)
# sampling that can only give the greedy text
ONE_TEXT = {"do_sample": True, "top_k": 1, "num_return_sequences": COPIES}


class CopiesHead(StubHead):
    """Knows the text of every copy, and infers from the first rows whether a prompt is read once."""

    def new_draft_cache(self) -> StubCache:
        return StubCache([])

    def start_draft(self, cache, token_ids, features):
        cache.rows = cache.rows or list(range(0, len(self.truth), len(self.truth) // len(features)))
        return super().start_draft(cache, token_ids, features)


def oracle(target: Any, lengths: tuple[int, ...], **tree: Any) -> tuple[dict[str, Any], CopiesHead, torch.Tensor]:
    """Makes prompts, heads that know every copy's text, and the new tokens of all copies."""
    inputs, alone = batch_of(lengths)
    texts = [text for text in alone_texts(target, alone) for _ in range(COPIES)]
    truths = [torch.tensor(alone[i // COPIES][0].tolist() + text) for i, text in enumerate(texts)]
    return inputs, CopiesHead(target, truths, RANKS, **tree), torch.tensor(texts)


def prompts_read(target: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that collects the number of rows of every later forward over more than one token."""
    rows: list[int] = []
    forward = target.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        rows.append(len(args[0] if args else kwargs["input_ids"]))
        return forward(*args, **kwargs)

    monkeypatch.setattr(target, "forward", counting)
    return rows


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "bloom", "lfm2"])
@pytest.mark.parametrize("lengths", [LENGTHS[:1], LENGTHS], ids=["one prompt", "padded prompts"])
def test_every_copy_has_its_prompts_text(family, lengths):
    target = shared_target(family)
    if family == "lfm2":
        lengths = (LENGTHS[0],) * len(lengths)  # lfm2 takes in padding, so its prompts must have equal lengths
    inputs, heads, texts = oracle(target, lengths, kind="chain", depth=4)
    got = greedy(target, inputs, assistant_model=heads, **ONE_TEXT)
    assert torch.equal(got[:, max(lengths) :], texts)
    assert torch.equal(got, greedy(target, inputs, **ONE_TEXT)), "the order of plain generation"
    assert max(map(max, heads.last_stats.num_accepted)) >= 2


@pytest.mark.parametrize(
    "more", [{}, {"prefill_chunk_size": 5}, {"return_dict_in_generate": True, "output_scores": True}], ids=str
)
def test_a_prompt_is_read_once(more, monkeypatch):
    target = shared_target("llama")
    inputs, heads, texts = oracle(target, LENGTHS)
    rows = prompts_read(target, monkeypatch)
    got = greedy(target, inputs, assistant_model=heads, **ONE_TEXT, **more)
    assert torch.equal(getattr(got, "sequences", got)[:, max(LENGTHS) :], texts)
    chunks = -(-max(LENGTHS) // more.get("prefill_chunk_size", max(LENGTHS)))
    assert rows[: chunks + 1] == [len(LENGTHS)] * chunks + [len(LENGTHS) * COPIES]
    if "output_scores" in more:
        assert [len(scores) for scores in got.scores] == [len(texts)] * NEW
        assert got.past_key_values.layers[0].keys.shape[0] == len(texts)


@pytest.mark.parametrize("method", METHODS_BY_KIND)
@pytest.mark.parametrize("lengths", [(19,), LENGTHS, (1,), (2, 1)], ids=str)
def test_what_heads_draft_after_a_prompt_read_once(method, lengths, monkeypatch):
    """The trees equal, round by round, those of heads that read the prompt for each copy."""
    target = deep_target() if method in ("eagle3", "peagle", "poss-eagle3") else shared_target("llama")
    heads, (inputs, _) = scramble(random_heads(target, method)), batch_of(lengths)
    heads.trace = True
    trees, options = [], ONE_TEXT | {"assistant_model": heads}
    for times in (COPIES, 1):
        monkeypatch.setattr(loop, "copies_of_prompts", lambda config, model_kwargs, times=times: times)
        got = greedy(target, inputs, **options)
        trees.append([tree.token_ids for tree in heads.last_stats.trees])
    once, each = trees
    assert len(once) == len(each) > 1
    assert all(torch.equal(*pair) for pair in zip(once, each, strict=True))
    assert torch.equal(got, greedy(target, inputs).repeat_interleave(COPIES, dim=0))


def test_caches_that_do_not_grow():
    target = shared_target("llama")
    inputs, heads, texts = oracle(target, LENGTHS)
    got = greedy(target, inputs, assistant_model=heads, cache_implementation="static", **ONE_TEXT)
    assert torch.equal(got[:, max(LENGTHS) :], texts)


def test_prompts_with_images():
    target = image_target("gemma3")
    inputs = image_inputs(target, (15, 9))
    expected = target.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    got = target.generate(**inputs, max_new_tokens=NEW, assistant_model=random_heads(target), **ONE_TEXT)
    assert torch.equal(got, expected.repeat_interleave(COPIES, dim=0))


def test_planted_bug_copies_of_the_wrong_prompts(monkeypatch):
    """Control: with the prompts' caches in another order, sequences continue from the wrong prompt."""
    target = shared_target("llama")
    inputs, heads, texts = oracle(target, LENGTHS)
    prefill = loop.read_prompts

    def swapped(reader: Any, target: Any, input_ids: torch.Tensor, config: Any, kwargs: Any, *how: Any) -> Any:
        outputs = prefill(reader, target, input_ids, config, kwargs, *how)
        kwargs["cache"].batch_select_indices(torch.arange(len(input_ids)).flip(0))
        return outputs

    monkeypatch.setattr(loop, "read_prompts", swapped)
    got = greedy(target, inputs, assistant_model=heads, **ONE_TEXT)
    assert not torch.equal(got[:, max(LENGTHS) :], texts)


@pytest.mark.parametrize("children", ["top_k", "sampled"])
def test_copies_are_independent_samples(children):
    """Pairs of neighbouring copies follow the product of the target's distribution with itself."""
    target, samples, length = five_token_target(), 600, 2
    heads = random_heads(target, kind="static", choices=((0,), (1,), (0, 0)), children=children)
    torch.manual_seed(5)
    got = target.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=length, do_sample=True, top_k=0,
        temperature=0.8, num_return_sequences=2 * samples, assistant_model=heads,
    )  # fmt: skip
    new = [tuple(row) for row in got[:, PROMPT.shape[1] :].tolist()]
    one = target_distribution(target, {"temperature": 0.8}, length)
    pairs = {(*a, *b): one[a] * one[b] for a in one for b in one}
    for counts, expected, drawn in (
        (Counter(new), one, 2 * samples),
        (Counter(a + b for a, b in zip(new[::2], new[1::2], strict=True)), pairs, samples),
    ):
        statistic, freedom = chi_square(counts, expected, drawn)
        assert freedom >= 4 and statistic < critical_value(freedom)


def test_a_constraint_is_told_the_prompt():
    """`prefix_allowed_tokens_fn` gets the index of the prompt, not of the copy."""
    target = shared_target("llama")
    inputs, heads, _ = oracle(target, LENGTHS)
    allowed = [[5, 6], [7, 8]]
    options = ONE_TEXT | {"prefix_allowed_tokens_fn": lambda prompt, ids: allowed[prompt]}
    got = greedy(target, inputs, assistant_model=heads, **options)
    assert torch.equal(got, greedy(target, inputs, **options))
    new = got[:, max(LENGTHS) :].tolist()
    assert [set(row) <= set(allowed[i // COPIES]) for i, row in enumerate(new)] == [True] * len(new)


def test_other_ways_in():
    target = shared_target("llama")
    inputs, heads, texts = oracle(target, LENGTHS)
    got = greedy(target, inputs, custom_generate=speculative_generate, draft_head=heads, **ONE_TEXT)
    assert torch.equal(got[:, max(LENGTHS) :], texts)


@pytest.mark.parametrize("lengths", [LENGTHS[:1], LENGTHS], ids=str)
@pytest.mark.parametrize("method", ["poss", "dflash", "medusa"])
def test_compiled_rounds(method, lengths, monkeypatch):
    target = shared_target("llama")
    uncompiled = CompileConfig(backend="eager", mode=None)  # the same rounds without code generation
    monkeypatch.setattr(target.generation_config, "compile_config", uncompiled, raising=False)
    inputs, _, texts = oracle(target, lengths)
    chain = {} if method == "medusa" else {"kind": "chain", "depth": 4}
    heads = scramble(random_heads(target, method, **chain))
    heads.compiled = heads.trace = True
    trees = []
    for times in (COPIES, 1):
        monkeypatch.setattr(loop, "copies_of_prompts", lambda config, model_kwargs, times=times: times)
        got = greedy(target, inputs, assistant_model=heads, **ONE_TEXT)
        assert torch.equal(got[:, max(lengths) :], texts)
        trees.append([tree.token_ids for tree in heads.last_stats.trees])
    assert len(trees[0]) == len(trees[1]) > 1
    assert all(torch.equal(*pair) for pair in zip(*trees, strict=True))


def heads_read(heads: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Returns a list that collects the shapes of all features that the heads take in from now on."""
    shapes: list[tuple[int, ...]] = []
    start = type(heads).start_draft

    def counting(self: Any, cache: Any, token_ids: Any, features: Any) -> Any:
        shapes.append(tuple(features.shape[:2]))
        return start(self, cache, token_ids, features)

    monkeypatch.setattr(type(heads), "start_draft", counting)
    return shapes


@pytest.mark.parametrize("plain_steps", [0, 3])
def test_when_heads_read_a_prompt(plain_steps, monkeypatch):
    """Heads read the prompt with the first draft, however many plain steps come before. Sequences that ended before it
    are not read."""
    target = shared_target("llama")
    inputs, _, texts = oracle(target, LENGTHS)
    heads = random_heads(target, "eagle", kind="chain", depth=4)
    begin, rounds = loop.RoundLoop.begin_round, []

    def late(self: Any) -> bool:
        rounds.append(begin(self))
        return len(rounds) > plain_steps

    monkeypatch.setattr(loop.RoundLoop, "begin_round", late)
    shapes = heads_read(heads, monkeypatch)
    eos = int(texts[0, 1])  # ends the copies of one prompt, before the first draft if plain steps come first
    options = ONE_TEXT | {"eos_token_id": eos, "pad_token_id": 0}
    got = greedy(target, inputs, assistant_model=heads, **options)
    assert torch.equal(got, greedy(target, inputs, **options))
    assert shapes[0] == ((1 if plain_steps else 2), max(LENGTHS) - 1)
    assert shapes[1] == ((1 if plain_steps else 2) * COPIES, 1 + plain_steps)


@pytest.mark.parametrize("more", [{"max_new_tokens": 1}, {"max_new_tokens": 2}], ids=str)
def test_heads_that_draft_nothing_read_nothing(more, monkeypatch):
    target = shared_target("llama")
    inputs, _, texts = oracle(target, LENGTHS)
    heads = random_heads(target, "eagle", kind="chain", depth=4)
    shapes = heads_read(heads, monkeypatch)
    got = target.generate(
        **inputs, do_sample=True, top_k=1, num_return_sequences=COPIES, assistant_model=heads, **more
    )
    assert torch.equal(got[:, max(LENGTHS) :], texts[:, : more["max_new_tokens"]])
    assert not shapes
