"""Known columns of data sets, and their conversion to token ids and loss masks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from .chats import ExampleError, Row, tokenize_chat

IGNORED_LABEL = -100
# Names of speakers in `conversations` (ShareGPT), and the chat roles they stand for.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bot", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response", "function"), "tool"),
}


@dataclass(frozen=True)
class Tokenizing:
    """Settings for turning rows into token ids.

    Attributes:
        tokenizer: The target's tokenizer; not needed for rows of token ids.
        max_length: Longest example in tokens. Chats and ids are cut, texts are split.
        template_kwargs: Arguments for the chat template; a row's own `chat_template_kwargs` take precedence.
    """

    tokenizer: PreTrainedTokenizerBase | None
    max_length: int
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def rows_of(row: Mapping[str, Any], kind: str, how: Tokenizing) -> list[Row]:
    """Returns the examples of a row, uncut except for texts, which are split. A chat may give one example per reply.

    Raises:
        ExampleError: for a row that cannot be read.
    """
    return READERS[kind](row, how)


def _chat(messages: Any, row: Mapping[str, Any], how: Tokenizing, supervised_from: int = 0) -> list[Row]:
    if how.tokenizer is None:
        raise ExampleError("chats need a tokenizer; pass `processing_class`.")
    own = {name: value for name, value in (row.get("chat_template_kwargs") or {}).items() if value is not None}
    kwargs = {**how.template_kwargs, **own}
    return tokenize_chat(messages, how.tokenizer, tools_of(row), kwargs, supervised_from)


def tools_of(row: Mapping[str, Any]) -> list | None:
    """Returns the tools of a row, parsed if they are stored as JSON text.

    Raises:
        ExampleError: if the text is not valid JSON.
    """
    tools = row.get("tools") or None
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools)
    except ValueError as error:
        raise ExampleError(f"`tools` are neither a list nor JSON: {error}") from error


def _messages(row: Mapping[str, Any], how: Tokenizing) -> list[Row]:
    return _chat(row["messages"], row, how)


def _conversations(row: Mapping[str, Any], how: Tokenizing) -> list[Row]:
    return _chat(messages_of(row["conversations"]), row, how)


def messages_of(conversation: object) -> list[dict[str, Any]]:
    """Converts a ShareGPT conversation, a list of `{from, value}`, to messages. Turns that already have a `role` are
    kept.

    Raises:
        ExampleError: for an unknown speaker, or a value that is no conversation.
    """
    if not isinstance(conversation, Sequence) or isinstance(conversation, str):
        raise ExampleError(f"every `conversations` must be a list of {{from, value}}; got {conversation!r}.")
    messages = []
    for turn in conversation:
        if not isinstance(turn, Mapping):
            raise ExampleError(f"every turn of a conversation must be {{from, value}}; got {turn!r}.")
        if turn.get("role"):
            messages.append(dict(turn))
        elif turn.get("from") in ROLES:
            messages.append({"role": ROLES[turn["from"]], "content": turn.get("value")})
        else:
            raise ExampleError(
                f"a turn of a conversation has `from` {turn.get('from')!r}, expected one of {sorted(ROLES)}."
            )
    return messages


def _completion(row: Mapping[str, Any], how: Tokenizing) -> list[Row]:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if how.tokenizer is None:
            raise ExampleError("prompts need a tokenizer; pass `processing_class`.")
        before = list(how.tokenizer(prompt)["input_ids"])
        while before and before[-1] == how.tokenizer.eos_token_id:
            before.pop()
        after = list(how.tokenizer(completion, add_special_tokens=False)["input_ids"])
        after = _ended(after, how.tokenizer)
        return [(before + after, [0] * len(before) + [1] * len(after))]
    if isinstance(prompt, str) or isinstance(completion, str) or not prompt:
        raise ExampleError(f"`prompt` and `completion` must be two texts or two lists of messages; got {prompt!r}.")
    return _chat([*prompt, *completion], row, how, supervised_from=len(prompt))


def _text(row: Mapping[str, Any], how: Tokenizing) -> list[Row]:
    text = row["text"]
    if not isinstance(text, str):
        raise ExampleError(f"every `text` of the data must be a string, got {text!r}.")
    if how.tokenizer is None:
        raise ExampleError("texts need a tokenizer; pass `processing_class`.")
    ids = tokenize_text(text, how.tokenizer)
    pieces = [ids[start : start + how.max_length] for start in range(0, len(ids), how.max_length)]
    return [(piece, [1] * len(piece)) for piece in pieces if len(piece) > 1 or len(pieces) == 1]


def _tokenized(row: Mapping[str, Any], how: Tokenizing) -> list[Row]:
    return [complete_example(row)]


READERS = {
    "messages": _messages,
    "conversations": _conversations,
    "prompt": _completion,
    "text": _text,
    "input_ids": _tokenized,
}


def complete_example(example: Mapping[str, Any]) -> Row:
    """Returns token ids and loss mask of a tokenized example. The mask is `loss_mask` if given, else derived from
    `labels` (-100 means not supervised), else 1 everywhere.

    Raises:
        ExampleError: if the lengths differ, or an id is not a whole number.
    """
    ids = [_token_id(value) for value in example["input_ids"]]
    if example.get("loss_mask") is not None:
        mask = [int(bool(m)) for m in example["loss_mask"]]
    elif example.get("labels") is not None:
        mask = [int(label != IGNORED_LABEL) for label in example["labels"]]
    else:
        mask = [1] * len(ids)
    if len(mask) != len(ids):
        raise ExampleError(f"an example has {len(ids)} `input_ids` but a mask of length {len(mask)}; make them equal.")
    return ids, mask


def _token_id(value: Any) -> int:
    try:
        token_id = int(value)
    except (TypeError, ValueError, OverflowError):
        token_id = None
    if token_id is None or token_id != value:  # `int` would silently turn 1.5 into token 1
        raise ExampleError(f"`input_ids` must be whole numbers, got {value!r}.")
    return token_id


def tokenize_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenizes a text with the tokenizer's own special tokens, and its end-of-sequence token at the end."""
    return _ended(list(tokenizer(text)["input_ids"]), tokenizer)


def _ended(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    end = tokenizer.eos_token_id
    return ids if end is None or (ids and ids[-1] == end) else [*ids, end]
