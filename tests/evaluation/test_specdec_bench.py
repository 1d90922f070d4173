"""The adapter for ModelOpt's tool: tokens, how many came at once, and when."""

from __future__ import annotations

import asyncio

import pytest
import torch
from support.heads import random_heads
from support.targets import plain, prompt

from hf_specheads.evaluation.first_token import timed_text
from hf_specheads.evaluation.specdec_bench import SpecheadsModel


def answer_of(model: SpecheadsModel, length: int, end: int = -1) -> dict:
    return asyncio.run(model.run(prompt()[0].tolist(), length, end, request_id=0, turn_id=0))


def test_it_answers_what_the_metrics_ask_for(target, tmp_path) -> None:
    expected = plain(target, prompt(), 17)[0, 19:].tolist()
    target.save_pretrained(tmp_path / "target")
    random_heads(target).save_pretrained(tmp_path / "heads")
    names = (str(tmp_path / "target"), 1, {"temperature": 0.0})
    for options in ({}, {"draft_model_dir": str(tmp_path / "heads"), "kind": "chain", "depth": 2, "top_k": 1}):
        model = SpecheadsModel(*names, **options)
        found = answer_of(model, 17)
        (tokens,), (chunks,) = found["output_ids"], found["chunk_lengths"]
        assert tokens == expected and sum(chunks) == 17 and chunks[0] == 1
        assert len(found["token_times"]) == len(chunks) + 1
        assert found["token_times"] == sorted(found["token_times"])
        if model.heads is not None:
            assert chunks[1:-1] == [n + 1 for n in model.heads.last_stats.num_accepted[0]][: len(chunks) - 2]
            assert model.heads.tree_config.depth == 2
        model.stop()
        assert model.target is None


def test_texts_end_where_they_are_told(target, eagle_heads) -> None:
    tokens = plain(target, prompt(), 12)[0, 19:].tolist()
    model = SpecheadsModel(target, draft_model_dir=eagle_heads)
    found = answer_of(model, 12, end=tokens[5])
    assert found["output_ids"] == [tokens[: tokens.index(tokens[5]) + 1]]
    assert sum(found["chunk_lengths"][0]) == len(found["output_ids"][0])


def test_requests_come_one_at_a_time(target) -> None:
    with pytest.raises(ValueError, match="got 4; pass 1"):
        SpecheadsModel(target, 4)


def test_the_first_token_has_its_own_time(target, eagle_heads) -> None:
    ids = prompt()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for heads in (None, eagle_heads):
        found = timed_text(target, inputs, assistant_model=heads, max_new_tokens=9)
        assert len(found.times) == 9 and 0 < found.first == found.times[0] <= found.times[-1] <= found.seconds
    two = {name: value.repeat(2, 1) for name, value in inputs.items()}
    assert timed_text(target, two, max_new_tokens=3).first is None
