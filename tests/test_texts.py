"""Texts as users have them: strings, chats and token ids are read alike by whoever takes texts."""

from __future__ import annotations

import pytest
import torch
from support.heads import random_heads
from support.targets import shared_target

from hf_specheads.draft_vocabulary import count_tokens
from hf_specheads.texts import all_token_ids, token_ids_of
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
