"""Words are written alike everywhere, texts come back whole, and a target can change its tokenizer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_specheads.trainer.shipped_pair.target import with_tokenizer
from hf_specheads.trainer.shipped_pair.tasks.draw import value_is_held_out
from hf_specheads.trainer.shipped_pair.tasks.words import CITIES, COLOURS, THINGS, invented
from hf_specheads.trainer.shipped_pair.tokenizer import (
    COMMON_WORDS,
    refuse_unlearnable_words,
    train_tokenizer,
    unlearnable_words,
)

WORDS = ("Florence", "carnelian", "KX", *(invented(random.Random(seed)) for seed in range(5)))


@pytest.mark.parametrize("word", WORDS)
def test_a_word_has_the_same_tokens_wherever_it_stands(chat_tokenizer: PreTrainedTokenizerFast, word: str) -> None:
    alone = chat_tokenizer.tokenize(word)
    for before, after in ((" ", " "), ('"', '"'), ("('", "')"), ("_", "_id"), ("\n", "\n"), ("3", "7"), (": ", ",")):
        found = chat_tokenizer.tokenize(f"x {before}{word}{after}")
        places = [i for i in range(len(found)) if found[i : i + len(alone)] == alone]
        assert places, (before, found)


def test_held_out_words_that_are_one_token_are_named(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    word = next(word for word in THINGS if value_is_held_out(word))
    assert word not in unlearnable_words(chat_tokenizer)
    knowing = train_tokenizer([f"{word} {word} {word}."] * 50, 400)
    assert unlearnable_words(knowing) == [word]
    with pytest.raises(SystemExit, match=word):
        refuse_unlearnable_words(knowing)


def test_the_shipped_tokenizer_spells_held_out_words_in_several_tokens() -> None:
    shipped = Path(__file__).parents[3] / "model_cards" / "target"
    assert unlearnable_words(PreTrainedTokenizerFast.from_pretrained(shipped)) == []


def test_common_words_fill_no_slot() -> None:
    assert not set(COMMON_WORDS.split()) & {*map(str.lower, CITIES), *COLOURS}


@pytest.mark.parametrize(
    "text", ["a  b\n\n\tc = {'d': 1.50}  # é\r\n", "    if x:\n        return (y, 12)\n", " \n \n", "the"]
)
def test_texts_come_back_whole(chat_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert chat_tokenizer.decode(chat_tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_digits_are_tokens(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    assert chat_tokenizer.tokenize("2048") == ["2", "0", "4", "8"]


def test_a_target_keeps_what_its_tokens_meant(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    ours = train_tokenizer(["the cat sat on the mat with 12 cats"] * 4, vocab_size=300)
    config = LlamaConfig(vocab_size=len(chat_tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                         num_attention_heads=2, tie_word_embeddings=True)  # fmt: skip
    target = LlamaForCausalLM(config)
    old = target.get_input_embeddings().weight.detach().clone()
    changed = with_tokenizer(target, chat_tokenizer, ours)
    new = changed.get_input_embeddings().weight
    assert changed.lm_head.weight is new and changed.config.vocab_size == len(new) == len(ours)
    theirs = chat_tokenizer.get_vocab()
    assert {"<|im_end|>", "a", "!"} <= set(theirs)
    for token, index in ours.get_vocab().items():
        if token in theirs:
            torch.testing.assert_close(new[index], old[theirs[token]])
    parts = chat_tokenizer("cats", add_special_tokens=False)["input_ids"]
    assert len(parts) > 1
    torch.testing.assert_close(new[ours.get_vocab()["cats"]], old[parts].mean(dim=0))
    assert changed.generation_config.eos_token_id == ours.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
