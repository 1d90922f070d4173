"""Which tokens of a chat are supervised, for templates of the shape the well-known families have, without markers.

Expected rows are written as text, with what is supervised in `[ ]`.
"""

from __future__ import annotations

import json

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_specheads.texts import chat_token_ids
from hf_specheads.trainer.data.chats import ExampleError, chat_problem, tokenize_chat

SPECIAL = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|start_header_id|>", "<|eot_id|>",
           "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<|start|>", "<|end|>",
           "<|return|>", "<|channel|>", "<|message|>", "<|User|>", "<|Assistant|>", "<|user|>",
           "<|assistant|>"]  # fmt: skip

# Reasoning stays only after the last user turn; a reply after it always has a think block; switched off, the prompt
# brings an empty one.
QWEN3 = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > ns.last -%}
      {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- m.content + '<|im_end|>\\n' -}}
  {%- else -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""
LLAMA3 = """\
{{- '<bos>' -}}
{%- for m in messages -%}
  {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif -%}"""
GEMMA = """\
{{- '<bos>' -}}
{%- for m in messages -%}
  {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim -}}
  {{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif -%}"""
MISTRAL = """\
{{- '<bos>' -}}
{%- for m in messages -%}
  {%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
  {%- else %}{{ ' ' + m.content + '<eos>' }}{% endif -%}
{%- endfor -%}"""
# The last reply ends with another token than earlier ones, whose analysis is dropped.
GPT_OSS = """\
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- if m.thinking and loop.last -%}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}
    {%- endif -%}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') -}}
  {%- else -%}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif -%}"""
# The prompt opens the think block, and what is past has lost it.
DEEPSEEK = """\
{{- '<bos>' -}}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{- '<|User|>' + m.content -}}
  {%- else -%}{{- '<|Assistant|>' + m.content.split('</think>')[-1] + '<eos>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif -%}"""
# Earlier replies have an empty think block, and no token ends a turn.
GLM = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{{- '<|user|>\\n' + m.content -}}
  {%- else -%}
    {%- set kept = (m.reasoning_content or '') if loop.index0 > ns.last else '' -%}
    {{- '<|assistant|>\\n<think>' + kept + '</think>\\n' + m.content -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' + ('\\n<think></think>' if enable_thinking is defined and not enable_thinking else '') -}}
{%- endif -%}"""


@pytest.fixture(scope="module")
def characters() -> PreTrainedTokenizerFast:
    """One token per character, and one per special token."""
    core = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", bos_token="<bos>", eos_token="<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    return tokenizer


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def said(content: str, **fields) -> dict:
    return {"role": "assistant", "content": content, **fields}


def rows(tokenizer, template: str, messages: list[dict], **kwargs) -> list[str]:
    """Rows as text, with what is supervised in `[ ]` (which stands nowhere else but in Mistral's markers)."""
    tokenizer.chat_template = template
    texts = []
    for ids, mask in tokenize_chat(messages, tokenizer, template_kwargs=kwargs):
        text, inside = "", 0
        for token, supervised in zip(ids, mask, strict=True):
            if supervised != inside:
                text, inside = text + ("[" if supervised else "]"), supervised
            text += tokenizer.decode([token])
        texts.append(text + "]" * inside)
    return texts


TWO_TURNS = [user("q"), said("a"), user("r"), said("b")]
THOUGHT = [user("q"), said("a", reasoning_content="x"), user("r"), said("b", reasoning_content="y")]


def test_llama_3(characters) -> None:
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    u, a = head.format("user"), head.format("assistant")
    assert rows(characters, LLAMA3, TWO_TURNS) == [
        f"<bos>{u}q<|eot_id|>{a}[a<|eot_id|>]{u}r<|eot_id|>{a}[b<|eot_id|>]"
    ]


def test_gemma(characters) -> None:
    u, a = "<start_of_turn>user\n", "<start_of_turn>model\n"
    assert rows(characters, GEMMA, TWO_TURNS) == [
        f"<bos>{u}q<end_of_turn>\n{a}[a<end_of_turn>]\n{u}r<end_of_turn>\n{a}[b<end_of_turn>]\n"
    ]


def test_mistral(characters) -> None:
    assert rows(characters, MISTRAL, TWO_TURNS) == ["<bos>[INST] q [/INST][ a<eos>][INST] r [/INST][ b<eos>]"]


def test_qwen3_thinking_renders_every_reply_as_serving_would(characters) -> None:
    """The first reply with its reasoning, which the second one's prompt has no more."""
    first = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    second = f"{first}a<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    assert rows(characters, QWEN3, THOUGHT) == [
        f"{first}[<think>\nx\n</think>\n\na<|im_end|>]\n",
        f"{second}[<think>\ny\n</think>\n\nb<|im_end|>]\n",
    ]


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_qwen3_without_thinking_supervises_no_empty_block(characters, kwargs) -> None:
    first = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    second = f"{first}a<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
    empty = "<think>\n\n</think>\n\n"
    assert rows(characters, QWEN3, TWO_TURNS, **kwargs) == [
        f"{first}{empty}[a<|im_end|>]\n", f"{second}{empty}[b<|im_end|>]\n"
    ]  # fmt: skip


def test_qwen3_in_one_turn_with_tool_results_is_one_row(characters) -> None:
    chat = [
        user("q"),
        said("c", reasoning_content="x"),
        {"role": "tool", "content": "t"},
        said("b", reasoning_content="y"),
    ]
    [row] = rows(characters, QWEN3, chat)
    assert row.count("[<think>\n") == 2 and "x\n</think>\n\nc<|im_end|>]\n<|im_start|>tool\nt<|im_end|>\n" in row


def test_gpt_oss(characters) -> None:
    chat = [user("q"), said("a", thinking="x"), user("r"), said("b", thinking="y")]
    u, final = "<|start|>user<|message|>{}<|end|>", "<|channel|>final<|message|>"
    analysis = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
    first = u.format("q") + "<|start|>assistant"
    second = f"{first}{final}a<|end|>{u.format('r')}<|start|>assistant"
    assert rows(characters, GPT_OSS, chat) == [
        f"{first}[{analysis.format('x')}{final}a<|return|>]", f"{second}[{analysis.format('y')}{final}b<|return|>]"
    ]  # fmt: skip


def test_deepseek_thinks_after_a_prompt_that_opens_the_block(characters) -> None:
    chat = [user("q"), said("<think>x</think>\n\na"), user("r"), said("b", reasoning_content="y")]
    written = rows(characters, DEEPSEEK, chat)
    assert written == [
        "<bos><|User|>q<|Assistant|><think>\n[x\n</think>\n\na<eos>]",
        "<bos><|User|>q<|Assistant|>\n\na<eos><|User|>r<|Assistant|><think>\n[y\n</think>\n\nb<eos>]",
    ]
    assert rows(characters, DEEPSEEK, TWO_TURNS)[0] == "<bos><|User|>q<|Assistant|><think>\n\n</think>\n\n[a<eos>]"


def test_glm(characters) -> None:
    assert rows(characters, GLM, THOUGHT) == [
        "<|user|>\nq<|assistant|>[\n<think>x</think>\na]",
        "<|user|>\nq<|assistant|>\n<think></think>\na<|user|>\nr<|assistant|>[\n<think>y</think>\nb]",
    ]
    one_row = "<|user|>\nq<|assistant|>\n<think></think>\n[a]<|user|>\nr<|assistant|>\n<think></think>\n[b]"
    assert rows(characters, GLM, TWO_TURNS) == [one_row]


def test_markers_that_forget_reasoning_give_one_row_per_reply(characters) -> None:
    marked = QWEN3.replace("{%- if loop.index0 > ns.last -%}", "{%- generation -%}{%- if loop.index0 > ns.last -%}")
    marked = marked.replace("{{- m.content + '<|im_end|>\\n' -}}\n  {%- else", "{{- m.content + '<|im_end|>' -}}"
                            "{%- endgeneration -%}{{- '\\n' -}}\n  {%- else")  # fmt: skip
    assert rows(characters, marked, THOUGHT) == rows(characters, QWEN3, THOUGHT)


# How templates write the arguments of a call: JSON of an object; as they are; joined to a string; either; by name.
CALLS = {
    "Qwen2.5, Llama 3.1": "{{- call.function.arguments | tojson -}}",
    "as they are": "{{- call.function.arguments -}}",
    "DeepSeek V3": "{{- '' + call.function.arguments -}}",
    "Qwen3": "{{- call.function.arguments if call.function.arguments is string "
             "else call.function.arguments | tojson -}}",
    "GLM, Qwen3-Coder": "{%- for k, v in call.function.arguments.items() -%}"
                        "<{{ k }}>{{ v if v is string else v | tojson }}</{{ k }}>{%- endfor -%}",
}  # fmt: skip
CALLING = """\
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\\n' + (m.content or '') -}}
  {%- for call in m.tool_calls or [] -%}{{- call.function.name + '(' -}}WRITTEN{{- ')' -}}{%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""
CITY = {"city": "Rome", "when": {"day": "Monday"}}


def calling(arguments: object) -> list[dict]:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [user("q"), said(None, tool_calls=[call]), {"role": "tool", "content": "sun"}, said("Sunny.")]


@pytest.mark.parametrize("given", [CITY, json.dumps(CITY)], ids=["an object", "JSON"])
@pytest.mark.parametrize("family", CALLS)
def test_arguments_of_calls_are_json_once(characters, family, given) -> None:
    template, messages = CALLING.replace("WRITTEN", CALLS[family]), calling(given)
    written = '<city>Rome</city><when>{"day": "Monday"}</when>' if "GLM" in family else json.dumps(CITY)
    (row,) = rows(characters, template, messages)
    assert f"[weather({written})<|im_end|>]" in row
    prompt = "".join(map(characters.decode, chat_token_ids(messages[:3], characters)))
    assert f"weather({written})<|im_end|>" in prompt and prompt.endswith("<|im_start|>assistant\n")
    assert messages == calling(given), "what was given is left alone"


@pytest.mark.parametrize("given", ["{no json", "[1]", "", {}])
def test_arguments_that_are_no_object_stay_as_they_are(characters, given) -> None:
    """`tojson` is all that writes them, in whatever way it does."""
    (row,) = rows(characters, CALLING.replace("WRITTEN", CALLS["Qwen2.5, Llama 3.1"]), calling(given))
    assert f"[weather({json.dumps(given)})<|im_end|>]" in row


def in_parts(messages: list[dict]) -> list[dict]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


# Templates that take strings alone, the last of which leaves parts out.
FOR_STRINGS = {
    "Qwen3": QWEN3, "Llama 3": LLAMA3, "Gemma": GEMMA, "Mistral": MISTRAL, "gpt-oss": GPT_OSS, "DeepSeek": DEEPSEEK,
    "GLM": GLM, "leaves out": LLAMA3.replace("m.content | trim", "(m.content if m.content is string else '')"),
}  # fmt: skip


@pytest.mark.parametrize("family", FOR_STRINGS)
@pytest.mark.parametrize("chat", [TWO_TURNS, THOUGHT], ids=["said", "thought"])
def test_a_content_in_parts_is_that_of_a_string(characters, family, chat) -> None:
    template = FOR_STRINGS[family]
    assert rows(characters, template, in_parts(chat)) == rows(characters, template, chat)
    asked = chat[:3]
    assert chat_token_ids(in_parts(asked), characters) == chat_token_ids(asked, characters)


def test_parts_stay_parts_where_the_template_reads_them(characters) -> None:
    template = LLAMA3.replace("m.content | trim", "('<' + m.content[0].text + '>' if m.content is not string else '')")
    (row,) = rows(characters, template, in_parts([user("q"), said("a")]))
    assert "<q>" in row and "[<a><|eot_id|>]" in row


READS_PARTS = "(m.content[0].text FILTER if m.content is not string else '')"


CHANGED = {
    "| upper": "WHAT'S UP?",
    "| replace(' ', '_')": "What's_up?",
    '| replace("\'", "&quot;")': "What&quot;s up?",
}


@pytest.mark.parametrize(("change", "written"), CHANGED.items(), ids=str)
def test_parts_in_words_that_a_template_changes(characters, change, written) -> None:
    """The form of one string, in which this template leaves them out, is no better."""
    template, question = LLAMA3.replace("m.content | trim", READS_PARTS.replace("FILTER", change)), "What's up?"
    (row,) = rows(characters, template, in_parts([user(question), said("a")]))
    assert written in row
    prompt = "".join(map(characters.decode, chat_token_ids(in_parts([user(question)]), characters)))
    assert written in prompt


def test_questions_that_a_template_leaves_out_in_every_form(characters) -> None:
    """What it writes is still in the form that it takes."""
    template = LLAMA3.replace("m.content | trim", "('' if loop.first else m.content | string)")
    (row,) = rows(characters, template, in_parts([user("q"), said("a")]))
    assert "[a<|eot_id|>]" in row and "q" not in row


@pytest.mark.parametrize("question", ["What's up?", "?!"])
def test_strings_in_words_that_a_template_changes(characters, question) -> None:
    """Parts written in Python's way are told from words in capitals."""
    template = LLAMA3.replace("m.content | trim", "m.content | string | upper")
    (row,) = rows(characters, template, in_parts([user(question), said("a")]))
    assert f"\n{question.upper()}<|eot_id|>" in row


def test_several_parts_are_lines(characters) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (row,) = rows(characters, LLAMA3, [{"role": "user", "content": parts}, said("c")])
    assert "a\nb<|eot_id|>" in row


def test_calls_that_no_template_reads(characters) -> None:
    """The reason is the template's own."""
    template = CALLING.replace("WRITTEN", "{{ raise_exception('one call at a time') }}")
    with pytest.raises(ExampleError, match="one call at a time"):
        rows(characters, template, calling(json.dumps(CITY)))


def test_templates_and_chats_that_cannot_be_read(characters) -> None:
    for template, chat, words in (
        ("{{ messages[5].content }}{{ raise_exception('no') }}", TWO_TURNS, "refuses a chat"),
        ("{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}", TWO_TURNS, "cannot be identified"),
        (LLAMA3, [{"content": "x"}], "must be a list of {role, content}"),
        (LLAMA3, [user("q"), said(None)], "got .*'content': None"),
    ):
        with pytest.raises(ExampleError, match=words):
            rows(characters, template, chat)
    assert rows(characters, LLAMA3, [user("q")]) == []


def test_chats_with_images_are_refused():
    """A template would write a placeholder where training has no picture: a processor is asked for."""
    content = [{"type": "image", "url": "a.png"}, {"type": "text", "text": "what is it?"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "a house"}]
    assert chat_problem(messages).startswith("images, which the target's processor")
    assert "parts of type ['audio']" in chat_problem([{"role": "user", "content": [{"type": "audio"}]}])
    assert chat_problem([{"role": "user", "content": content[1:]}, messages[1]]) is None
