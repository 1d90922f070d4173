"""Reads files of prompts for all commands that generate: texts, and chats in the form of data sets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..texts import Text

CHAT_COLUMNS = ("messages", "prompt")
TEXT_COLUMNS = ("prompt", "text")


@dataclass(frozen=True)
class AskedChat:
    """A chat whose row has further options for the chat template.

    Attributes:
        messages: Messages up to the start of the answer.
        options: Arguments of `apply_chat_template`: the row's `tools` and the entries of its `chat_template_kwargs`.
    """

    messages: list[dict[str, Any]]
    options: dict[str, Any]


Prompt = str | list[dict[str, Any]] | AskedChat


def read_prompts(files: Sequence[Path]) -> list[Prompt]:
    """Reads the prompts of several files: texts, or chats up to the start of the assistant's last answer.

    Raises:
        ValueError: If an entry is neither; the message names file and line.
    """
    prompts: list[Prompt] = []
    for file in files:
        text = _text_of(file)
        if file.suffix != ".jsonl":
            prompts.append(text)
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                prompts.append(_prompt_of(line, f"{file}, line {number}"))
    if not prompts or "" in prompts:
        raise ValueError(f"expected non-empty prompts in {[str(file) for file in files]}, got {len(prompts)} entries.")
    return prompts


def texts_of(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase) -> list[Text]:
    """Converts prompts to the types that functions of this package accept: chats with options become token ids.

    Args:
        prompts: Prompts as returned by [`read_prompts`].
        tokenizer: Tokenizer of the target.

    Raises:
        ValueError: If the chat template refuses a chat.
    """
    from ..texts import chat_token_ids

    return [
        chat_token_ids(prompt.messages, tokenizer, **prompt.options) if isinstance(prompt, AskedChat) else prompt
        for prompt in prompts
    ]


def _text_of(file: Path) -> str:
    """Reads a file of prompts, without the byte order mark that some editors write."""
    if file.suffix == ".json":
        raise ValueError(f"{file} would be read as one prompt; write its entries into a .jsonl file, one per line.")
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a text in UTF-8: {error}") from error


def _prompt_of(line: str, where: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    entry = entry if isinstance(entry, Mapping) else {}
    for name in CHAT_COLUMNS:
        if isinstance(entry.get(name), list):
            return _chat_of(entry, name, where)
    for name in TEXT_COLUMNS:
        if isinstance(entry.get(name), str):
            return entry[name]
    raise ValueError(f"{where} needs a string `prompt` or `text`, or a list `messages`; got {line[:80]!r}.")


def _chat_of(entry: Mapping[str, Any], name: str, where: str) -> list[dict[str, Any]] | AskedChat:
    """Reads a chat as `regenerate` does: without the answer at its end, with the row's options for the template."""
    messages = list(entry[name])
    if not all(isinstance(message, Mapping) and message.get("role") for message in messages):
        raise ValueError(f"{where} is not a chat: every message needs a `role`; got {str(messages)[:80]!r}.")
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ValueError(f"{where} is a chat without a message to answer; got {str(entry[name])[:80]!r}.")
    given = entry.get("chat_template_kwargs") or {}
    found = {"tools": _tools_of(entry, where), **given}
    options = {key: value for key, value in found.items() if value is not None}
    return AskedChat(messages, options) if options else messages


def _tools_of(entry: Mapping[str, Any], where: str) -> list[Any] | None:
    """Tools of a row, given as a list or as a JSON string."""
    tools = entry.get("tools") or None
    try:
        return (json.loads(tools) or None) if isinstance(tools, str) else tools
    except ValueError as error:
        raise ValueError(f"{where} is not a chat: `tools` are neither a list nor JSON: {error}") from error
