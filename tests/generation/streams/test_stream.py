"""A stream of requests: every text is the one that plain generation gives alone, whatever else is in the batch."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from support.batches import alone_texts, greedy
from support.distributions import PROMPT, chi_square, critical_value, five_token_target, target_distribution
from support.heads import METHODS_BY_KIND, random_heads
from support.streams import StreamOracle, texts_of
from support.stubs import CountForwards
from support.targets import prompt as random_prompt
from support.targets import shared_target
from support.tokenizers import byte_tokenizer
from support.trees import TREES
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_specheads import DraftTreeConfig, UnsupportedGenerationError, WrongTargetError, generate_stream
from hf_specheads.generation.streams import accounts, stream

LENGTHS = (7, 19, 2, 12, 5, 19, 9)
BUDGETS = (14, 5, 22, 1, 9, 17, 11)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    return [random_prompt(length, seed=seed) for seed, length in enumerate(lengths)]


def requests_of(alone: list[torch.Tensor], budgets: tuple[int, ...] = BUDGETS) -> list[dict[str, Any]]:
    return [{"input_ids": ids, "max_new_tokens": most} for ids, most in zip(alone, budgets, strict=True)]


def wanted_texts(target: Any, alone: list[torch.Tensor], **options: Any) -> list[list[int]]:
    return [alone_texts(target, [ids], max_new_tokens=most, **options)[0]
            for ids, most in zip(alone, BUDGETS, strict=True)]  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("max_batch", [1, 2, 3, 16])
@pytest.mark.parametrize("family", ["llama", "qwen2-window", "gemma2"])
def test_every_text_is_its_own(family: str, max_batch: int) -> None:
    """The heads are right some of the time, so rows accept different numbers of tokens and end at different times."""
    target, alone = shared_target(family), prompts()
    wanted = wanted_texts(target, alone)
    truths = [torch.tensor(ids[0].tolist() + text) for ids, text in zip(alone, wanted, strict=True)]
    heads = StreamOracle(target, truths, (0, 0, 1, 0, None, 0, 0, 0, 2))
    found = list(generate_stream(target, heads, requests_of(alone), max_batch, do_sample=False))
    assert texts_of(found) == wanted
    assert max(n for one in found for n in one.num_accepted) >= 3
    for one in found:
        # the prompt's forward gave the first token
        assert sum(n + 1 for n in one.num_accepted) == len(one.token_ids) - 1


@pytest.mark.parametrize("method", METHODS_BY_KIND)
def test_every_method(method: str) -> None:
    target, alone = shared_target("llama"), prompts((7, 1, 12, 5))
    heads = random_heads(target, method, TREES["dynamic"])
    wanted = alone_texts(target, alone, max_new_tokens=9)
    found = list(generate_stream(target, heads, alone, 2, max_new_tokens=9, do_sample=False))
    assert texts_of(found) == wanted


@pytest.mark.parametrize(
    "method",
    [
        "eagle",
        "hydra",
        "dflash",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("poss", "eagle3", "mtp", "draft-lm")),
    ],
)
def test_drafts_do_not_depend_on_the_place(method: str) -> None:
    """Heads draft for a text as they do for it alone. Earlier texts in its place and texts beside it have no
    effect."""
    target, alone = shared_target("llama"), prompts((7, 12, 5, 9))
    heads = random_heads(target, method, TREES["chain"])
    with torch.no_grad():
        for name, weight in heads.named_parameters():
            if "layers" in name:
                weight.mul_(0.3)
    by_itself = []
    for ids in alone:
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        greedy(target, inputs, assistant_model=heads, max_new_tokens=16)
        by_itself.append(heads.last_stats.num_accepted[0])
    found = sorted(generate_stream(target, heads, alone, 2, max_new_tokens=16, do_sample=False), key=lambda x: x.index)
    assert [one.num_accepted for one in found] == by_itself


def test_copies_from_the_own_text() -> None:
    target, alone = shared_target("llama"), [ids.repeat(1, 3) for ids in prompts((5, 4, 6))]
    heads = random_heads(target, "eagle").with_tree(kind="chain", depth=2, top_k=1, total_tokens=3, lookup=4)
    found = list(generate_stream(target, heads, alone, 2, max_new_tokens=24, do_sample=False))
    assert texts_of(found) == alone_texts(target, alone, max_new_tokens=24)


def test_adaptive_heads_draft_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the choice of rounds that draft nor that of trees changes a text."""
    target, alone = shared_target("llama"), prompts((7, 19, 2, 12, 5))
    heads = random_heads(target, "eagle")
    heads.adaptive, heads.probe = True, True
    found = list(generate_stream(target, heads, alone, 3, max_new_tokens=60, do_sample=False))
    assert texts_of(found) == alone_texts(target, alone, max_new_tokens=60)
    assert heads.last_stats.plain_steps > 0


# ---------------------------------------------------------------------- ends
def test_ends_at_its_own_last_token() -> None:
    target, alone = shared_target("llama"), prompts()
    free = wanted_texts(target, alone)
    eos = [free[0][4], free[2][0]]
    wanted = wanted_texts(target, alone, eos_token_id=eos)
    assert any(text[-1] in eos and len(text) < most for text, most in zip(wanted, BUDGETS, strict=True))
    heads = random_heads(target, "eagle")
    found = list(generate_stream(target, heads, requests_of(alone), 3, do_sample=False, eos_token_id=eos))
    assert texts_of(found) == wanted


def test_statistics_of_the_latest_requests_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "KEPT_REQUESTS", 3)
    target, alone = shared_target("llama"), prompts((7, 12, 5, 9, 6))
    heads = random_heads(target, "eagle")
    limits = [9, 3, 4, 3, 5]
    requests = [{"input_ids": ids, "max_new_tokens": limit} for ids, limit in zip(alone, limits, strict=True)]
    found = list(generate_stream(target, heads, requests, 2, do_sample=False))
    for text in found:  # its first token is the prompt's
        assert len(text.token_ids) == 1 + sum(text.num_accepted) + len(text.num_accepted)
    stats, in_order = heads.last_stats, sorted(found, key=lambda text: text.index)
    assert stats.num_accepted == [text.num_accepted for text in in_order[-3:]]
    assert [*map(len, stats.offered)] == [*map(len, stats.num_accepted)]
    assert stats.rounds == max(len(text.num_accepted) for text in found) == len(in_order[0].num_accepted)


def test_stop_strings() -> None:
    target, tokenizer, alone = shared_target("llama"), byte_tokenizer(), prompts((7, 12, 5))
    free = alone_texts(target, alone, max_new_tokens=20)
    stop = {"stop_strings": [tokenizer.decode([free[1][5]])], "tokenizer": tokenizer}
    wanted = alone_texts(target, alone, max_new_tokens=20, **stop)
    assert len(wanted[1]) < 20
    heads = random_heads(target, "eagle")
    found = list(generate_stream(target, heads, alone, 2, max_new_tokens=20, do_sample=False, **stop))
    assert texts_of(found) == wanted


def test_processors_see_their_own_text() -> None:
    target, alone = shared_target("llama"), prompts((7, 12, 5))
    options = {"max_new_tokens": 16, "repetition_penalty": 1.8, "min_new_tokens": 9, "eos_token_id": 5}
    heads = random_heads(target, "eagle")
    found = list(generate_stream(target, heads, alone, 2, do_sample=False, **options))
    assert texts_of(found) == alone_texts(target, alone, **options)


@pytest.mark.parametrize(
    "setting",
    [pytest.param({"temperature": 0.8}, marks=pytest.mark.slow), {"temperature": 1.2, "repetition_penalty": 1.3}],
)
def test_sampled_texts_have_the_targets_distribution(setting: dict[str, float]) -> None:
    target, samples = five_token_target(), 300
    heads = random_heads(target, "eagle", DraftTreeConfig(depth=2, top_k=2, total_tokens=5))
    expected = target_distribution(target, setting, 3)
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 3, "eos_token_id": None}
    found = generate_stream(target, heads, (PROMPT for _ in range(samples)), 5, **options, **setting)
    statistic, freedom = chi_square(Counter(tuple(one.token_ids) for one in found), expected, samples)
    assert statistic < critical_value(freedom)


# ---------------------------------------------------------------------- requests
def test_requests_are_asked_for_when_there_is_a_place() -> None:
    target, alone, asked = shared_target("llama"), prompts(), []

    def waiting() -> Any:
        for number, request in enumerate(requests_of(alone)):
            asked.append(number)
            yield request

    stream = generate_stream(target, random_heads(target, "eagle"), waiting(), 3, do_sample=False)
    assert asked == []
    found = []
    for one in stream:
        found.append(one.index)
        assert len(asked) <= 3 + len(found)
    assert found != sorted(found) and asked == list(range(len(alone)))


def test_texts_go_on_while_nobody_waits() -> None:
    """Requests arrive one by one, with long gaps."""
    target, alone = shared_target("llama"), prompts((7, 5, 9))
    late = [alone[0], None, None, alone[1], *[None] * 40, alone[2]]
    found = list(generate_stream(target, random_heads(target, "eagle"), late, 2, max_new_tokens=9, do_sample=False))
    assert texts_of(found) == alone_texts(target, alone, max_new_tokens=9)


def test_heads_that_train_learn_nothing_from_it() -> None:
    """No autograd graph of a round is kept, even if gradients are enabled."""
    target, alone = shared_target("llama"), prompts((7, 5))
    heads = random_heads(target, "eagle")
    stream, with_graph = generate_stream(target, heads, alone, 2, max_new_tokens=12, do_sample=False), []

    def look(_: Any) -> None:
        loop = stream.gi_frame.f_locals["self"].loop
        if loop.rows is not None:
            states = [loop.rows.features, *(layer.keys for layer in loop.candidates.draft_cache.layers)]
            with_graph.extend(state.requires_grad for state in states)

    heads.on_round = look
    assert len(list(stream)) == 2
    assert with_graph and not any(with_graph) and all(p.requires_grad for p in heads.parameters())


def test_what_is_a_request(tokenizer: Any) -> None:
    target, heads = shared_target("llama"), random_heads(shared_target("llama"), "eagle")
    ids = random_prompt(7)
    wanted = alone_texts(target, [ids], max_new_tokens=4)[0]
    text = tokenizer.decode(ids[0])
    forms = [ids, ids[0], ids[0].tolist(), {"input_ids": ids}, tokenizer(text), tokenizer(text, return_tensors="pt")]
    found = list(generate_stream(target, heads, forms, max_new_tokens=4, do_sample=False))
    assert texts_of(found) == [wanted] * len(forms)
    assert list(generate_stream(target, heads, [], max_new_tokens=4)) == []


@pytest.mark.parametrize(
    ("request_", "said"),
    [("a text", "request 0 is not a text"), (torch.ones(2, 3, dtype=torch.long), "of shape \\[2, 3\\]; give one text"),
     ({"attention_mask": [1]}, "request 0 is not a text"), ([], "of shape \\[1, 0\\]")],
)  # fmt: skip
def test_what_is_none(request_: Any, said: str) -> None:
    target = shared_target("llama")
    with pytest.raises(ValueError, match=said):
        list(generate_stream(target, random_heads(target, "eagle"), [request_]))


class EndsAll(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"return_dict_in_generate": True}, "does not support return_dict_in_generate"),
     ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2 \\(pass the request that many times"),
     ({"stopping_criteria": StoppingCriteriaList([EndsAll()])}, "look at all texts at once \\(EndsAll\\)"),
     ({"num_beams": 2}, "beam")],
)  # fmt: skip
def test_refused_before_any_forward(options: dict[str, Any], said: str) -> None:
    target = shared_target("llama")
    stream = generate_stream(target, random_heads(target, "eagle"), prompts((4,)), **options)
    with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match=said):
        list(stream)
    assert forwards.count == 0


def test_options_of_one_call() -> None:
    target = shared_target("llama")
    heads = random_heads(target, "eagle")
    with pytest.raises(ValueError, match="`streamer` belongs to one call"):
        generate_stream(target, heads, [], streamer=object())
    with pytest.raises(ValueError, match="`max_batch` must be at least 1, got 0"):
        generate_stream(target, heads, [], max_batch=0)
    with pytest.raises(ValueError, match="pass the `tokenizer` too"):
        generate_stream(target, heads, [], stop_strings=["x"])
    padded = {"input_ids": random_prompt(4), "attention_mask": torch.tensor([[0, 1, 1, 1]])}
    with pytest.raises(UnsupportedGenerationError, match="does not support padding"):
        list(generate_stream(target, heads, [padded]))
    heads.compiled = True
    with pytest.raises(UnsupportedGenerationError, match=r"heads\.compiled = False"):
        list(generate_stream(target, heads, prompts((4,)), max_new_tokens=3))


# ---------------------------------------------------------------------- afterwards
def test_a_bad_request_ends_the_stream_and_leaves_nothing() -> None:
    target, heads = shared_target("llama"), random_heads(shared_target("llama"), "eagle")
    stream = generate_stream(target, heads, [*prompts((4, 5)), "none"], 2, max_new_tokens=6, do_sample=False)
    with pytest.raises(ValueError, match="request 2"):
        list(stream)
    wanted = alone_texts(target, prompts((9,)), max_new_tokens=6)
    assert texts_of(list(generate_stream(target, heads, prompts((9,)), max_new_tokens=6, do_sample=False))) == wanted


def test_bad_requests_may_leave_the_others_alone() -> None:
    target, alone, told = shared_target("llama"), prompts((4, 5, 9)), []
    heads = random_heads(target, "eagle")
    bad = [{"num_return_sequences": 2}, {"do_sample": True, "temperature": -1.0}, {"pixel_values": torch.ones(1, 3)}]
    bad = ["none", *({"input_ids": alone[0], **options} for options in bad)]
    requests = [bad[0], alone[0], bad[1], bad[2], alone[1], bad[3], alone[2]]
    options = {"max_new_tokens": 9, "do_sample": False}
    for one in generate_stream(target, heads, requests, 2, raise_errors=False, **options):
        told.append((one.index, one.token_ids, str(one.error)[:40]))
    assert [index for index, _, _ in told[:1]] == [0] and len(told) == 7
    wanted = dict(zip((1, 4, 6), alone_texts(target, alone, max_new_tokens=9), strict=True))
    assert {index: text for index, text, error in told if error == "None"} == wanted
    assert sorted(index for index, text, error in told if error != "None" and not text) == [0, 2, 3, 5]
    assert texts_of(list(generate_stream(target, heads, alone, 2, raise_errors=False, **options))) == [
        *wanted.values()
    ]
    assert [one.index for one in generate_stream(target, heads, ["none"], raise_errors=False)] == [0]
    with pytest.raises(WrongTargetError):
        list(generate_stream(shared_target("gemma2"), heads, alone, 2, raise_errors=False, **options))


def test_a_stream_without_texts_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty queue is not asked over and over without a pause."""
    target, waits = shared_target("llama"), []
    monkeypatch.setattr(stream, "sleep", waits.append)
    requests = [None, None, random_prompt(4), None, None, None, None]
    assert len(list(generate_stream(target, random_heads(target, "eagle"), requests, max_new_tokens=2))) == 1
    assert len(waits) >= 5 and set(waits) == {stream.IDLE_SECONDS}
    waits.clear()
    assert len(list(generate_stream(target, random_heads(target, "eagle"), prompts((4, 5)), 1, max_new_tokens=2))) == 2
    assert not waits, "a request is waiting whenever a place is free"


def test_a_stream_that_is_left_frees_its_caches() -> None:
    target, heads = shared_target("llama"), random_heads(shared_target("llama"), "eagle")
    stream = generate_stream(target, heads, prompts(), 3, max_new_tokens=12, do_sample=False)
    next(stream)
    cache = weakref.ref(stream.gi_frame.f_locals["self"].loop.target_cache)
    stream.close()
    del stream
    gc.collect()
    assert cache() is None


def test_statistics_and_observer() -> None:
    target, alone, told = shared_target("llama"), prompts((7, 12, 5)), {}
    heads = random_heads(target, "eagle")

    def watch(round_: Any) -> None:
        for request in round_.accepted:
            told.setdefault(request, []).extend(round_.token_ids(request))

    heads.on_round = watch
    found = list(generate_stream(target, heads, alone, 2, max_new_tokens=9, do_sample=False))
    assert [told[number] for number in range(3)] == texts_of(found)
    stats = heads.last_stats
    assert stats.new_tokens == 9 and 3 + max(map(len, stats.num_accepted)) <= stats.target_forwards < 3 + 3 * 8
