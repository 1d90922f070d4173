"""Regenerates chats with the target, which answers every turn after its own earlier replies. Exact token ids are kept.

Every reply becomes one row, which holds the prompt as the target read it (not supervised) and the generated tokens
(supervised). The trainer reads such rows as they are.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_specheads.texts import as_template_takes

from .answering import Answer, Answerer, Sampling
from .chats import ExampleError, chat_problem, without_missing
from .columns import messages_of, tools_of

TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
CHANNEL = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|end\|>|<\|return\|>|<\|call\|>|\Z)", re.DOTALL)
REPLACED = ("assistant",)


@dataclass(frozen=True)
class RegenerationOptions:
    """Options of a regeneration.

    Attributes:
        temperatures: Sampling temperatures, one of which is drawn for each chat.
        max_new_tokens: Longest reply in tokens.
        max_length: Longest prompt and reply together, in tokens; a chat ends before it would get longer.
        top_p, top_k: As in `generate`.
        template_kwargs: Arguments for the chat template, e.g. `{"enable_thinking": True}`.
        batch_size: Number of prompts answered together.
        seed: Seed of temperatures and replies.
    """

    temperatures: tuple[float, ...] = (0.0,)
    max_new_tokens: int = 1024
    max_length: int = 4096
    top_p: float | None = None
    top_k: int | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 16
    seed: int = 0


@dataclass
class Chat:
    """A chat that is being regenerated.

    Attributes:
        name: Name of its row in the data.
        source: Recorded messages that are still to come. Those of the assistant only mark where a reply is due.
        tools: Functions the assistant may call.
        template_kwargs: Arguments for the chat template.
        temperature: Sampling temperature of all replies.
        history: Messages before the next reply.
        rows: Replies so far, as rows to train on.
        problem: Why the chat failed or was skipped, `None` if neither.
        skipped: Whether the target was never asked, because the chat cannot be rendered for it.
        ended: Whether to ignore the rest of `source`.
    """

    name: str
    source: list[dict[str, Any]]
    tools: list | None
    template_kwargs: Mapping[str, Any]
    temperature: float
    history: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None
    skipped: bool = False
    ended: bool = False

    def reply_is_due(self) -> bool:
        """Moves the next messages that are not the assistant's to the history; returns whether a reply is due then."""
        while self.source and self.source[0]["role"] not in REPLACED:
            self.history.append(self.source.pop(0))
        if self.ended or not self.history or self.history[-1]["role"] not in ("user", "tool"):
            return False
        if self.source:
            self.source.pop(0)
        return True

    def take_reply(self, message: dict[str, Any]) -> None:
        """Adds the assistant's reply to the history, and the recorded result if the reply calls a tool.

        Tools are not run: the first recorded result answers the first call, and further calls and results are dropped.
        If the reply calls no tool although results were recorded, it counts as the final answer to the question, and
        the recorded messages up to the next user message are dropped. A reply that calls a tool without a recorded
        result ends the chat.
        """
        results = 0
        while results < len(self.source) and self.source[results]["role"] == "tool":
            results += 1
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": calls[:1]}
            self.history += [message, *self.source[: min(results, 1)]]
            self.ended = not results
            del self.source[:results]
            return
        self.history.append(message)
        if results:
            while self.source and self.source[0]["role"] != "user":
                self.source.pop(0)
        self.ended = not self.source


def chat_of(row: Mapping[str, Any], name: str, options: RegenerationOptions) -> Chat:
    """Creates the chat of a row, before its first reply.

    Raises:
        ExampleError: for a row that is no chat, or in which no user or tool speaks.
    """
    messages = _messages(row)
    if problem := chat_problem(messages):
        raise ExampleError(f"not a chat: {problem}")
    messages = [without_missing(message) for message in messages]
    if not any(message["role"] in ("user", "tool") for message in messages):
        raise ExampleError("no message of this chat is from a user or a tool, so there is nothing to answer")
    own = {key: value for key, value in (row.get("chat_template_kwargs") or {}).items() if value is not None}
    temperature = random.Random(f"{options.seed} {name}").choice(options.temperatures)
    return Chat(name, messages, without_missing(tools_of(row)), {**options.template_kwargs, **own}, temperature)


def _messages(row: Mapping[str, Any]) -> list[Any]:
    if isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    for column in ("messages", "conversations", "prompt"):
        if row.get(column) is not None:
            return messages_of(row[column])
    raise ExampleError("a row needs `messages`, `conversations` or `prompt`")


class Regenerator:
    """Regenerates chats.

    Args:
        answerer: Generates the replies.
        tokenizer: The target's tokenizer, with its chat template.
        options: Options of the regeneration.
        on_tokens: Called after each batch with the number of generated tokens.
    """

    def __init__(
        self,
        answerer: Answerer,
        tokenizer: PreTrainedTokenizerBase,
        options: RegenerationOptions,
        on_tokens: Callable[[int], None] = lambda count: None,
    ):
        self.answerer, self.tokenizer, self.options, self.on_tokens = answerer, tokenizer, options, on_tokens

    def run(self, rows: Sequence[Mapping[str, Any]], first: int) -> tuple[list[dict], list[dict], Counter[str]]:
        """Regenerates a shard of chats.

        Args:
            rows: Rows of the data.
            first: Index of the first of these rows in the data; rows without an `id` are named by their index.

        Returns:
            Rows to train on; rows that failed or were skipped, with the reason; and counts, in which `success`,
            `error` and `skipped` add up to the number of `rows`.
        """
        chats, lost, counts = [], [], Counter({"success": 0, "error": 0, "skipped": 0})
        for index, row in enumerate(rows, start=first):
            name = str(row.get("id") if row.get("id") is not None else index)
            try:
                chats.append(chat_of(row, name, self.options))
            except ExampleError as error:
                counts["skipped"] += 1
                lost.append({"id": name, "status": "skipped", "problem": str(error)})
        for number, batch in enumerate(self._batches(chats)):
            self._answer(batch, seed=hash((self.options.seed, first, number)) % 2**31)
        for chat in chats:
            if chat.problem is None and not chat.rows:
                chat.problem, chat.skipped = "the assistant is never to speak in this chat", True
            status = "success" if chat.problem is None else "skipped" if chat.skipped else "error"
            counts[status] += 1
            if status != "success":
                lost.append({"id": chat.name, "status": status, "problem": str(chat.problem)})
        generated = [row for chat in chats for row in chat.rows]
        counts["generations"] = len(generated)
        counts["tokens"] = sum(sum(row["loss_mask"]) for row in generated)
        return generated, lost, counts

    def _batches(self, chats: Sequence[Chat]) -> Iterator[list[tuple[Chat, list[int]]]]:
        """Yields batches of prompts with the same temperature and similar lengths. After all due replies have come,
        the chats continue with their next turn."""
        waiting = list(chats)
        while waiting:
            due = [(chat, prompt) for chat in waiting if (prompt := self._next_prompt(chat)) is not None]
            due.sort(key=lambda pair: (pair[0].temperature, len(pair[1])))
            start = 0
            while start < len(due):
                end = start
                while end < min(len(due), start + self.options.batch_size) and (
                    due[end][0].temperature == due[start][0].temperature
                ):
                    end += 1
                yield due[start:end]
                start = end
            waiting = [chat for chat, _ in due if chat.problem is None]

    def _next_prompt(self, chat: Chat) -> list[int] | None:
        """Returns the prompt of the next reply, as serving renders it, in token ids; `None` if no reply is due, or if
        the prompt cannot be rendered or is too long."""
        if not chat.reply_is_due():
            return None
        options = {"tools": chat.tools, "add_generation_prompt": True, **chat.template_kwargs}

        def written(messages: list[Any]) -> str:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))

        try:
            history = as_template_takes(chat.history, written)
            encoded: Any = self.tokenizer.apply_chat_template(history, return_dict=True, **options)
        except Exception as error:  # templates raise errors of any class
            chat.problem, chat.skipped = f"the chat template refuses it: {error}", not chat.rows
            return None
        prompt = list(encoded["input_ids"])
        if len(prompt) + self.options.max_new_tokens > self.options.max_length:
            if not chat.rows:
                chat.skipped = True
                chat.problem = (
                    f"its prompt of {len(prompt)} tokens and max_new_tokens={self.options.max_new_tokens} exceed "
                    f"max_length={self.options.max_length}"
                )
            return None
        return prompt

    def _answer(self, batch: Sequence[tuple[Chat, list[int]]], seed: int) -> None:
        options = self.options
        sampling = Sampling(batch[0][0].temperature, options.max_new_tokens, options.top_p, options.top_k)
        answers = self.answerer.answer([prompt for _, prompt in batch], sampling, seed)
        for (chat, prompt), answer in zip(batch, answers, strict=True):
            if answer.problem is None and not answer.token_ids:
                answer = Answer([], "error", "an empty reply")
            if answer.problem is not None:
                chat.problem = answer.problem
                continue
            message = self.message_of(answer.token_ids)
            chat.rows.append(self._row(chat, prompt, answer, message))
            chat.take_reply(message)
            chat.ended = chat.ended or answer.finish_reason == "length"
        self.on_tokens(sum(len(answer.token_ids) for answer in answers))

    def _row(self, chat: Chat, prompt: list[int], answer: Answer, message: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": f"{chat.name}-{len(chat.rows)}",
            "primary_id": chat.name,
            "input_ids": prompt + answer.token_ids,
            "loss_mask": [0] * len(prompt) + [1] * len(answer.token_ids),
            "conversation": json.dumps([*chat.history, message], ensure_ascii=False),  # for people, not for training
            "finish_reason": answer.finish_reason,
            "temperature": chat.temperature,
        }

    def message_of(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Turns a reply into a message with separate fields for reasoning and tool calls, as chat templates expect."""
        ends = set(self.tokenizer.all_special_ids)
        kept = list(token_ids)
        while kept and kept[-1] in ends:
            kept.pop()
        return parse_reply(str(self.tokenizer.decode(kept)))


def parse_reply(text: str) -> dict[str, Any]:
    """Parses an assistant's text into a message, with `<think>` blocks, `<tool_call>` blocks and gpt-oss's channels in
    fields of their own."""
    message: dict[str, Any] = {"role": "assistant"}
    if channels := CHANNEL.findall(text):
        thought = "".join(part for name, part in channels if name == "analysis")
        message["content"] = "".join(part for name, part in channels if name != "analysis")
        return message | ({"thinking": thought, "reasoning_content": thought} if thought else {})
    before, closed, after = text.partition("</think>")
    if closed:
        reasoning = before.strip().removeprefix("<think>").strip()
        if reasoning:
            message["reasoning_content"] = reasoning
        text = after.lstrip("\n")
    calls = [call for found in TOOL_CALL.findall(text) if (call := _call(found)) is not None]
    if calls:
        message["tool_calls"] = calls
        text = TOOL_CALL.sub("", text).strip()
    return message | {"content": text}


def _call(text: str) -> dict[str, Any] | None:
    try:
        function = json.loads(text)
        return {"type": "function", "function": {"name": function["name"], "arguments": function["arguments"]}}
    except (ValueError, KeyError, TypeError):
        return None
