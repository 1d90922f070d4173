"""Files of prompts, for all commands that generate from some: texts, and chats as data sets write them."""

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
    """A chat whose row says more to the chat template than its messages.

    Attributes:
        messages: Up to where the answer begins.
        options: Of `apply_chat_template`: the row's `tools` and what its `chat_template_kwargs` hold.
    """

    messages: list[dict[str, Any]]
    options: dict[str, Any]


Prompt = str | list[dict[str, Any]] | AskedChat


def read_prompts(files: Sequence[Path]) -> list[Prompt]:
    """Prompts of several files: texts, or chats up to where the assistant's last answer begins.

    Raises:
        ValueError: naming file and line of an entry that is neither.
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
    """The prompts as functions of this package take them: those with options of their own as token ids.

    Args:
        prompts: As [`read_prompts`] returns them.
        tokenizer: The target's.

    Raises:
        ValueError: for a chat that the template refuses.
    """
    from ..texts import chat_token_ids

    return [
        chat_token_ids(prompt.messages, tokenizer, **prompt.options) if isinstance(prompt, AskedChat) else prompt
        for prompt in prompts
    ]


def _text_of(file: Path) -> str:
    """What a file of prompts says. Some editors begin it with a mark of its encoding, which is no part of a prompt."""
    if file.suffix == ".json":
        raise ValueError(f"{file} would be one prompt as it is; write its entries into a .jsonl file, one a line.")
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: {error}") from error


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
    """A chat as `regenerate` reads it: without the answer that it ends with, with what the row tells the template."""
    messages = list(entry[name])
    if not all(isinstance(message, Mapping) and message.get("role") for message in messages):
        raise ValueError(f"{where} is no chat: every message needs a `role`; got {str(messages)[:80]!r}.")
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ValueError(f"{where} is a chat in which nobody asks anything; got {str(entry[name])[:80]!r}.")
    given = entry.get("chat_template_kwargs") or {}
    found = {"tools": _tools_of(entry, where), **given}
    options = {key: value for key, value in found.items() if value is not None}
    return AskedChat(messages, options) if options else messages


def _tools_of(entry: Mapping[str, Any], where: str) -> list[Any] | None:
    """Tools of a row, also where they are written as JSON."""
    tools = entry.get("tools") or None
    try:
        return (json.loads(tools) or None) if isinstance(tools, str) else tools
    except ValueError as error:
        raise ValueError(f"{where} is no chat: `tools` are neither a list nor JSON: {error}") from error
