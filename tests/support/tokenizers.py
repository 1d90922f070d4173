"""Tokenizers that need no files."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .targets import VOCAB


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer of three special tokens and 96 bytes, because tests of stop strings need one that can spell
    anything."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 3]
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letter: index for index, letter in enumerate(letters, start=3)}
    bytes_only = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_only, pad_token="<pad>", eos_token="</s>")


def word_tokenizer(words: Iterable[str], **special: str) -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token per word between spaces. `<pad>` and `<unk>` must be among the words."""
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", **special)
