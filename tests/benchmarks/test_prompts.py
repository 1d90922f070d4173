"""The committed prompts: well-formed, unlike one another, and never from a training file."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from benchmarks import setup
from benchmarks.setup import CHATS, LONG_FILES, load_prompts, make_chats, make_long, padded, prompt_entries
from hf_specheads.trainer.shipped_pair.corpus import is_held_out


@pytest.mark.parametrize("name", list(CHATS))
def test_chats_are_those_that_the_tasks_write(name):
    """Whoever changes a task family makes the committed prompts anew, and measures again."""
    entries = prompt_entries(name)
    assert entries == make_chats(*CHATS[name])
    assert len({json.dumps(entry["messages"]) for entry in entries}) == len(entries)
    assert all(entry["messages"][-1]["role"] in ("user", "tool") for entry in entries)


def test_chats_decide_comparisons():
    assert len(prompt_entries("chats")) >= 200
    asked = [{json.dumps(entry["messages"]) for entry in prompt_entries(name)} for name in CHATS]
    assert not asked[0] & asked[1]


def test_chats_are_put_in_the_words_of_the_targets_template(tokenizer):
    with pytest.raises(ValueError, match="no chat template"):
        load_prompts(["chats_tuning"], tokenizer, 1)
    tokenizer = copy.deepcopy(tokenizer)  # which all tests share
    tokenizer.chat_template = (
        "{% for message in messages %}w1 {{ message['content'] }} {% endfor %}"
        "{% if enable_thinking %}w2 {% endif %}{% if add_generation_prompt %}w3{% endif %}"
    )
    found = load_prompts(["chats_tuning"], tokenizer)
    assert len(found) == len(prompt_entries("chats_tuning"))
    first, last = (tokenizer(word)["input_ids"] for word in ("w1", "w3"))
    for inputs in found:
        assert inputs["input_ids"].shape == inputs["attention_mask"].shape
        assert inputs["input_ids"][0, :1].tolist() == first and inputs["input_ids"][0, -1:].tolist() == last


def test_long_prompts_come_from_held_out_files_only():
    prompts, root = prompt_entries("long"), Path("stdlib")
    assert len({entry["name"] for entry in prompts}) == len(prompts) == LONG_FILES
    assert all(is_held_out(root / entry["name"], root) for entry in prompts)
    assert all(entry["prompt"] == entry["prompt"].rstrip() for entry in prompts)


class Words:
    """Counts words instead of tokens."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[str]]:
        return {"input_ids": text.split()}


def test_a_long_prompt_ends_at_a_line_and_leaves_something_to_continue(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "LONG_TOKENS", 50)
    lines = [f"value_{i} = {i}" for i in range(80)]
    for index in range(120):
        (tmp_path / f"module_{index}.py").write_text("\n".join(lines[: 40 + index % 2 * 40]) + f"\nlast = {index}\n")
    first, second = make_long(Words(), tmp_path), make_long(Words(), tmp_path)
    assert first and first == second
    for entry in first:
        text = entry["prompt"]
        assert is_held_out(tmp_path / entry["name"], tmp_path)
        assert text.splitlines() == lines[: len(text.splitlines())] and 50 <= len(text.split()) < 80


def test_prompts_of_a_batch_end_together():
    rows = [{"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)},
            {"input_ids": torch.tensor([[8]]), "attention_mask": torch.ones(1, 1, dtype=torch.long)}]  # fmt: skip
    batch = padded(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
