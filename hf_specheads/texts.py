"""Converting texts (strings, chats or token ids) to token ids."""

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
    """Returns the token ids of one text, int64 [T].

    Args:
        text: A string; or a chat, as a list of messages, which is rendered with the tokenizer's template up to where
            the reply begins; or token ids, as a list or [1, T].
        tokenizer: The target's tokenizer, required for strings and chats.

    Raises:
        ValueError: if there is no tokenizer for a string or chat, or the text has no tokens.
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
    """Returns the token ids of a chat as rendered by the chat template, up to where the reply begins.

    Special tokens are not added a second time to those of the template.

    Args:
        chat: Messages of the chat.
        tokenizer: The target's tokenizer.
        **options: Options of `apply_chat_template`.

    Raises:
        ValueError: if the tokenizer has no chat template, or the template refuses the chat; the message says why.
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
    except Exception as error:  # templates may raise errors of any type
        raise ValueError(
            f"the chat template refuses a chat: {error}; give messages that the template accepts."
        ) from error


def as_template_takes(chat: Sequence[Any], written: Callable[[list[Any]], str]) -> list[Any]:
    """Converts the messages of a chat to the form that a chat template expects.

    Data sets store the same messages in different forms. The arguments of tool calls are objects, or JSON strings as
    in OpenAI's API. Templates that serialise objects to JSON put a string into quotes again; templates that expect
    strings render an object as a Python literal, or fail. Likewise a content is a string or a list of parts of type
    text; templates that expect strings render such a list as a Python literal, drop it, or fail. The rendered text
    would then be unlike anything the target was trained on.

    Args:
        chat: Messages, `{role, content, tool_calls}` each.
        written: Renders messages with the template.

    Returns:
        The messages, unchanged unless the template renders them correctly only in another form.
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
    """Returns the texts of a content that consists only of parts of type text; `None` for any other content."""
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list) or not parts:
        return None
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    return texts if len(texts) == len(parts) and all(isinstance(text, str) for text in texts) else None


def _as_one_text(message: Any) -> Any:
    """Returns the message with its text parts joined to one string by newlines, as inference servers do."""
    texts = _parts_of(message)
    return message if texts is None else {**message, "content": "\n".join(texts)}


def _functions_of(messages: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the called function of every tool call in the messages."""
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
    """Counts the texts in `asked` that a template renders, ignoring case, spaces and punctuation.

    Returns -1 if the template fails, renders objects or text parts as Python literals, or puts JSON into quotes.
    """
    try:
        text = written(messages)
    except Exception:  # templates may raise errors of any type
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
    """Returns the token ids [1, T] of each of several texts, see [`token_ids_of`].

    Raises:
        ValueError: if `texts` is a single string, whose characters would be taken for texts.
    """
    if isinstance(texts, str):
        raise ValueError(f"expected a list of texts, got the string {texts[:40]!r}; put it into a list.")
    return [token_ids_of(text, tokenizer)[None] for text in texts]


def pad_token_id_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the token id to pad batches with: the padding token, else the end-of-sequence token, else 0."""
    return next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)


def left_padded(rows: Sequence[Sequence[int]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Returns token ids as a left-padded batch for `generate`: `input_ids`, `attention_mask`, int64 [B, longest]."""
    missing = [max(map(len, rows)) - len(row) for row in rows]
    ids = [[pad_token_id] * more + list(row) for more, row in zip(missing, rows, strict=True)]
    mask = [[0] * more + [1] * len(row) for more, row in zip(missing, rows, strict=True)]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
