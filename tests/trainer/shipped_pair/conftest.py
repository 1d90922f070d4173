"""A tokenizer made as the shipped one is, of fewer chats."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from hf_specheads.trainer.shipped_pair.tokenizer import train_tokenizer, training_texts


@pytest.fixture(scope="session")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    library = ["def area(width, height):\n    return width * height\n" * 40]
    return train_tokenizer(training_texts(library, per_family=400), vocab_size=4096)
