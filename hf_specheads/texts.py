"""Texts as users have them, strings, chats or token ids, as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Text = str | torch.Tensor | Sequence[int] | Sequence[Mapping[str, Any]]


def token_ids_of(text: Text, tokenizer: PreTrainedTokenizerBase | None = None) -> torch.Tensor:
    """Token ids int64 [T] of one text.

    Args:
        text: A string; a chat, as a list of messages, which the tokenizer's template turns into the beginning of a
            reply; or token ids, a list or [1, T].
        tokenizer: The target's, for strings and chats; token ids need none.

    Raises:
        ValueError: for a string or a chat without a tokenizer, or no tokens at all.
    """
    is_chat = isinstance(text, Sequence) and not isinstance(text, str) and bool(text) and isinstance(text[0], Mapping)
    if isinstance(text, str) or is_chat:
        if tokenizer is None:
            kind = "chat messages" if is_chat else f"the string {text[:40]!r}"
            raise ValueError(
                f"{kind} can only be read with a tokenizer; pass `tokenizer=` (the target's), or token ids."
            )
        text = _tokenized(text, tokenizer)
    ids = torch.as_tensor(text).flatten()
    if ids.numel() == 0 or ids.is_floating_point():
        raise ValueError(f"a text must be a string, chat messages or at least one token id, got {text!r}.")
    return ids.long()


def _tokenized(text: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    if isinstance(text, str):
        return tokenizer(text)["input_ids"]
    return chat_token_ids(text, tokenizer)


def chat_token_ids(chat: Sequence[Mapping[str, Any]], tokenizer: Any, **options: Any) -> list[int]:
    """Token ids of a chat as its template writes it, special tokens once, up to where a reply begins.

    Args:
        chat: Its messages.
        tokenizer: The target's.
        **options: Of `apply_chat_template`.

    Raises:
        ValueError: without a template, or for a chat that the template refuses, with its reason.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"{type(tokenizer).__name__} has no chat template, so chat messages cannot be tokenized; set "
            "`tokenizer.chat_template`, or give strings."
        )
    try:
        options = {"add_generation_prompt": True, **options, "return_dict": True}
        return list(tokenizer.apply_chat_template(list(chat), **options)["input_ids"])
    except Exception as error:  # templates raise what they like
        raise ValueError(f"the chat template refuses a chat: {error}; give it messages that it takes.") from error


def all_token_ids(texts: Iterable[Text], tokenizer: PreTrainedTokenizerBase | None = None) -> list[torch.Tensor]:
    """Token ids [1, T] of several texts, as [`token_ids_of`].

    Raises:
        ValueError: for a single string, whose letters would be taken for texts.
    """
    if isinstance(texts, str):
        raise ValueError(f"expected a list of texts, got the string {texts[:40]!r}; put it into a list.")
    return [token_ids_of(text, tokenizer)[None] for text in texts]


def pad_token_id_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """What batches are filled up with, also of tokenizers without a token for that."""
    return next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)


def left_padded(rows: Sequence[Sequence[int]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Texts of token ids as a batch of `generate`: `input_ids` and `attention_mask`, int64 [B, longest]."""
    missing = [max(map(len, rows)) - len(row) for row in rows]
    ids = [[pad_token_id] * more + list(row) for more, row in zip(missing, rows, strict=True)]
    mask = [[0] * more + [1] * len(row) for more, row in zip(missing, rows, strict=True)]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
