"""Prompts with images: the text of plain decoding, with trees, chains, batches and the target's own positions."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from support.distributions import chi_square, critical_value
from support.heads import random_heads
from support.images import IMAGE_TOKEN, OVERRIDES, image_inputs, image_target
from support.processors import image_processor, picture
from support.stubs import CountForwards, StubHead
from support.targets import prompt
from transformers import DynamicCache, pipeline

from hf_specheads import AutoDraftHead, UnsupportedGenerationError
from hf_specheads.generation import opening, prompts
from hf_specheads.target import images
from hf_specheads.target.images import IMAGES_SERVED
from hf_specheads.target.recurrence import is_recurrent

NEW = 18
MIXED = (0, 0, 1, 0, None, 0, 0, 2)
CHAIN = {"kind": "chain", "depth": 4}
# These have one position axis and bidirectional image tokens; several axes; a recurrent state. The others are slow
# tests.
QUICK = ("gemma3", "qwen2_5_vl", "qwen3_5")
FAMILIES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in sorted(OVERRIDES)]
target_of = functools.cache(image_target)


def generate(target, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    return target.generate(**inputs, **({"max_new_tokens": NEW, "do_sample": False} | options))


def oracle(target, inputs: dict[str, torch.Tensor], texts: torch.Tensor, **tree: Any) -> StubHead:
    return StubHead.of_batch(target, inputs, texts, MIXED, **tree)


def test_the_families_are_those_that_are_tested():
    assert set(OVERRIDES) == IMAGES_SERVED


@pytest.mark.parametrize("model_type", FAMILIES)
def test_prompts_with_images(model_type):
    target = target_of(model_type)
    inputs = image_inputs(target)
    expected = generate(target, inputs)
    assert not torch.equal(expected, generate(target, image_inputs(target, seed=1))), "the image plays no part"
    for tree in (CHAIN,) if is_recurrent(target) else ({}, CHAIN):
        heads = oracle(target, inputs, expected, **tree)
        assert torch.equal(generate(target, inputs, assistant_model=heads), expected)
        assert max(heads.last_stats.num_accepted[0]) >= 2
    if not is_recurrent(target):
        batch = image_inputs(target, (15, 9, 12))
        expected = generate(target, batch)
        assert torch.equal(generate(target, batch, assistant_model=oracle(target, batch, expected)), expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_5_vl"])
@pytest.mark.parametrize("method", ["eagle", "poss"])
def test_heads_made_for_a_target(model_type, method):
    target = target_of(model_type)
    heads = AutoDraftHead.from_target(target, method).eval()
    heads.adaptive = False
    for inputs in (image_inputs(target), image_inputs(target, (15, 9))):
        assert torch.equal(generate(target, inputs, assistant_model=heads), generate(target, inputs))


@pytest.mark.parametrize("model_type", QUICK)
def test_seeded_samples(model_type):
    target = target_of(model_type)
    inputs, options = image_inputs(target), {"do_sample": True, "temperature": 0.8}
    torch.manual_seed(5)
    expected = generate(target, inputs, **options)
    torch.manual_seed(5)
    heads = oracle(target, inputs, expected, **CHAIN)
    assert torch.equal(generate(target, inputs, assistant_model=heads, **options), expected)
    assert max(heads.last_stats.num_accepted[0]) >= 2


@pytest.mark.parametrize("model_type", QUICK)
def test_a_second_turn(model_type):
    """In the second turn, the image is already in the cache, but its tokens are still in the prompt."""
    target, texts = target_of(model_type), []
    tree = CHAIN if is_recurrent(target) else {}
    for with_heads in (False, True):
        cache = DynamicCache(config=target.config.get_text_config(decoder=True))
        inputs = image_inputs(target)
        for turn in range(2):
            options: dict[str, Any] = {"past_key_values": cache}
            if with_heads:
                options["assistant_model"] = oracle(target, inputs, texts[turn], **tree)
            text = generate(target, inputs, **options)
            texts += [] if with_heads else [text]
            assert torch.equal(text, texts[turn])
            ids = torch.cat([text, prompt(5, seed=turn, vocab=90)], dim=1)
            types = {name: (ids == IMAGE_TOKEN).long() for name in inputs if name.endswith("token_type_ids")}
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types}


@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_5_vl"])
def test_prompts_in_chunks(model_type):
    target = target_of(model_type)
    inputs, options = image_inputs(target), {"prefill_chunk_size": 8}
    expected = generate(target, inputs, **options)
    assert torch.equal(generate(target, inputs, assistant_model=oracle(target, inputs, expected), **options), expected)


# ---------------------------------------------------------------------- end to end
def chats() -> list[list[dict[str, Any]]]:
    texts = ("what/is/it", "no", "describe-the-colours")
    return [[{"role": "user", "content": [{"type": "image", "image": picture(seed)}, {"type": "text", "text": text}]}]
            for seed, text in enumerate(texts)]  # fmt: skip


@pytest.mark.parametrize("model_type", ["llava", "gemma3"])
def test_processors(model_type):
    """Runs the inputs that a chat template and an image processor make of one chat and of several."""
    target, processor = target_of(model_type), image_processor(model_type)
    for chosen in (chats()[:1], chats()):
        inputs = processor.apply_chat_template(
            chosen, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs={"padding": True}
        )
        assert int((inputs["input_ids"] == IMAGE_TOKEN).sum()) == 4 * len(chosen)
        expected = generate(target, inputs)
        heads = oracle(target, inputs, expected)
        assert torch.equal(generate(target, inputs, assistant_model=heads), expected)
        assert max(heads.last_stats.num_accepted[0]) >= 2


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("model_type", ["llava", "gemma3"])
def test_every_chat_is_read_with_its_own_image(model_type, copies, monkeypatch):
    """Neither copies of a chat nor its padding are left out, because images belong to all sequences of a call."""
    monkeypatch.setattr(prompts, "FORWARD", 1)  # so that padding would be worth leaving out
    target, processor = target_of(model_type), image_processor(model_type)
    inputs = processor.apply_chat_template(
        chats(), tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs={"padding": True}
    )
    assert not inputs["attention_mask"].all()
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": copies}
    expected = generate(target, inputs, **options)
    got = generate(target, inputs, assistant_model=random_heads(target), **options)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("model_type", ["llava", "gemma3"])
def test_pipelines(model_type):
    """transformers' pipeline accepts `assistant_model` when it is made, but never passes it on. In a call it does."""
    target, heads = target_of(model_type), AutoDraftHead.from_target(target_of(model_type), "eagle").eval()
    heads.adaptive = False
    pipe = pipeline("image-text-to-text", model=target, processor=image_processor(model_type))
    expected = pipe(text=chats()[0], max_new_tokens=NEW, generate_kwargs={"do_sample": False})
    options = {"do_sample": False, "assistant_model": heads}
    assert pipe(text=chats()[0], max_new_tokens=NEW, generate_kwargs=options) == expected
    assert heads.last_stats.rounds > 0


@pytest.mark.parametrize("children", ["top_k", "sampled"])
@pytest.mark.parametrize("model_type", ["gemma3", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_samples_after_an_image_follow_the_targets_distribution(model_type, children):
    target, samples, likely = target_of(model_type), 240, 3
    inputs = image_inputs(target, (9,), seed=2)
    expected = {}
    for path in [(), *((a,) for a in range(likely)), *((a, b) for a in range(likely) for b in range(likely))]:
        expected[path] = favourites(
            target, inputs, [expected[path[:n]][1][rank] for n, rank in enumerate(path)], likely
        )
    outcomes = {}
    for ranks in itertools.product(range(likely), repeat=3):
        steps = [expected[ranks[:n]] for n in range(3)]
        tokens = tuple(int(tokens[rank]) for (_, tokens), rank in zip(steps, ranks, strict=True))
        outcomes[tokens] = math.prod(float(probs[rank]) for (probs, _), rank in zip(steps, ranks, strict=True))
    heads = random_heads(target, "eagle", kind="static", choices=((0,), (1,), (0, 0)), children=children)
    many = {name: value.repeat(samples, *[1] * (value.dim() - 1)) for name, value in inputs.items()}
    torch.manual_seed(5)
    got = generate(
        target, many, assistant_model=heads, do_sample=True, top_k=likely, temperature=3.0, max_new_tokens=3
    )
    counts = Counter(tuple(row) for row in got[:, -3:].tolist())
    statistic, freedom = chi_square(counts, outcomes, samples)
    assert freedom >= 4 and statistic < critical_value(freedom)


def favourites(
    target, inputs: dict[str, torch.Tensor], path: list[int], likely: int
) -> tuple[torch.Tensor, list[int]]:
    """Returns the probabilities and ids of the likeliest tokens after a prompt and a path, from a forward without
    cache."""
    added = torch.tensor([path], dtype=torch.long)
    longer = inputs | {"input_ids": torch.cat([inputs["input_ids"], added], dim=1)}
    for name in inputs:
        if name == "attention_mask" or name.endswith("token_type_ids"):
            longer[name] = torch.nn.functional.pad(inputs[name], (0, len(path)), value=int(name == "attention_mask"))
    with torch.no_grad():
        best = (target(**longer).logits[0, -1] / 3.0).topk(likely)
    return best.values.softmax(-1), best.indices.tolist()


# ---------------------------------------------------------------------- refused
def refused(target, inputs: dict[str, torch.Tensor], words: str, **settings: Any) -> None:
    heads = oracle(target, inputs, inputs["input_ids"], **CHAIN)
    for name, value in settings.items():
        setattr(heads, name, value)
    with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match=words):
        generate(target, inputs, assistant_model=heads)
    assert forwards.count == 0


def test_other_families_and_other_media(monkeypatch):
    target = target_of("qwen2_5_vl")
    inputs = image_inputs(target)
    video = inputs | {"pixel_values_videos": inputs["pixel_values"], "video_grid_thw": inputs["image_grid_thw"]}
    ids = video["input_ids"]
    video["input_ids"] = ids.masked_fill(ids == IMAGE_TOKEN, 97)
    del video["pixel_values"], video["image_grid_thw"]
    video["mm_token_type_ids"] = 2 * video["mm_token_type_ids"]
    refused(target, video, r"mm_encoder_outputs|pixel_values_videos")
    refused(target, inputs, "with `heads.loop = 'own'`", loop="transformers")
    monkeypatch.setattr(images, "IMAGES_SERVED", frozenset())
    refused(target, inputs, "do not serve prompts of Qwen2_5_VL")


def test_a_prompt_that_ends_in_an_image():
    target = target_of("qwen2_5_vl")
    inputs = image_inputs(target)
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        inputs[name] = inputs[name][:, :7]
    refused(target, inputs, "mm_token_type_ids")


def test_planted_bug_positions_count_tokens(monkeypatch):
    """With several position axes, an image has fewer positions than tokens."""
    target = target_of("qwen2_5_vl")
    inputs = image_inputs(target)
    expected = generate(target, inputs)
    monkeypatch.setattr(opening, "root_positions_of", lambda kwargs, length, device: torch.full((1, 1), length))
    assert not torch.equal(generate(target, inputs, assistant_model=oracle(target, inputs, expected)), expected)
