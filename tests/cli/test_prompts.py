"""Files of prompts: texts, and chats that are put to the target as training data are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from hf_specheads.cli import main
from hf_specheads.cli.prompts import AskedChat, read_prompts, texts_of
from hf_specheads.trainer.data.answering import TargetInProcess
from hf_specheads.trainer.regenerate import main as regenerate

USER = {"role": "user", "content": "w5 w6"}
TOOL = {"type": "function", "function": {"name": "w8", "parameters": {}}}
# Whatever a row tells it is in the prompt.
TEMPLATE = (
    "{% for m in messages %}w3 {{ m['content'] }} {% endfor %}"
    "{% for tool in tools or [] %}w4 {{ tool.function.name }} {% endfor %}"
    "{% if enable_thinking %}w9 {% endif %}{% if add_generation_prompt %}w7{% endif %}"
)
ROWS = [
    {"messages": [USER]},
    {"messages": [USER], "tools": [TOOL]},
    {
        "messages": [USER],
        "tools": json.dumps([TOOL]),
        "chat_template_kwargs": {"enable_thinking": True, "other": None},
    },
    {"messages": [USER, {"role": "assistant", "content": "w20"}]},
    {"prompt": [USER], "tools": "[]"},
]
ASKED = ["w3 w5 w6 w7", "w3 w5 w6 w4 w8 w7", "w3 w5 w6 w4 w8 w9 w7", "w3 w5 w6 w7", "w3 w5 w6 w7"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_prompt_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one prompt\nof two lines")
    messages = [{"role": "user", "content": "hi"}]
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "x"}) + "\n\n" + json.dumps({"messages": messages}) + "\n")
    assert read_prompts([tmp_path / "a.txt", tmp_path / "b.jsonl"]) == ["one prompt\nof two lines", "x", messages]
    for content, words in (('{"question": 1}', "line 1 needs"), ("{", "not valid JSON"), ("", "non-empty prompts")):
        (tmp_path / "c.jsonl").write_text(content)
        with pytest.raises(ValueError, match=words):
            read_prompts([tmp_path / "c.jsonl"])
    (tmp_path / "d.jsonl").write_text('{"text": "x"}', encoding="utf-8-sig")
    assert read_prompts([tmp_path / "d.jsonl"]) == ["x"]
    (tmp_path / "e.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"e\.txt is not a text in UTF-8"):
        read_prompts([tmp_path / "e.txt"])
    (tmp_path / "f.json").write_text('[{"prompt": "a"}, {"prompt": "b"}]')
    with pytest.raises(ValueError, match=r"f\.json would be read as one prompt"):
        read_prompts([tmp_path / "f.json"])


def test_chats_are_asked_as_their_rows_say(rows: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = TEMPLATE
    prompts = read_prompts([rows])
    assert prompts[0] == prompts[3] == prompts[4] == [USER]  # up to the answer
    assert prompts[1] == AskedChat([USER], {"tools": [TOOL]})
    texts = texts_of(prompts, tokenizer)
    assert texts[0] == [USER]
    assert [tokenizer.decode(text) for text in texts[1:3]] == ASKED[1:3]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": []}, "a chat without a message to answer"),
        ({"messages": [{"role": "assistant", "content": "w20"}]}, "a chat without a message to answer"),
        ({"messages": [{"from": "human", "value": "w5"}]}, "is not a chat: every message needs a `role`"),
        ({"messages": [USER], "tools": "w8"}, "is not a chat: `tools` are neither a list nor JSON"),
    ],
)
def test_what_is_no_chat(row: dict, words: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "x"}) + "\n" + json.dumps(row))
    with pytest.raises(ValueError, match=f"line 2 .*{words}"):
        read_prompts([tmp_path / "rows.jsonl"])


def test_heads_are_measured_on_the_prompts_that_data_are_regenerated_from(
    rows: Path, target, poss_heads, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch, capsys
) -> None:
    """`eval`, `bench` and `tune` ask what `regenerate` asked, row by row."""
    tokenizer.chat_template = TEMPLATE
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    poss_heads.save_pretrained(tmp_path / "heads")
    asked: list[str] = []
    answer = TargetInProcess.answer

    def recorded(self, prompts, *args):
        asked.extend(map(tokenizer.decode, prompts))
        return answer(self, prompts, *args)

    monkeypatch.setattr(TargetInProcess, "answer", recorded)
    common = ["--target", str(tmp_path / "target"), "--max-new-tokens", "4"]
    assert regenerate([*common, "--data", str(rows), "--out", str(tmp_path / "out"), "--quiet", "--debug"]) == 0
    assert sorted(asked) == sorted(ASKED)

    put: list[str] = []
    generate = type(target).generate

    def seen(self, *args, **kwargs):
        put.append(tokenizer.decode(kwargs["input_ids"][0]))
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(target), "generate", seen)
    heads, limit = str(tmp_path / "heads"), ["--limit", "3"]
    prompts = ["--prompts", str(rows), "--quiet"]
    for words in (
        ["eval", "--heads", heads, *common, *prompts],
        ["bench", "--heads", heads, *common, *prompts, "--repeats", "1"],
        ["tune", heads, *common, *prompts, *limit, "--repeats", "1", "--dry-run"],
    ):
        put.clear()
        assert main(words) == 0
        assert set(put) == set(ASKED), words
    capsys.readouterr()
