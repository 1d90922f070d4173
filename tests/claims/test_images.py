"""Prompts with images: the text of plain decoding, with trees, chains, batches and the target's own positions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support.images import IMAGE_TOKEN, OVERRIDES, image_inputs, image_target
from support.stubs import CountForwards, StubHead
from support.targets import prompt
from transformers import DynamicCache

from hf_specheads import AutoDraftHead, UnsupportedGenerationError
from hf_specheads.generation import opening
from hf_specheads.target import images
from hf_specheads.target.images import IMAGES_SERVED
from hf_specheads.target.recurrence import is_recurrent

NEW = 18
MIXED = (0, 0, 1, 0, None, 0, 0, 2)
CHAIN = {"kind": "chain", "depth": 4}
# One position axis and images that see both ways; several axes; a state beside them. The others are slow tests.
QUICK = ("gemma3", "qwen2_5_vl", "qwen3_5")
FAMILIES = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in sorted(OVERRIDES)]
target_of = functools.cache(image_target)


def generate(target, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    return target.generate(**inputs, **({"max_new_tokens": NEW, "do_sample": False} | options))


def oracle(target, inputs: dict[str, torch.Tensor], texts: torch.Tensor, **tree: Any) -> StubHead:
    starts = inputs["attention_mask"].shape[1] - inputs["attention_mask"].sum(1)
    heads = StubHead(target, [text[start:] for text, start in zip(texts, starts, strict=True)], MIXED, **tree)
    heads.adaptive = False
    return heads


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
    """The image is in the cache by then; its tokens are in the prompt still."""
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
    refused(target, inputs, "own loop", loop="transformers")
    monkeypatch.setattr(images, "IMAGES_SERVED", frozenset())
    refused(target, inputs, "do not serve prompts of Qwen2_5_VL")


def test_a_prompt_that_ends_in_an_image():
    target = target_of("qwen2_5_vl")
    inputs = image_inputs(target)
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        inputs[name] = inputs[name][:, :7]
    refused(target, inputs, "mm_token_type_ids")


def test_planted_bug_positions_count_tokens(monkeypatch):
    """An image has fewer positions than tokens where positions have several axes."""
    target = target_of("qwen2_5_vl")
    inputs = image_inputs(target)
    expected = generate(target, inputs)
    monkeypatch.setattr(opening, "root_positions_of", lambda kwargs, length, device: torch.full((1, 1), length))
    assert not torch.equal(generate(target, inputs, assistant_model=oracle(target, inputs, expected)), expected)
