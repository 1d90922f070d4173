"""Chats written anew: by the target in this process, and by a server."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support import completions_server as _server
from support.tokenizers import byte_tokenizer

from hf_specheads.trainer.data.regeneration import Chat, RegenerationOptions, Regenerator, parse_reply
from hf_specheads.trainer.regenerate import main

from .conftest import make_heads

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% if m['role'] == 'assistant' %}</s> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"
)


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def said(content: str, **fields) -> dict:
    return {"role": "assistant", "content": content, **fields}


CHATS = [
    {"messages": [user("w0 w1"), said("recorded"), user("w2"), said("recorded")]},
    {"messages": [user("w3 w4 w5")]},
    {"messages": [said("nobody asks")]},
    {"messages": [user("w6"), said("recorded"), user("w52")]},  # token 60
    {"messages": [user("w7 w8")]},
]


@pytest.fixture
def pair(tmp_path: Path, target, tokenizer) -> list[str]:
    """A saved target and prompts, as arguments."""
    tokenizer.chat_template = TEMPLATE
    target.generation_config.eos_token_id = [2, *range(9, 99, 4)]  # so that random replies end
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    return ["--target", str(tmp_path / "target"), "--data", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "6",
            "--max-length", "64", "--rows-per-shard", "2", "--quiet", "--debug"]  # fmt: skip


def read(folder: Path) -> list[dict]:
    files = sorted(folder.glob("shard-?????.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def counts_of(capsys) -> dict:
    counts = json.loads(capsys.readouterr().out)
    assert counts["success"] + counts["error"] + counts["skipped"] == counts["rows"]
    return counts


def test_every_turn_follows_the_targets_own(pair, tmp_path: Path, target, tokenizer, capsys) -> None:
    out = tmp_path / "out"
    assert main([*pair, "--out", str(out), "--json"]) == 0
    counts = counts_of(capsys)
    assert (counts["rows"], counts["success"], counts["skipped"], counts["generations"]) == (5, 4, 1, 6)
    rows = {row["id"]: row for row in read(out)}
    assert set(rows) == {"0-0", "0-1", "1-0", "3-0", "3-1", "4-0"}
    for row in rows.values():
        prompt = row["loss_mask"].index(1)
        plain = target.generate(torch.tensor([row["input_ids"][:prompt]]), do_sample=False, max_new_tokens=6,
                                attention_mask=torch.ones(1, prompt, dtype=torch.long), pad_token_id=0)  # fmt: skip
        assert row["input_ids"] == plain[0].tolist()  # batched, padded, and still what it says alone
        assert set(row["loss_mask"][prompt:]) == {1}
    first, second = rows["0-0"]["input_ids"], rows["0-1"]["input_ids"]
    end = len(first) - (first[-1] == 2)
    assert second[:end] == first[:end]  # the target's own words, not the recorded ones
    assert rows["0-0"]["finish_reason"] == "stop"
    lost = [json.loads(line) for line in (out / "shard-00001.lost.jsonl").read_text().splitlines()]
    assert lost == [
        {
            "id": "2",
            "status": "skipped",
            "problem": "no message of this chat is from a user or a tool, so there is nothing to answer",
        }
    ]


def test_heads_make_it_faster_and_leave_the_text(pair, tmp_path: Path, target, capsys) -> None:
    make_heads(target).save_pretrained(tmp_path / "heads")
    main([*pair, "--out", str(tmp_path / "plain"), "--json"])
    main([*pair, "--out", str(tmp_path / "with"), "--json", "--heads", str(tmp_path / "heads")])
    assert read(tmp_path / "plain") == read(tmp_path / "with")


def test_it_goes_on_where_it_stopped(pair, tmp_path: Path, capsys, monkeypatch) -> None:
    from hf_specheads.trainer.data.answering import TargetInProcess

    whole, out = tmp_path / "whole", tmp_path / "out"
    sampled = [*pair, "--temperature", "0", "0.7", "1.0", "--json"]
    main([*sampled, "--out", str(whole)])
    kept, asked = TargetInProcess.answer, []

    def stopped(self, *args, **kwargs):
        asked.append(args)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return kept(self, *args, **kwargs)

    monkeypatch.setattr(TargetInProcess, "answer", stopped)
    assert main([*sampled, "--out", str(out)]) == 130
    assert 0 < len(read(out)) < len(read(whole))
    monkeypatch.setattr(TargetInProcess, "answer", kept)
    assert main([*sampled, "--out", str(out)]) == 0
    assert read(out) == read(whole)
    assert len({row["temperature"] for row in read(out)}) > 1
    capsys.readouterr()
    other = [argument for argument in sampled if argument != "--debug"]
    assert main([*other, "--seed", "7", "--out", str(out)]) == 2
    assert "seed was 0 and is now 7" in capsys.readouterr().err


def test_a_target_that_does_not_chat_leaves_no_folder_behind(pair, tmp_path: Path, capsys) -> None:
    """Else the mended command would be refused: the folder was begun with other settings."""
    folder = tmp_path / "target"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    assert main([*(word for word in pair if word != "--debug"), "--out", str(tmp_path / "out")]) == 2
    assert "no chat template" in (told := capsys.readouterr().err) and "`text` column" in told
    assert not (tmp_path / "out").exists()


def test_what_it_writes_is_trained_on(pair, workspace, tmp_path: Path, capsys) -> None:
    main([*pair, "--out", str(tmp_path / "out"), "--json"])
    places = [f"train_data={tmp_path / 'out'}", f"output_dir={tmp_path / 'run'}", f"target={tmp_path / 'target'}"]
    workspace.run(*workspace.options, *places, "max_steps=1", "eval_examples=1", "max_length=64")
    said_ = capsys.readouterr().out
    assert f"{len(read(tmp_path / 'out')) - 1} examples, 0 cut" in said_ and "assistant :[[" in said_


# ---------------------------------------------------------------------- a server
@pytest.fixture
def server(tmp_path: Path):
    folder = tmp_path / "server"
    folder.mkdir()
    process = subprocess.Popen([sys.executable, _server.__file__, str(folder)])
    for _ in range(600):
        if (folder / "port").exists():
            break
        time.sleep(0.05)
    yield folder, f"http://127.0.0.1:{(folder / 'port').read_text()}/v1"
    process.terminate()
    process.wait(10)


def test_a_server_answers(pair, server, tmp_path: Path, capsys) -> None:
    folder, url = server
    out = tmp_path / "out"
    asked = [*pair, "--server", url, "--model", "org/model", "--api-key", "k", "--temperature", "0.5", "--top-k", "7"]
    assert main([*asked, "--out", str(out), "--json", "--concurrency", "2"]) == 0
    counts = counts_of(capsys)  # the 503 was asked again, the 400 was not
    assert (counts["success"], counts["error"], counts["skipped"]) == (3, 1, 1)
    for row in read(out):
        prompt = row["loss_mask"].index(1)
        assert row["input_ids"][prompt:] == _server.reply(row["input_ids"][:prompt])
    assert {row["id"] for row in read(out)} == {"0-0", "0-1", "1-0", "3-0", "4-0"}
    lost = (out / "shard-00001.lost.jsonl").read_text()
    assert "400" in lost and "I will not say that" in lost
    requests = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert all(r["path"] == "/v1/completions" and r["model"] == "org/model" and r["top_k"] == 7 for r in requests)
    assert len({r["seed"] for r in requests[:2]}) == 2


def test_a_server_without_ids_is_refused_unless_asked_for(pair, server, tmp_path: Path, capsys) -> None:
    folder, url = server
    (folder / "no_ids").touch()
    quiet = [argument for argument in pair if argument != "--debug"]
    assert main([*quiet, "--server", url, "--out", str(tmp_path / "no"), "--json"]) == 2
    assert "returned no token ids" in capsys.readouterr().err
    assert not read(tmp_path / "no")
    assert main([*quiet, "--server", url, "--out", str(tmp_path / "text"), "--json", "--retokenize"]) == 0
    row = read(tmp_path / "text")[0]
    prompt = row["loss_mask"].index(1)
    assert row["input_ids"][prompt:] == _server.reply(row["input_ids"][:prompt])


def test_a_server_that_is_not_there_writes_nothing(pair, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    quiet = [argument for argument in pair if argument != "--debug"]
    assert main([*quiet, "--server", "http://127.0.0.1:9/v1", "--out", str(tmp_path / "out")]) == 2
    assert "none of 2 chats was answered" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("shard-*"))


# ---------------------------------------------------------------------- turns, tools, thinking
def call(name: str) -> dict:
    return {"function": {"name": name, "arguments": {}}}


def tool(content: str) -> dict:
    return {"role": "tool", "content": content}


def chat(*messages: dict) -> Chat:
    return Chat("0", list(messages), None, {}, 0.0)


def test_recorded_results_follow_the_targets_calls() -> None:
    source = [
        user("q"),
        said("", tool_calls=[call("a"), call("b")]),
        tool("1"),
        tool("2"),
        said("x"),
        user("r"),
        said("y"),
    ]
    calling = chat(*source)
    assert calling.reply_is_due()
    calling.take_reply(said("", tool_calls=[call("c"), call("d")]))
    assert calling.reply_is_due()
    assert calling.history == [user("q"), said("", tool_calls=[call("c")]), tool("1")]
    calling.take_reply(said("z"))
    assert calling.reply_is_due() and calling.history[-1] == user("r")
    calling.take_reply(said("end"))
    assert not calling.reply_is_due() and calling.problem is None

    answering = chat(*source)
    assert answering.reply_is_due()
    answering.take_reply(said("known without"))
    assert answering.reply_is_due() and answering.history[1:] == [said("known without"), user("r")]

    unexpected = chat(user("q"), said("x"), user("r"))
    assert unexpected.reply_is_due()
    unexpected.take_reply(said("", tool_calls=[call("c")]))
    assert not unexpected.reply_is_due()


def test_calls_of_the_target_are_put_to_it_as_it_writes_them() -> None:
    """Its template inserts arguments as they are, and would write an object in Python's way."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
        "{% endfor %}"
    )
    said_so = said("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"w1": "w2"}}}])
    asked = chat(user("w3"), said("x"), tool("w4"))
    assert asked.reply_is_due()
    asked.take_reply(said_so)
    prompt = Regenerator(None, tokenizer, RegenerationOptions())._next_prompt(asked)
    assert prompt == tokenizer('w3{"w1": "w2"}w4')["input_ids"]


def test_replies_are_taken_apart() -> None:
    assert parse_reply("hello") == {"role": "assistant", "content": "hello"}
    assert parse_reply("<think>\nhm\n</think>\n\nhello") == said("hello", reasoning_content="hm")
    assert parse_reply("hm\n</think>\n\nhello") == said("hello", reasoning_content="hm")  # the prompt opened the block
    assert parse_reply("<think>\n\n</think>\n\nhello") == said("hello")
    written = parse_reply('so\n<tool_call>\n{"name": "f", "arguments": {"x": {"y": 1}}}\n</tool_call>')
    function = {"name": "f", "arguments": {"x": {"y": 1}}}
    assert written == said("so", tool_calls=[{"type": "function", "function": function}])
    broken = "<tool_call>\n{no json}\n</tool_call>"
    assert parse_reply(broken) == said(broken)
    harmony = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hello<|return|>"
    assert parse_reply(harmony) == said("hello", reasoning_content="hm", thinking="hm")
