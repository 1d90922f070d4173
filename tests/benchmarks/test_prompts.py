"""The committed prompts: well-formed, unlike one another, and never from a training file."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from benchmarks.setup import CHATS, SIZES, cut, load_prompts, make, make_chats, prompt_entries
from hf_specheads.trainer.shipped_pair.corpus import is_held_out


@pytest.mark.parametrize(("name", "size"), [*SIZES.items(), ("functions", 16)])
def test_prompt_sets_are_complete_and_distinct(name, size):
    prompts = prompt_entries(name)
    assert len(prompts) == size
    assert len({entry["prompt"] for entry in prompts}) == size
    assert all(entry["prompt"] == entry["prompt"].rstrip() for entry in prompts)


@pytest.mark.parametrize("name", list(SIZES))
def test_prompts_come_from_held_out_files_only(name):
    root = Path("stdlib")
    assert all(is_held_out(root / entry["name"].split(":")[0], root) for entry in prompt_entries(name))


def test_reported_and_tuning_prompts_share_no_file():
    files = [{entry["name"].split(":")[0] for entry in prompt_entries(name)} for name in SIZES]
    assert not files[0] & files[1]


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


class Words:
    """Counts words instead of tokens."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[str]]:
        return {"input_ids": text.split()}


def test_a_prompt_ends_at_a_line_and_leaves_something_to_continue():
    lines = ["def f(x):", *(f"    x = x + {i}" for i in range(40))]
    text = cut(lines, Words(), wanted=50)
    assert text is not None
    assert text.splitlines() == lines[: len(text.splitlines())]
    assert len(text.split()) >= 50
    assert cut(lines[:12], Words(), wanted=50) is None


def test_prompts_are_made_from_held_out_files_and_reproducibly(tmp_path):
    body = "".join(f"    value = value * {i} + offset\n" for i in range(40))
    for index in range(120):
        (tmp_path / f"module_{index}.py").write_text(f"def function_{index}(value, offset):\n{body}    return value\n")
    first, second = make(Words(), tmp_path), make(Words(), tmp_path)
    assert first == second
    made = [prompt["name"].split(":")[0] for prompts in first.values() for prompt in prompts]
    assert made
    assert all(is_held_out(tmp_path / name, tmp_path) for name in made)
