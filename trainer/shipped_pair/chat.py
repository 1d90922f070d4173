"""The shipped target's chat format: special tokens, the chat template, and the text of an answer.

The system turn switches thinking on, and the target opens its think block itself. Therefore the tokens before an
answer are the same in training and serving, no empty think block is ever supervised, and the beginning of a chat
renders the same way whatever follows.
"""

import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from .tasks import Example

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# Markers are part of an answer's text. They are not special tokens, so that decoding keeps them.
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CHAT_TEMPLATE = """\
{%- set thinking = enable_thinking is defined and enable_thinking -%}
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- if has_system or tools or thinking -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if has_system -%}{{- messages[0].content + '\\n' -}}{%- endif -%}
    {%- if tools -%}
        {{- 'Tools:\\n' -}}
        {%- for tool in tools -%}{{- (tool.function or tool) | tojson + '\\n' -}}{%- endfor -%}
    {%- endif -%}
    {%- if thinking -%}{{- 'Think first.\\n' -}}{%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' -}}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>tool\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- generation -%}
        {%- if thinking and message.reasoning_content -%}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- message.content or '' -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '\\n' if message.content or not loop.first else '' -}}
            {%- set function = call.function or call -%}
            {{- '<tool_call>\\n{"name": ' + function.name | tojson + ', "arguments": ' -}}
            {{- function.arguments | tojson + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>' -}}
        {%- endgeneration -%}
        {{- '\\n' -}}
    {%- elif not (loop.first and message.role == 'system') -%}
        {{- raise_exception('a ' + message.role + ' message cannot stand there; system goes first') -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def answer_text(message: Mapping[str, Any], thinking: bool = False) -> str:
    """Returns the text that the target has to generate for an assistant message, without its end of turn."""
    text = message["content"] or ""
    for call in message.get("tool_calls") or []:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        name = json.dumps(call["function"]["name"], ensure_ascii=False)
        text += ("\n" if text else "") + f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
    if thinking and message.get("reasoning_content"):
        return f"<think>\n{message['reasoning_content']}\n</think>\n\n{text}"
    return text


def chat_tokens(example: Example, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Returns the token ids of a whole chat, and its loss mask: 1 at tokens the assistant generates, ends of turn
    included."""
    encoded = tokenizer.apply_chat_template(
        example.messages,
        tools=example.tools,
        enable_thinking=example.thinking,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return list(encoded["input_ids"]), list(encoded["assistant_masks"])


def prompt_tokens(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the token ids before the answer."""
    encoded = tokenizer.apply_chat_template(
        example.prompt,
        tools=example.tools,
        enable_thinking=example.thinking,
        add_generation_prompt=True,
        return_dict=True,
    )
    return list(encoded["input_ids"])
