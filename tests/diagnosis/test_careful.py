"""What the evidence cannot carry is not said: few texts, targets that know no text, prompts that are no turns."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.diagnosis.lab import tiny_tokenizer
from benchmarks.diagnosis.tiny import fresh_heads, tiny_prompts
from hf_specheads.bootstrap import Interval, careful
from hf_specheads.diagnosis.evidence import Evidence, capture
from hf_specheads.diagnosis.groups import Group, begins_turns, foreseeable
from hf_specheads.diagnosis.noise import Noise, measure_noise
from hf_specheads.diagnosis.stored import untouched
from hf_specheads.diagnosis.teacher_forced import draft_everywhere, unread_tokens
from hf_specheads.texts import token_ids_of

DEMO_CHATS = Path(__file__).parents[2] / "hf_specheads" / "cli" / "demo_chats.jsonl"

ASKS = "{% for m in messages %}w7 {{ m['content'] }} w9 {% endfor %}{% if add_generation_prompt %}w11 w13{% endif %}"


@pytest.mark.parametrize("units, student", [(3, 4.303), (8, 2.365), (33, 2.037)])
def test_intervals_of_few_texts_are_as_wide_as_student_says(units: int, student: float) -> None:
    found = careful(Interval(1.0, 1.0 - 1.96, 1.0 + 1.96), units)
    assert found.high - 1 == pytest.approx(student * math.sqrt(units / (units - 1)), rel=0.04)
    assert found.high - 1 == pytest.approx(1 - found.low)
    assert careful(Interval(1.0, 0.9, 1.1), 1).low == -math.inf


def test_a_gap_seen_in_one_text_is_none() -> None:
    good = Group("later", (9.0, 9.0, 9.0), (10.0, 10.0, 10.0), (9.0, 9.0, 9.0))
    assert Group("first", (0.0, 0.0, 0.0), (4.0, 0.0, 0.0), (4.0, 0.0, 0.0)).worse_than(good).low == -math.inf
    assert Group("first", (0.0, 0.0, 0.0), (4.0, 4.0, 4.0), (4.0, 4.0, 4.0)).worse_than(good).low > 0.5


def test_a_target_that_knows_no_text_is_not_asked_whether_prompts_are(deep, evidence: Evidence) -> None:
    assert measure_noise(deep, evidence, None) is None
    assert measure_noise(deep, evidence, tiny_tokenizer()) is None  # our words are none of its
    found = measure_noise(deep, evidence, letters)
    assert found is not None and not found.told and not found.found
    one = measure_noise(deep, evidence.part([0]), letters)
    assert one is not None and not one.found
    assert "Infinity" not in json.dumps(one.to_dict()) and one.to_dict()["order"]["low"] is None


def letters(text: str) -> dict[str, list[int]]:
    """A tokenizer that knows everything."""
    return {"input_ids": [3 + ord(letter) % 96 for letter in text]}


@pytest.mark.parametrize("high, told, noise", [(0.05, True, True), (0.2, True, False), (0.05, False, False)])
def test_noise_is_as_likely_in_any_order(high: float, told: bool, noise: bool) -> None:
    assert Noise(8.0, 8.1, 3.0, 9.0, Interval(0.01, -0.03, high), told).found is noise


@pytest.fixture(scope="module")
def shipped() -> tuple[PreTrainedModel, Any]:
    folder = str(Path(__file__).parents[2] / "model_cards" / "target")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["chats", "random tokens"])
def test_what_users_say_is_no_noise_to_a_target_that_learnt_answers_only(shipped, kind: str) -> None:
    target, tokenizer = shipped
    chats = [json.loads(line)["messages"][:1] for line in DEMO_CHATS.read_text(encoding="utf-8").splitlines()]
    prompts = [token_ids_of(chat, tokenizer) for chat in chats]
    if kind == "random tokens":
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(5, 4096, (len(ids),), generator=generator) for ids in prompts]
    texts = [torch.cat([ids, ids[:1]]) for ids in prompts]
    found = measure_noise(target, capture(target, texts, [len(ids) for ids in prompts]), tokenizer)
    assert found is not None and found.told
    assert found.found is (kind == "random tokens"), found


def test_where_turns_begin() -> None:
    chats, ids = [[{"role": "user", "content": "w20"}]], [torch.tensor([[7, 20, 9, 11, 13]])]
    assert begins_turns(chats, tiny_tokenizer())
    assert begins_turns(ids, tiny_tokenizer(ASKS))
    assert not begins_turns([torch.tensor([[7, 20, 9]])], tiny_tokenizer(ASKS))
    assert not begins_turns(tiny_prompts(), None) and not begins_turns(["w20"], tiny_tokenizer(None))
    assert not begins_turns(ids, tiny_tokenizer())  # the template asks for nothing


def test_what_heads_do_not_read_counts_twice(deep, evidence: Evidence) -> None:
    sure = evidence.confidence
    for method, unread in (("eagle", 0), ("hydra", 0), ("medusa", 1)):
        heads = fresh_heads(deep, method)
        drafts = draft_everywhere(heads, evidence, tuple(heads.feature_layers))
        assert unread_tokens(heads) == drafts.unread == unread
        expected = sure[:, 3] if unread == 0 else sure[:, 3] * sure[:, 2]
        assert torch.allclose(foreseeable(drafts, evidence)[:, 4], expected)


def test_heads_that_were_never_trained_say_so(deep, learnt) -> None:
    assert untouched(fresh_heads(deep, "eagle3")) is True
    assert untouched(learnt()) is False
