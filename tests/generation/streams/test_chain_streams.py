"""Streams of requests to targets that only take chains: states move into places of a batch and out of them."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from support.batches import MIXED, alone_texts
from support.distributions import PROMPT, chi_square, critical_value, target_distribution
from support.families import tiny_target
from support.heads import random_heads
from support.images import image_inputs, image_target
from support.rounding import why_texts_differ
from support.streams import EndsAfter, NoTokenTwice, StreamOracle, texts_of
from support.stubs import CountForwards
from support.targets import prompt
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_specheads import DraftHead, UnsupportedGenerationError, generate_stream
from hf_specheads.cache import joining, recurrent
from hf_specheads.generation import probe
from hf_specheads.target.recurrence import CONTINUE_FROM_STATES, COUNT_PADDING

CHAIN: dict[str, Any] = {"kind": "chain", "depth": 4}
LENGTHS = (7, 19, 2, 12, 5, 40, 9)
BUDGETS = (14, 5, 22, 1, 19, 17, 11)
# In addition to recurrent targets: position biases, convolutions, a target's own mask, chunked and sparse attention.
OTHERS = ("bloom", "lfm2", "gpt_neo", "llama4_text", "glm_moe_dsa")
IN_THE_DEFAULT_RUN = ("qwen3_next", "mamba2", "bloom", "lfm2")
SMALL: dict[str, dict[str, Any]] = {
    "falcon_h1": {"num_hidden_layers": 2},
    "mamba2": {"num_hidden_layers": 2, "state_size": 16},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}


@functools.cache
def target_of(model_type: str):
    return tiny_target(model_type, **SMALL.get(model_type, {}))


@functools.cache
def prompts() -> list[torch.Tensor]:
    return [prompt(length, seed=seed, vocab=90) for seed, length in enumerate(LENGTHS)]


@functools.cache
def wanted_texts(model_type: str) -> list[list[int]]:
    target = target_of(model_type)
    return [alone_texts(target, [ids], max_new_tokens=most)[0] for ids, most in zip(prompts(), BUDGETS, strict=True)]


def requests() -> list[dict[str, Any]]:
    return [{"input_ids": ids, "max_new_tokens": most} for ids, most in zip(prompts(), BUDGETS, strict=True)]


def oracle(target: Any, texts: list[list[int]], ranks: Any = MIXED, **tree: Any) -> StreamOracle:
    truths = [torch.tensor(ids[0].tolist() + text) for ids, text in zip(prompts(), texts, strict=False)]
    heads = StreamOracle(target, truths, ranks, **(CHAIN | tree))
    heads.adaptive = False
    return heads


def assert_own_texts(target: Any, found: list[Any], wanted: list[list[int]]) -> None:
    """Checks that texts are equal, or differ first at two tokens that rounding can exchange."""
    for ids, text, expected in zip(prompts(), texts_of(found), wanted, strict=True):
        plain, ours = (torch.cat([ids, torch.tensor([new])], dim=1) for new in (expected, text))
        assert why_texts_differ(target, plain, ours, ids.shape[1]) in (None, "tie")


# ---------------------------------------------------------------------- every text is its own
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in IN_THE_DEFAULT_RUN else pytest.mark.slow)
        for name in sorted({*CONTINUE_FROM_STATES, *OTHERS} - COUNT_PADDING)
    ],
)
@pytest.mark.parametrize("max_batch", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 16))])
def test_every_text_is_its_own(model_type: str, max_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads are right some of the time, so rows accept different numbers of tokens and end at different times."""
    monkeypatch.setattr(DraftHead, "probe", True)
    target, wanted = target_of(model_type), wanted_texts(model_type)
    for ranks in (MIXED, (0,), (None,)):
        heads = oracle(target, wanted, ranks)
        with CountForwards(target) as forwards:
            heads.probe = ranks == MIXED
            found = list(generate_stream(target, heads, requests(), max_batch, do_sample=False))
        assert_own_texts(target, found, wanted)
        if ranks == (0,):
            assert max(n for one in found for n in one.num_accepted) == 4
        if not heads.probe:
            assert forwards.count == heads.last_stats.target_forwards
        for one in found:
            assert sum(n + 1 for n in one.num_accepted) <= len(one.token_ids) - 1


@pytest.mark.parametrize(
    "model_type", ["mamba2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_next", "bloom"))]
)
def test_what_waits_does_not_pile_up(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One text is always right, next to a series of newcomers that never are."""
    target = target_of(model_type)
    short = [prompt(3 + seed % 5, seed=seed, vocab=90) for seed in range(20)]
    alone, budgets = [prompt(9, seed=50, vocab=90), *short], (120, *(4 for _ in short))
    wanted = [alone_texts(target, [ids], max_new_tokens=most)[0] for ids, most in zip(alone, budgets, strict=True)]
    truths = [torch.tensor(ids[0].tolist() + text) for ids, text in zip(alone, wanted, strict=True)]
    heads = StreamOracle(target, truths, (0,), **CHAIN)
    heads.adaptive = False
    known = heads._token
    heads._token = lambda row, index: known(row, index) if row == 0 else None
    widths: list[int] = []
    hook = target.get_input_embeddings().register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    stream = [{"input_ids": ids, "max_new_tokens": most} for ids, most in zip(alone, budgets, strict=True)]
    try:
        found = list(generate_stream(target, heads, stream, 2, do_sample=False))
    finally:
        hook.remove()
    assert texts_of(found) == wanted
    assert max(widths) <= recurrent.MOST_AHEAD + recurrent.MOST_WAITING + 5
    assert len(widths) == heads.last_stats.target_forwards


def test_padding_goes_with_the_texts_that_brought_it() -> None:
    """The cache is as wide as its longest current text, whoever was in it before."""
    target, widths = target_of("qwen3_next"), []
    lengths, budgets = (40, 4, 6, 50, 3), (6, 30, 12, 3, 25)
    alone = [prompt(length, seed=seed, vocab=90) for seed, length in enumerate(lengths)]
    wanted = [alone_texts(target, [ids], max_new_tokens=most)[0] for ids, most in zip(alone, budgets, strict=True)]
    heads = random_heads(target, "eagle", **CHAIN)
    heads.adaptive = False
    stream = generate_stream(
        target, heads, [{"input_ids": ids, "max_new_tokens": most} for ids, most in zip(alone, budgets, strict=True)],
        2, do_sample=False,
    )  # fmt: skip

    def look(_: Any) -> None:
        loop = stream.gi_frame.f_locals["self"].loop
        if loop.rows is not None and not loop.texts.ended:
            lengths = [loop.texts.texts[request].lengths[0] for request in loop.texts.active]
            widths.append((loop.target_cache.base, max(lengths)))

    heads.on_round = look
    assert texts_of(list(stream)) == wanted
    assert len(widths) > 10 and all(base < longest for base, longest in widths)


@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba2"])
def test_ends_at_its_own_last_token(model_type: str) -> None:
    target, free = target_of(model_type), wanted_texts(model_type)
    eos = [free[0][4], free[2][0], free[4][2]]
    wanted = [alone_texts(target, [ids], max_new_tokens=most, eos_token_id=eos)[0]
              for ids, most in zip(prompts(), BUDGETS, strict=True)]  # fmt: skip
    assert any(text[-1] in eos and len(text) < most for text, most in zip(wanted, BUDGETS, strict=True))
    found = list(generate_stream(target, oracle(target, free), requests(), 3, do_sample=False, eos_token_id=eos))
    assert texts_of(found) == wanted


def test_processors_see_their_own_text() -> None:
    target = target_of("qwen3_next")
    options = {"max_new_tokens": 16, "repetition_penalty": 1.8, "min_new_tokens": 9, "eos_token_id": 5}
    heads = random_heads(target, "eagle", **CHAIN)
    found = list(generate_stream(target, heads, prompts(), 2, do_sample=False, **options))
    assert texts_of(found) == alone_texts(target, prompts(), **options)


def test_adaptive_heads_of_which_nobody_has_chosen_a_tree() -> None:
    target = target_of("qwen3_next")
    heads = random_heads(target, "eagle")
    heads.forget_tree()
    heads.adaptive = True
    found = list(generate_stream(target, heads, prompts(), 3, max_new_tokens=40, do_sample=False))
    assert texts_of(found) == alone_texts(target, prompts(), max_new_tokens=40)
    assert heads.last_stats.plain_steps > 0 and heads.last_stats.rounds > 0


OWN = {
    "processor": lambda: {"logits_processor": LogitsProcessorList([NoTokenTwice()])},
    "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([EndsAfter(15)])},
}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_a_text_that_waits_for_others_asks_about_every_token_once(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens too far ahead of the slowest text are drafted again, so nothing with a state may have seen them."""
    monkeypatch.setattr(recurrent, "MOST_AHEAD", 4)
    target, alone = target_of("mamba2"), prompts()[:3]
    wanted = [alone_texts(target, [ids], max_new_tokens=24, **own())[0] for ids in alone]
    given = [{"input_ids": ids, **own()} for ids in alone]
    heads = oracle(target, wanted)
    assert texts_of(list(generate_stream(target, heads, given, 3, max_new_tokens=24, do_sample=False))) == wanted


def test_texts_with_and_without_images() -> None:
    """Texts with several position axes sit next to texts with one, in any order."""
    target = image_target("qwen3_5")
    stream: list[dict[str, torch.Tensor]] = []
    for seed, length in enumerate((15, 6, 23, 9, 12)):
        inputs = (
            image_inputs(target, (length,), seed) if seed % 2 else {"input_ids": prompt(length, seed=seed, vocab=90)}
        )
        inputs["input_ids"][0, 0] = 60 + seed  # gives every text another first token
        stream.append({name: value for name, value in inputs.items() if name != "attention_mask"})
    wanted = [target.generate(**one, max_new_tokens=14, do_sample=False)[0, one["input_ids"].shape[1] :].tolist()
              for one in stream]  # fmt: skip
    truths = [torch.tensor(one["input_ids"][0].tolist() + text) for one, text in zip(stream, wanted, strict=True)]
    heads = StreamOracle(target, truths, MIXED, **CHAIN)
    heads.adaptive = False
    assert texts_of(list(generate_stream(target, heads, stream, 2, max_new_tokens=14, do_sample=False))) == wanted
    assert max(number for row in heads.last_stats.num_accepted for number in row) >= 3


def test_texts_go_on_while_nobody_waits() -> None:
    target, alone = target_of("mamba2"), prompts()[:3]
    late = [alone[0], None, None, alone[1], *[None] * 40, alone[2]]
    heads = random_heads(target, "poss", **CHAIN)
    found = list(generate_stream(target, heads, late, 2, max_new_tokens=9, do_sample=False))
    assert texts_of(found) == alone_texts(target, alone, max_new_tokens=9)


@pytest.mark.parametrize("children", ["top_k", pytest.param("sampled", marks=pytest.mark.slow)])
def test_sampled_texts_have_the_targets_distribution(children: str) -> None:
    target, samples = tiny_target("qwen3_next", scale=0.2, vocab_size=5, **SMALL["qwen3_next"]), 300
    heads = random_heads(target, "eagle", kind="chain", depth=2, children=children)
    heads.adaptive = False
    expected = target_distribution(target, {"temperature": 0.8}, 4)
    torch.manual_seed(0)
    # Neighbours with other lengths make texts join batches that have already progressed.
    neighbour = {"input_ids": PROMPT[:, :3], "max_new_tokens": 3}
    stream = [neighbour if number % 4 == 0 else {"input_ids": PROMPT} for number in range(samples * 4 // 3)]
    options = {"do_sample": True, "top_k": 0, "temperature": 0.8, "max_new_tokens": 4, "eos_token_id": None}
    found = [one for one in generate_stream(target, heads, stream, 5, **options) if one.index % 4]
    assert len(found) == samples
    statistic, freedom = chi_square(Counter(tuple(one.token_ids) for one in found), expected, samples)
    assert freedom >= 4 and statistic < critical_value(freedom)
    accepted = [number for one in found for number in one.num_accepted]
    assert 0 in accepted and max(accepted) == 2


# ---------------------------------------------------------------------- refused
def test_padding_that_is_taken_in_is_refused() -> None:
    target = target_of("deepseek_v4")
    heads = random_heads(target, "eagle", **CHAIN)
    with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match="reads the padding"):
        list(generate_stream(target, heads, prompts()))
    assert forwards.count == 0


def test_targets_that_count_padding_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is right: behind padding, such targets write other texts."""
    target = tiny_target("bart")
    wanted = [alone_texts(target, [ids], max_new_tokens=most)[0] for ids, most in zip(prompts(), BUDGETS, strict=True)]
    heads = oracle(target, wanted)
    with (
        CountForwards(target) as forwards,
        pytest.raises(UnsupportedGenerationError, match="computes positions by itse"),
    ):
        list(generate_stream(target, heads, requests(), 3, do_sample=False))
    assert forwards.count == 0
    monkeypatch.setattr("hf_specheads.generation.streams.requests.finds_begins", lambda target: True)
    assert texts_of(list(generate_stream(target, heads, requests(), 3, do_sample=False))) != wanted


def test_caches_that_quantise_texts_together_are_refused() -> None:
    target = tiny_target("llama")
    heads = random_heads(target, "eagle", **CHAIN)
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match="Fp8QuantizedLayer"):
        list(generate_stream(target, heads, prompts(), **options))
    assert forwards.count == 0


def test_families_that_do_not_continue_from_states_are_refused() -> None:
    target = tiny_target("jamba")
    heads = random_heads(target, "eagle", **CHAIN)
    with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match="begins from zeros"):
        list(generate_stream(target, heads, prompts()))
    assert forwards.count == 0


def test_trees_are_refused() -> None:
    target, wanted = target_of("qwen3_next"), wanted_texts("qwen3_next")
    with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match="draft a chain instead"):
        list(generate_stream(target, oracle(target, wanted, kind="dynamic"), requests()))
    assert forwards.count == 0


def test_the_batch_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream requires of a target what a batch of different lengths requires."""
    tried: list[probe.RoundKind] = []
    monkeypatch.setattr(DraftHead, "probe", True)
    monkeypatch.setattr(probe, "_verdicts", {})
    trial = probe.probe_problem
    monkeypatch.setattr(probe, "probe_problem", lambda target, kind: tried.append(kind) or trial(target, kind))
    target = target_of("bloom")
    assert len(list(generate_stream(target, random_heads(target, "eagle", **CHAIN), prompts()[:2], 1,
                                    max_new_tokens=3, do_sample=False))) == 2  # fmt: skip
    assert {(kind.recurrent, kind.ragged) for kind in tried} == {(True, True)}


# ---------------------------------------------------------------------- planted
@pytest.mark.parametrize(
    "bug", ["states stay those of who left", "rows lie in front", "padding is seen", "positions are one late"]
)
def test_planted_bugs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, wanted = target_of("qwen3_next"), wanted_texts("qwen3_next")
    cache = recurrent.RecurrentCache
    if bug == "states stay those of who left":
        monkeypatch.setattr(joining, "LinearAttentionCacheLayerMixin", int)
    elif bug == "rows lie in front":
        behind = joining._behind_zeros
        monkeypatch.setattr(
            joining, "_behind_zeros",
            lambda states, width, dim: behind(states, width, dim).roll(states.shape[dim] - width, dims=dim),
        )  # fmt: skip
    elif bug == "padding is seen":
        put = cache.put_sequence

        def unmasked(self: Any, *of_newcomer: Any) -> None:
            put(self, *of_newcomer)
            self.padding_mask = torch.ones_like(self.padding_mask)

        monkeypatch.setattr(cache, "put_sequence", unmasked)
    else:
        put_positions = cache._put_positions

        def one_late(self: Any, place: int, other: Any) -> None:
            other.after_prompt = other.after_prompt + 1
            put_positions(self, place, other)

        monkeypatch.setattr(cache, "_put_positions", one_late)
    heads = oracle(target, wanted)
    try:
        found = texts_of(list(generate_stream(target, heads, requests(), 3, do_sample=False)))
    except RuntimeError:
        return  # there are states of fewer sequences than tokens
    assert found != wanted
