"""Texts as users have them, strings, chats or token ids, as token ids."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Change = Callable[[Any], Any]
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

    def written(messages: list[Any]) -> str:
        return str(tokenizer.apply_chat_template(messages, **{**options, "tokenize": False}))

    try:
        options = {"add_generation_prompt": True, **options, "return_dict": True}
        return list(tokenizer.apply_chat_template(as_template_takes(chat, written), **options)["input_ids"])
    except Exception as error:  # templates raise what they like
        raise ValueError(f"the chat template refuses a chat: {error}; give it messages that it takes.") from error


def as_template_takes(chat: Sequence[Any], written: Callable[[list[Any]], str]) -> list[Any]:
    """The messages of a chat in the form that a chat template takes, of those in which data write the same.

    The arguments of tool calls are objects, or JSON in a string, as in OpenAI's interface: templates that turn an
    object into JSON put a string into quotes once more; those that take a string write an object in Python's way, or
    fail. A content is a string, or parts of type text: templates for strings write those in Python's way, leave them
    out, or fail. All of that would be text that the target never sees.

    Args:
        chat: Messages, `{role, content, tool_calls}` each.
        written: Renders messages by the template.

    Returns:
        The messages as they were, unless the template takes them in other forms alone.
    """
    messages = list(chat)
    contents: list[Change] = [_as_given, _as_one_text]
    arguments: list[Change] = [_as_given, _as_object, _as_string]
    contents = contents[: 1 + any(_parts_of(message) is not None for message in messages)]
    if all(function.get("arguments") in (None, "", {}) for function in _functions_of(messages)):
        arguments = [_as_given]
    if len(contents) == len(arguments) == 1:
        return messages
    asked = [text for message in messages if _role_of(message) == "user" for text in _parts_of(message) or ()]
    best, most = messages, -1
    for of_content, of_arguments in itertools.product(contents, arguments):
        changed = [_with_arguments(of_content(message), of_arguments) for message in messages]
        if (found := _num_written(changed, asked, written)) > most:
            best, most = changed, found
        if most == len(asked):
            break
    return best


def _as_given(value: Any) -> Any:
    return value


def _parts_of(message: Any) -> list[str] | None:
    """Texts of a content that is parts of type text alone; `None` of any other."""
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list) or not parts:
        return None
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    return texts if len(texts) == len(parts) and all(isinstance(text, str) for text in texts) else None


def _as_one_text(message: Any) -> Any:
    """A message whose content is one string, parts on lines of their own, as servers join them."""
    texts = _parts_of(message)
    return message if texts is None else {**message, "content": "\n".join(texts)}


def _functions_of(messages: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """What is called, call by call."""
    for message in messages:
        for call in (message.get("tool_calls") or ()) if isinstance(message, Mapping) else ():
            if isinstance(call, Mapping):
                function = call.get("function")
                yield function if isinstance(function, Mapping) else call


def _with_arguments(message: Any, change: Change) -> Any:
    if not isinstance(message, Mapping) or not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
            function = call["function"]
            call = {**call, "function": {**function, "arguments": change(function.get("arguments"))}}
        elif isinstance(call, Mapping) and "arguments" in call:
            call = {**call, "arguments": change(call["arguments"])}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _as_object(arguments: Any) -> Any:
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def _as_string(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments


def _num_written(messages: list[Any], asked: list[str], written: Callable[[list[Any]], str]) -> int:
    """How many parts of what was asked a template writes, in whatever letters, spaces and marks; -1 if it fails, or
    writes objects in Python's way or JSON in quotes."""
    try:
        text = written(messages)
    except Exception:  # templates raise what they like
        return -1
    for arguments in (function.get("arguments") for function in _functions_of(messages)):
        wrong = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, str) else str(arguments)
        if arguments and wrong in text:
            return -1
    letters = _letters_of(text)
    if any(_letters_of(str(message["content"])) in letters for message in messages if _parts_of(message) is not None):
        return -1
    return sum(part.strip() in text or (_letters_of(part) or part) in letters for part in asked)


def _role_of(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _letters_of(text: str) -> str:
    return "".join(filter(str.isalnum, text)).casefold()


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
