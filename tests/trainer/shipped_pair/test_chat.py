"""The chat format: masks hold exactly what the target generates, and prompts are what training saw."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_specheads.trainer.data.chats import tokenize_chat
from hf_specheads.trainer.shipped_pair.chat import answer_text, chat_tokens, prompt_tokens
from hf_specheads.trainer.shipped_pair.tasks import FAMILIES, Example, Family, answer_problem, examples

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def runs(ids: list[int], mask: list[int]) -> list[list[int]]:
    """Ids of every stretch that the mask holds."""
    found: list[list[int]] = []
    for index, chosen in enumerate(mask):
        if chosen and (index == 0 or not mask[index - 1]):
            found.append([])
        if chosen:
            found[-1].append(ids[index])
    return found


@families
def test_masks_hold_the_assistants_tokens(family: Family, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    for example in islice(examples(family, seed=1), 60):
        ids, mask = chat_tokens(example, chat_tokenizer)
        replies = [message for message in example.messages if message["role"] == "assistant"]
        said = [chat_tokenizer.decode(run) for run in runs(ids, mask)]
        assert said == [answer_text(message, example.thinking) + "<|im_end|>" for message in replies]
        prompt = prompt_tokens(example, chat_tokenizer)
        assert ids[: len(prompt)] == prompt and mask[len(prompt) :] == [1] * (len(ids) - len(prompt) - 1) + [0]


@families
def test_decoded_answers_are_right(family: Family, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    """As `generate` hands them on: special tokens left out, think blocks and tool calls kept."""
    for example in islice(examples(family, seed=2, held_out=True), 10):
        ids, _ = chat_tokens(example, chat_tokenizer)
        answer = ids[len(prompt_tokens(example, chat_tokenizer)) :]
        assert answer_problem(example, chat_tokenizer.decode(answer, skip_special_tokens=True)) is None


@families
def test_lengths(family: Family, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    for held_out in (False, True):
        for example in islice(examples(family, seed=3, held_out=held_out), 150):
            ids, mask = chat_tokens(example, chat_tokenizer)
            prompt = len(prompt_tokens(example, chat_tokenizer))
            assert 40 <= sum(mask[prompt:]) <= 250 and len(ids) <= 512, example.messages


def thinking_example() -> Example:
    return next(example for family in FAMILIES for example in islice(examples(family), 30) if example.thinking)


def test_the_thinking_switch(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    """Off, a chat holds no trace of a think block; on, the target opens it itself."""
    example = thinking_example()
    render = chat_tokenizer.apply_chat_template
    off = render(example.messages, tokenize=False)
    on = render(example.messages, tokenize=False, enable_thinking=True)
    assert "think" not in off.lower() and on.count("<think>\n") == 1 and "Think first.\n<|im_end|>" in on
    prompt = render(example.prompt, tokenize=False, enable_thinking=True, add_generation_prompt=True)
    assert on.startswith(prompt) and prompt.endswith("<|im_start|>assistant\n")


def test_the_trainer_reads_the_same_tokens(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    for family in FAMILIES:
        example = next(example for example in examples(family, seed=4) if not example.thinking)
        [read] = tokenize_chat(example.messages, chat_tokenizer, tools=example.tools)
        assert read == chat_tokens(example, chat_tokenizer)


def test_roles_that_cannot_stand_there_are_refused(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    with pytest.raises(TemplateError, match="a system message cannot stand there"):
        chat_tokenizer.apply_chat_template(messages, tokenize=False)


def test_digits_stand_alone_and_markers_are_one_token(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    pieces = [chat_tokenizer.decode([i]) for i in chat_tokenizer("price 2047.5")["input_ids"]]
    assert [piece for piece in pieces if piece.strip(" .price")] == list("20475")
    for marker in ("<think>", "</tool_call>", "<|im_end|>"):
        assert len(chat_tokenizer(marker)["input_ids"]) == 1
    assert chat_tokenizer.decode(chat_tokenizer("<think>")["input_ids"], skip_special_tokens=True) == "<think>"
    assert len(chat_tokenizer) <= 4096 and chat_tokenizer.eos_token == "<|im_end|>"
    text = "naïve → café\n\tx = 1"
    assert chat_tokenizer.decode(chat_tokenizer(text)["input_ids"]) == text


def test_a_saved_tokenizer_is_the_same(chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    chat_tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.eos_token == "<|im_end|>" and again.pad_token == "<|endoftext|>"
    example = thinking_example()
    assert chat_tokens(example, again) == chat_tokens(example, chat_tokenizer)
