"""Turns chats into token ids, and marks the tokens that the target itself would have generated.

A chat becomes one row if its template renders every turn the same way whatever follows. Otherwise it becomes one row
per reply, each rendered as serving would render it at that turn (Qwen3, DeepSeek-R1, GLM and gpt-oss drop earlier
reasoning). A reply consists of the text that its rendering adds to the rendered prompt:

    prompt    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    reply     <think>\\nA greeting.\\n</think>\\n\\nHello.<|im_end|>

Text that serving inserts is not supervised: an empty think block (thinking switched off), and line breaks after the
end of a turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils.chat_template_utils import render_jinja_template

from hf_specheads.texts import as_template_takes

Written = TypeVar("Written")  # messages, tools, or a value inside them
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
EMPTY_THINKING = re.compile(r"\s*<think>\s*</think>\s*")
THINKING = re.compile(r"\s*(?:<think>(?P<inside>.*?))?</think>\s*", re.DOTALL)
PROMPTED_THINKING = re.compile(r"<think>\s*(?:</think>\s*)?\Z")  # open or empty think block at the end of a prompt
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

Row = tuple[list[int], list[int]]  # token ids, loss mask


class ExampleError(ValueError):
    """An example or a chat template whose supervised tokens cannot be determined."""


@dataclass(frozen=True)
class Segment:
    """A piece of a rendered chat.

    Attributes:
        text: Rendered text, special tokens included.
        generated: Whether the target generates this text.
    """

    text: str
    generated: bool


def chat_problem(messages: object, images: bool = False) -> str | None:
    """Returns what is wrong with the messages of a chat, `None` if nothing is; `images` allows image parts."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return f"{messages!r}"
    wrong = (message for message in messages if not _is_message(message))
    if (
        problem := next((f"{message!r}" for message in wrong), None if len(messages) else "an empty list")
    ) is not None:
        return problem
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    kinds = {str(part.get("type")) for part in parts if isinstance(part, Mapping)} - {"text"}
    if images:
        kinds -= {"image"}
    if not kinds:
        return None
    if kinds == {"image"}:
        return "images, which the target's processor (AutoProcessor) reads; pass it as `processing_class`"
    return f"parts of type {sorted(kinds)}, and draft heads are trained on text and images"


def _is_message(message: Any) -> bool:
    """Whether a message has a role, and content or tool calls; templates would render a missing content as "None"."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    return message.get("content") is not None or bool(message.get("tool_calls"))


def tokenize_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: list | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    supervised_from: int = 0,
) -> list[Row]:
    """Turns a chat into token ids and loss masks, 1 at the tokens the assistant generates, its end of turn included.

    Args:
        messages: List of `{role, content}`, with `reasoning_content` and `tool_calls` if the template reads them.
        tokenizer: Tokenizer with a chat template.
        tools: Functions the assistant may call.
        template_kwargs: Arguments for the template, e.g. `enable_thinking`.
        supervised_from: Index of the first message whose reply may be supervised.

    Returns:
        One row, or one row per reply for templates that render a reply differently once more messages follow.

    Raises:
        ExampleError: for invalid messages, a template that refuses them, or a template that does not render a reply
            right after its prompt.
    """
    if problem := chat_problem(messages):
        raise ExampleError(f"every `messages` of the data must be a list of {{role, content}}; got {problem}.")
    template = tokenizer.get_chat_template(tools=tools) if tokenizer.chat_template else None
    if template is None:
        raise ExampleError(
            f"{type(tokenizer).__name__} has no chat template, so `messages` cannot be tokenized; set "
            "`tokenizer.chat_template`, or use a `text` column."
        )
    kwargs, tools = dict(template_kwargs or {}), without_missing(tools)
    render = partial(_render, tokenizer, tools, kwargs)
    messages = as_template_takes([without_missing(message) for message in messages], render)
    replies = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= supervised_from]
    if not replies:
        return []
    if GENERATION_MARKER.search(template):
        return _marked_rows(messages, replies, tokenizer, tools, kwargs, render)
    return [encode(segments, tokenizer) for segments in _unmarked(messages, replies, render)]


def chat_segments(
    messages: Sequence[Mapping[str, Any]],
    processor: ProcessorMixin,
    tools: list | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[list[Segment]]:
    """Renders a chat with images into the rows that [`tokenize_chat`] would make of it, as segments marked as
    supervised or not. Images appear as the text that the template writes for them.

    Raises:
        ExampleError: as [`tokenize_chat`].
    """
    if problem := chat_problem(messages, images=True):
        raise ExampleError(f"every `messages` of the data must be a list of {{role, content}}; got {problem}.")
    template: Any = getattr(processor, "chat_template", None)
    if not template:
        raise ExampleError(f"{type(processor).__name__} has no chat template; set `processor.chat_template`.")
    template = template["default"] if isinstance(template, Mapping) else template
    kwargs, tools = dict(template_kwargs or {}), without_missing(tools)
    render = partial(_render, processor, tools, kwargs)
    messages = as_template_takes([without_missing(message) for message in messages], render)
    replies = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not replies:
        return []
    tokenizer: PreTrainedTokenizerBase = processor.tokenizer  # type: ignore[attr-defined]
    if not GENERATION_MARKER.search(template):
        rows = _unmarked(messages, replies, render)
        return [[part for segment in row for part in _generated_part(segment, tokenizer)] for row in rows]
    given = {**tokenizer.special_tokens_map, **kwargs, "tools": tools, "chat_template": template}
    spans = partial(_marked_segments, given=given)
    text = render(messages)
    if all(text.startswith(render(messages[: index + 1])) for index in replies if index + 1 < len(messages)):
        return [spans(messages)]
    return [spans(messages[: index + 1], len(render(messages[:index], prompt=True))) for index in replies]


def _marked_segments(
    messages: Sequence[Mapping[str, Any]], supervised_from: int = 0, *, given: Mapping[str, Any]
) -> list[Segment]:
    """Splits a chat at the generation markers of its template; text before the character `supervised_from` is not
    supervised."""
    try:
        texts, places = render_jinja_template([list(messages)], return_assistant_tokens_mask=True, **given)
    except Exception as error:
        raise ExampleError(f"the chat template refuses a chat: {error}") from error
    segments, end = [], 0
    for start, stop in places[0]:
        segments += [Segment(texts[0][end:start], False), Segment(texts[0][start:stop], start >= supervised_from)]
        end = stop
    return [*segments, Segment(texts[0][end:], False)]


def without_missing(value: Written) -> Written:
    """Removes fields that are `None` from messages or tools. Columnar data sets give every mapping the fields of all
    mappings, `None` where a field was missing, and templates would render these."""
    if isinstance(value, Mapping):
        kept = {name: without_missing(item) for name, item in value.items() if item is not None or name == "content"}
        return cast(Written, kept)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return cast(Written, [without_missing(item) for item in value])
    return value


def _render(
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    tools: list | None,
    kwargs: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    prompt: bool = False,
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt, **kwargs
        )
    except Exception as error:  # templates raise errors of any class, e.g. jinja's, or TypeError for a missing content
        raise ExampleError(f"the chat template refuses a chat: {error}") from error
    return str(text)


# ---------------------------------------------------------------------- templates with markers
def _marked_rows(
    messages: Sequence[Mapping[str, Any]],
    replies: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    tools: list | None,
    kwargs: Mapping[str, Any],
    render: Callable[..., str],
) -> list[Row]:
    """Makes rows with the template's own generation markers: one row, or one per reply if the template drops the
    reasoning of earlier turns."""

    def marked(upto: int) -> Row:
        try:
            encoded: Any = tokenizer.apply_chat_template(
                list(messages[:upto]), tools=tools, return_dict=True, return_assistant_tokens_mask=True, **kwargs
            )
        except Exception as error:
            raise ExampleError(f"the chat template refuses a chat: {error}") from error
        return list(encoded["input_ids"]), list(encoded["assistant_masks"])

    if replies[0] == next(i for i, m in enumerate(messages) if m["role"] == "assistant"):
        text = render(messages)
        earlier = [render(messages[: index + 1]) for index in replies if index + 1 < len(messages)]
        if all(text.startswith(beginning) for beginning in earlier):
            return [marked(len(messages))]
    rows = []
    for index in replies:
        ids, mask = marked(index + 1)
        prompt = len(tokenizer(render(messages[:index], prompt=True), add_special_tokens=False)["input_ids"])
        rows.append((ids, [0] * min(prompt, len(ids)) + mask[prompt:]))
    return rows


# ---------------------------------------------------------------------- templates without markers
def _unmarked(
    messages: Sequence[Mapping[str, Any]], replies: Sequence[int], render: Callable[..., str]
) -> list[list[Segment]]:
    """Makes one row, or one per reply, with a template that has no generation markers."""
    turns = [_reply(messages, index, render) for index in replies]
    whole = _joined(turns, render(messages))
    return [whole] if whole is not None else list(map(_as_segments, turns))


@dataclass(frozen=True)
class _Reply:
    """One reply: its prompt as serving renders it, and the text that follows in the rendered chat, end of turn
    included."""

    prompt: str
    text: str
    natural: bool  # whether rendering the chat up to this reply gives exactly prompt + text


def _reply(messages: Sequence[Mapping[str, Any]], index: int, render: Callable[..., str]) -> _Reply:
    prompt, upto = render(messages[:index], prompt=True), render(messages[: index + 1])
    if upto.startswith(prompt):
        return _Reply(prompt, upto[len(prompt) :], natural=True)
    base = PROMPTED_THINKING.sub("", prompt)
    if base == prompt or not upto.startswith(base):
        raise ExampleError(
            f"the chat template does not render the reply in message {index} right after its prompt, so the tokens of "
            "the reply cannot be identified; wrap the assistant's text in {% generation %} ... {% endgeneration %} in "
            "`tokenizer.chat_template`."
        )
    # Serving opens the think block in the prompt, but the template drops it from past replies.
    visible, found = upto[len(base) :], THINKING.match(upto[len(base) :])
    reasoning = reasoning_of(messages[index]) or ((found["inside"] or "").strip() if found else "")
    visible = visible[found.end() if found else 0 :].lstrip("\n")
    if "</think>" in prompt[len(base) :]:  # the prompt has an empty think block: thinking is switched off
        return _Reply(prompt, visible, natural=False)
    if not reasoning:
        return _Reply(f"{prompt.rstrip()}\n\n</think>\n\n", visible, natural=False)
    return _Reply(prompt, f"{reasoning}\n</think>\n\n{visible}", natural=False)


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """Returns the reasoning of an assistant message, from a reasoning field or from a think block in its content."""
    for name in REASONING_FIELDS:
        if isinstance(message.get(name), str):
            return str(message[name]).strip()
    found = THINKING.match(message.get("content") or "") if isinstance(message.get("content"), str) else None
    return (found["inside"] or "").strip() or None if found else None


def _joined(turns: Sequence[_Reply], whole: str) -> list[Segment] | None:
    """Joins all replies into one row; `None` if the template renders one of them differently once more messages
    follow."""
    segments, end = [], 0
    for turn in turns:
        start, stop = len(turn.prompt), len(turn.prompt) + len(turn.text)
        if not turn.natural or start < end or whole[:stop] != turn.prompt + turn.text:
            return None
        segments += [Segment(whole[end:start], False), Segment(whole[start:stop], True)]
        end = stop
    return segments  # text after the last reply holds no supervised token, so it is left out


def _as_segments(turn: _Reply) -> list[Segment]:
    return [Segment(turn.prompt, False), Segment(turn.text, True)]


def encode(segments: Sequence[Segment], tokenizer: PreTrainedTokenizerBase) -> Row:
    """Tokenizes a rendered chat into token ids and loss mask: as one text if the tokenizer reports token offsets, else
    segment by segment."""
    segments = [part for segment in segments for part in _generated_part(segment, tokenizer)]
    if not tokenizer.is_fast:
        pairs = [(tokenizer(s.text, add_special_tokens=False)["input_ids"], s.generated) for s in segments]
        return [i for ids, _ in pairs for i in ids], [int(made) for ids, made in pairs for _ in ids]
    text = "".join(segment.text for segment in segments)
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    bounds, start = [], 0
    for segment in segments:
        bounds.append((start, start + len(segment.text), segment.generated))
        start += len(segment.text)
    mask, place = [], 0
    for first, last in encoded["offset_mapping"]:
        while place + 1 < len(bounds) and first >= bounds[place][1]:
            place += 1
        mask.append(int(bounds[place][2] and first < last))  # a token belongs to the segment it begins in
    return list(encoded["input_ids"]), mask


def _generated_part(segment: Segment, tokenizer: PreTrainedTokenizerBase) -> list[Segment]:
    """Splits off what serving inserts: an empty think block before a reply, and line breaks after its end of turn."""
    if not segment.generated:
        return [segment]
    text, before = segment.text, ""
    if found := EMPTY_THINKING.match(text):
        before, text = text[: found.end()], text[found.end() :]
    kept = text.rstrip()
    if kept == text or not kept.endswith(_end_tokens(tokenizer)):
        kept = text
    return [Segment(before, False), Segment(kept, True), Segment(text[len(kept) :], False)]


def _end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Returns the tokenizer's special and added tokens, one of which ends a turn."""
    return tuple({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()})
