"""Requests of a stream with options of their own: every text is the one that plain generation gives with these."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.batches import alone_texts
from support.distributions import PROMPT, chi_square, critical_value, five_token_target, target_distribution
from support.heads import random_heads
from support.streams import EndsAfter, NoTokenTwice, texts_of
from support.stubs import CountForwards
from support.targets import VOCAB, shared_target
from support.targets import prompt as random_prompt
from support.tokenizers import byte_tokenizer
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_specheads import DraftTreeConfig, UnsupportedGenerationError, generate_stream
from hf_specheads.generation.pace.pace import Pace
from hf_specheads.generation.verification import rules


def ends_at(text: list[int], place: int) -> dict[str, Any]:
    return {"eos_token_id": text[place]}


# What makes the options of a request from its text without them. A processor or criterion with a state is made anew
# for every text.
OPTIONS = {
    "none": lambda text: {},
    "processors": lambda text: {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2},
    "penalty": lambda text: {"repetition_penalty": 1.8},
    "logits": lambda text: {"suppress_tokens": text[1:4]},
    "end": lambda text: ends_at(text, 4),
    "late_end": lambda text: {**ends_at(text, 2), "min_new_tokens": 9},
    "limit": lambda text: {"max_new_tokens": 3},
    "allowed": lambda text: {"prefix_allowed_tokens_fn": lambda _, ids: range(len(ids) % 3, VOCAB, 3)},
    "own_processor": lambda text: {"logits_processor": LogitsProcessorList([NoTokenTwice()])},
    "own_criterion": lambda text: {"stopping_criteria": StoppingCriteriaList([EndsAfter(5)])},
}


@pytest.mark.parametrize(
    "names",
    [["logits", "none", "logits", "limit", "none"], ["none", "late_end", "late_end", "logits", "none"],
     ["end", "none", "late_end", "limit", "end"], ["allowed", "own_processor", "none", "processors", "own_processor"],
     ["own_criterion", "none", "own_criterion", "none", "none"], ["penalty"] * 5,
     ["penalty", "processors", "none", "penalty", "logits"], [*OPTIONS]],
)  # fmt: skip
def test_every_request_has_its_own_options(names: list[str]) -> None:
    target = shared_target("llama")
    alone = [random_prompt(5 + 3 * seed % 7, seed=seed) for seed in range(len(names))]
    free = alone_texts(target, alone, max_new_tokens=18)
    wanted = [alone_texts(target, [ids], **{"max_new_tokens": 18, **OPTIONS[name](text)})[0]
              for ids, name, text in zip(alone, names, free, strict=True)]  # fmt: skip
    heads = random_heads(target, "eagle")
    heads.adaptive = True
    requests = [{"input_ids": ids, **OPTIONS[name](text)} for ids, name, text in zip(alone, names, free, strict=True)]
    found = list(generate_stream(target, heads, requests, 3, max_new_tokens=18, do_sample=False))
    assert texts_of(found) == wanted


def test_stop_strings_of_its_own() -> None:
    target, tokenizer, alone = shared_target("llama"), byte_tokenizer(), [random_prompt(7, seed=s) for s in range(3)]
    free = alone_texts(target, alone, max_new_tokens=20)
    stop = {"stop_strings": [tokenizer.decode([free[1][5]])]}
    requests = [alone[0], {"input_ids": alone[1], **stop}, alone[2]]
    heads, options = random_heads(target, "eagle"), {"max_new_tokens": 20, "do_sample": False}
    found = texts_of(list(generate_stream(target, heads, requests, 3, tokenizer=tokenizer, **options)))
    assert found == [
        free[0],
        *alone_texts(target, alone[1:2], max_new_tokens=20, tokenizer=tokenizer, **stop),
        free[2],
    ]
    with pytest.raises(ValueError, match="pass the `tokenizer` too"):
        list(generate_stream(target, heads, requests, 3, **options))


def test_requests_that_end_differently_are_verified_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target, tokenizer, alone = shared_target("llama"), byte_tokenizer(), [random_prompt(7, seed=s) for s in range(4)]
    free = alone_texts(target, alone, max_new_tokens=20)

    def own() -> list[dict[str, Any]]:
        strings = {"stop_strings": [tokenizer.decode([free[1][5]])]}
        return [ends_at(free[0], 6), strings, {**strings, **OPTIONS["own_criterion"]([])}, {}]

    wanted = [alone_texts(target, [ids], **{"max_new_tokens": 20, "tokenizer": tokenizer, **one})[0]
              for ids, one in zip(alone, own(), strict=True)]  # fmt: skip
    assert len({*map(len, wanted)}) > 2
    monkeypatch.setattr(rules, "verify_token_by_token", None)
    requests = [{"input_ids": ids, **one} for ids, one in zip(alone, own(), strict=True)]
    heads = random_heads(target, "eagle")
    found = list(generate_stream(target, heads, requests, 4, tokenizer=tokenizer, max_new_tokens=20, do_sample=False))
    assert texts_of(found) == wanted


def test_only_requests_whose_processors_look_at_the_text_are_verified_token_by_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, alone, walked = shared_target("llama"), [random_prompt(9, seed=seed) for seed in range(4)], []
    verify = rules.verify_token_by_token

    def counted(tree: Any, input_ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
        walked.append(input_ids[0, : alone[2].shape[1]].tolist())
        return verify(tree, input_ids, *rest, **options)

    monkeypatch.setattr(rules, "verify_token_by_token", counted)
    options = {"max_new_tokens": 12}
    wanted = alone_texts(target, alone, **options)
    wanted[2] = alone_texts(target, alone[2:3], **options, no_repeat_ngram_size=1)[0]
    requests = [{"input_ids": ids} for ids in alone]
    requests[2]["no_repeat_ngram_size"] = 1
    found = list(generate_stream(target, random_heads(target, "eagle"), requests, 4, do_sample=False, **options))
    assert texts_of(found) == wanted
    assert walked and all(begin == alone[2][0].tolist() for begin in walked)


# ---------------------------------------------------------------------- sampling
GREEDY, WARM = {"do_sample": False}, {"do_sample": True, "temperature": 1.2, "top_k": 0}
COLD, NARROW = {**WARM, "temperature": 0.4}, {**WARM, "top_k": 2}
DRAWN = DraftTreeConfig(kind="static", depth=2, top_k=2, choices=((0,), (1,), (0, 0)), children="sampled")
PENALISED = {**WARM, "repetition_penalty": 1.4}


@pytest.mark.parametrize("tree", [DraftTreeConfig(depth=2, top_k=2, total_tokens=5), DRAWN])
@pytest.mark.parametrize(
    "settings", [[GREEDY, WARM, WARM], [WARM, COLD, NARROW], pytest.param([PENALISED, GREEDY], marks=pytest.mark.slow)]
)
def test_sampled_texts_have_their_own_distribution(settings: list[dict[str, Any]], tree: DraftTreeConfig) -> None:
    target, samples = five_token_target(), 160
    heads = random_heads(target, "eagle", tree)
    torch.manual_seed(0)
    requests = [{"input_ids": PROMPT, **setting} for _ in range(samples) for setting in settings]
    found = list(generate_stream(target, heads, requests, 5, max_new_tokens=3, eos_token_id=None))
    texts = texts_of(found)
    for number, setting in enumerate(settings):
        mine = Counter(map(tuple, texts[number :: len(settings)]))
        if not setting["do_sample"]:
            assert list(mine) == [tuple(alone_texts(target, [PROMPT], max_new_tokens=3, eos_token_id=None)[0])]
            continue
        kept = {name: value for name, value in setting.items() if name != "do_sample" and value}
        statistic, freedom = chi_square(mine, target_distribution(target, kept, 3), samples)
        assert statistic < critical_value(freedom)


def test_requests_that_are_alike_are_processed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of equal requests call the processors once, and draw children as the call says."""
    target, shapes = shared_target("llama"), []
    processor = "transformers.generation.logits_process.TemperatureLogitsWarper.__call__"
    monkeypatch.setattr(processor, lambda self, ids, scores: shapes.append(len(scores)) or scores / self.temperature)
    heads = random_heads(target, "eagle", DraftTreeConfig(kind="chain", depth=2, children="sampled"))
    options = {"max_new_tokens": 8, "do_sample": True, "top_k": 0, "eos_token_id": None}

    def rows_of_rounds(*temperatures: float) -> Counter[int]:
        shapes.clear()
        requests = [{"input_ids": random_prompt(6, seed=4), "temperature": one} for one in temperatures]
        assert len(list(generate_stream(target, heads, requests, 2, **options))) == 2
        return Counter(shapes)

    together, apart = rows_of_rounds(0.7, 0.7), rows_of_rounds(0.7, 1.3)
    assert together[2 * 3] and together[2], "the nodes of both, and the children that are drawn for both"
    assert apart[3] and not apart[2 * 3]


def test_what_is_learnt_does_not_grow_with_the_temperatures_asked_for() -> None:
    target = shared_target("llama")
    heads = random_heads(target, "eagle")
    heads.adaptive = True
    requests = [
        {"input_ids": random_prompt(6, seed=4), "temperature": 0.6 + 0.0017 * n + 3 * (n % 2)} for n in range(30)
    ]
    found = list(generate_stream(target, heads, requests, 2, max_new_tokens=8, do_sample=True))
    assert len(found) == 30
    temperatures = {key[-1] for key in heads.memory[target] if key[0] is Pace}
    assert len(temperatures) <= 6 and max(temperatures) == 2.0, temperatures


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("options", "said"),
    [({"num_beams": 2}, "`num_beams`.* give it to `generate_stream`"), ({"streamer": None}, "`streamer`.* no stream"),
     ({"cache_implementation": "static"}, "request 0 has the option `cache_implementation`"),
     ({"generation_config": None}, "`generation_config`"), ({"past_key_values": None}, "`past_key_values`")],
)  # fmt: skip
def test_options_that_no_request_has_for_itself(options: dict[str, Any], said: str) -> None:
    target = shared_target("llama")
    with CountForwards(target) as forwards, pytest.raises(ValueError, match=said):
        list(generate_stream(target, random_heads(target, "eagle"), [{"input_ids": random_prompt(4), **options}]))
    assert forwards.count == 0


def test_a_processor_with_a_state_is_for_one_request() -> None:
    target, processor = shared_target("llama"), LogitsProcessorList([NoTokenTwice()])
    with pytest.raises(UnsupportedGenerationError, match="NoTokenTwice"):
        list(generate_stream(target, random_heads(target, "eagle"), [random_prompt(4)], logits_processor=processor))


def test_typical_acceptance_takes_requests_of_one_kind() -> None:
    target, heads = shared_target("llama"), random_heads(shared_target("llama"), "medusa")
    heads.verification = "typical"
    sampled = [{"input_ids": random_prompt(4), "temperature": one} for one in (0.5, 1.5)]
    options = {"max_new_tokens": 6, "do_sample": True}
    assert len(list(generate_stream(target, heads, sampled, 2, **options))) == 2
    mixed = [*sampled, {"input_ids": random_prompt(4), "do_sample": False}]
    with pytest.raises(UnsupportedGenerationError, match="greedy beside sampled requests under typical acceptance"):
        list(generate_stream(target, heads, mixed, 3, **options))
