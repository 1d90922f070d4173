"""Texts as users have them: strings, chats and token ids are read alike by whoever takes texts."""

from __future__ import annotations

import copy

import pytest
import torch
from support.heads import random_heads
from support.targets import shared_target
from tokenizers.processors import TemplateProcessing

from hf_specheads.cli.bench import batches_of
from hf_specheads.draft_vocabulary import count_tokens
from hf_specheads.evaluation.suites import SuitePrompt, prompts_for
from hf_specheads.texts import all_token_ids, left_padded, token_ids_of
from hf_specheads.tuning import tune, tune_vocabulary

TEXT, IDS = "w5 w6 w7", [5, 6, 7]
CHAT = [{"role": "user", "content": "w8 w9"}]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %} w3{% endif %}"


@pytest.mark.parametrize("form", [TEXT, IDS, torch.tensor(IDS), torch.tensor([IDS]), tuple(IDS)], ids=type)
def test_every_form_of_a_text(form, tokenizer) -> None:
    assert token_ids_of(form, tokenizer).tolist() == IDS
    assert [ids.tolist() for ids in all_token_ids([form, IDS], tokenizer)] == [[IDS], [IDS]]
    assert count_tokens([form], 99, tokenizer).nonzero().flatten().tolist() == IDS


def test_chats(tokenizer) -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        token_ids_of(CHAT, tokenizer)
    tokenizer.chat_template = TEMPLATE
    assert token_ids_of(CHAT, tokenizer).tolist() == [8, 9, 3], "up to where the reply begins"


@pytest.mark.parametrize(
    ("text", "words"),
    [(TEXT, "can only be read with a tokenizer"), (CHAT, "chat messages can only be read"), ([], "at least one token"),
     ([0.5], "at least one token")],
)  # fmt: skip
def test_what_cannot_be_read(text, words) -> None:
    with pytest.raises(ValueError, match=words):
        token_ids_of(text)
    with pytest.raises(ValueError, match="put it into a list"):
        all_token_ids(TEXT)
    with pytest.raises(ValueError, match="put it into a list"):
        count_tokens(TEXT, 99)


def test_whoever_measures_takes_strings(tokenizer) -> None:
    target = shared_target()
    heads = random_heads(target, kind="chain", depth=2)
    options = {"max_new_tokens": 4, "tokenizer": tokenizer}
    assert tune(target, heads, [TEXT, CHAT[0]["content"]], depth=2, top_k=2, confirm=1, repeats=1, **options).tree
    (found,) = tune_vocabulary(target, heads, [TEXT], [2], ["w5 w5 w6"], repeats=1, **options)
    assert heads.draft_vocabulary.tolist() == [5, 6] and found.coverage > 0
    with pytest.raises(ValueError, match="tokenizer"):
        tune(target, heads, [TEXT])


@pytest.mark.parametrize("raised", ["{{ raise_exception('no alien here') }}", "{{ messages[0].missing.content }}"])
def test_a_chat_that_the_template_refuses(raised: str, tokenizer) -> None:
    """Templates of Gemma or Mistral take no system message, or want turns in order: no traceback of jinja's."""
    tokenizer.chat_template = raised
    with pytest.raises(ValueError, match="the chat template refuses a chat: "):
        token_ids_of(CHAT, tokenizer)


def test_chats_have_their_special_tokens_once(tokenizer) -> None:
    """A template that writes the beginning of a text, of a tokenizer that adds one to every string: as Llama 3 has it.
    Every command reads a chat alike."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "w4 " + TEMPLATE
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="w4 $A", special_tokens=[("w4", 4)])
    assert token_ids_of(TEXT, tokenizer).tolist() == [4, *IDS], "or this test could not fail"
    suite = prompts_for([SuitePrompt("ours", "x", "w8 w9")], tokenizer)
    for prompt in (CHAT, *suite):
        (batch,) = batches_of(tokenizer, [prompt, TEXT], 2)
        assert batch["input_ids"].tolist() == [[4, 8, 9, 3], [4, *IDS]]


def test_texts_of_several_lengths_are_padded_on_the_left() -> None:
    batch = left_padded([[5, 6, 7], [8]], 0)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
