"""The corpus's files and numbers, the share of right answers, and a training that is cut in two."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hf_specheads.trainer.shipped_pair import corpus, right_answers, target
from hf_specheads.trainer.shipped_pair.chat import answer_text
from hf_specheads.trainer.shipped_pair.tasks import FAMILIES, answer_problem


def call(module, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """The module's command."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


def test_chats_as_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "files" / "held_out.jsonl"
    call(corpus, monkeypatch, "--output", path, "--held_out", "--per_family", 3)
    assert f"{3 * len(FAMILIES)} chats" in capsys.readouterr().out
    first, asked = path.read_bytes(), corpus.read_examples(path)
    assert [example.family for example in asked] == [family.name for family in FAMILIES] * 3
    assert len({json.dumps(example.prompt) for example in asked}) == len(asked)
    for example in asked:
        assert answer_problem(example, answer_text(example.messages[-1], example.thinking)) is None
    corpus.write_examples(path, per_family=3, held_out=True)
    assert path.read_bytes() == first
    corpus.write_examples(path, per_family=3)
    assert path.read_bytes() != first


def test_statistics(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, monkeypatch, capsys) -> None:
    chat_tokenizer.save_pretrained(tmp_path)
    call(corpus, monkeypatch, "--statistics", "--tokenizer", tmp_path, "--per_family", 5)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["family"] for row in rows] == [family.name for family in FAMILIES]
    for row in rows:
        for least, mean, most in (row["prompt"], row["answer"]):
            assert 0 < least <= mean <= most
    with pytest.raises(SystemExit):
        call(corpus, monkeypatch, "--statistics")
    assert "--tokenizer FOLDER" in capsys.readouterr().err


def test_shares() -> None:
    results = [("a", None), ("a", "wrong."), ("b", None), ("b", None)]
    rows = [{"family": family, "problem": problem} for family, problem in results]
    assert right_answers.shares(rows) == {"all": 0.75, "a": 0.5, "b": 1.0}


def test_answers_are_read_as_generated(chat_tokenizer: PreTrainedTokenizerFast, monkeypatch) -> None:
    """A target that knows every answer is right on all chats, whatever the padding."""
    asked = [next(corpus.distinct_examples(family, 1, seed=3)) for family in FAMILIES]
    known = [
        chat_tokenizer(answer_text(e.messages[-1], e.thinking) + "<|im_end|>", add_special_tokens=False)["input_ids"]
        for e in asked
    ]

    class Knowing:
        device = torch.device("cpu")
        calls = 0

        def generate(self, ids: torch.Tensor, attention_mask: torch.Tensor, pad_token_id: int, **options: object):
            assert ids.shape == attention_mask.shape and (ids[attention_mask == 0] == pad_token_id).all()
            replies = known[self.calls : self.calls + len(ids)]
            self.calls += len(ids)
            longest = max(map(len, replies))
            padded = [reply + [pad_token_id] * (longest - len(reply)) for reply in replies]
            return torch.cat([ids, torch.tensor(padded)], dim=1)

    answers = right_answers.generate_answers(Knowing(), chat_tokenizer, asked, batch_size=4)
    assert [answer_problem(example, answer) for example, answer in zip(asked, answers, strict=True)] == [None] * 13


@pytest.mark.slow
def test_a_training_in_two_calls(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, monkeypatch) -> None:
    """The second call goes on where the time limit cut the first, and both leave a target that can be loaded."""
    monkeypatch.setattr(target, "read_split", lambda held_out: ["def f(x):\n    return x\n" * 60])
    chat_tokenizer.save_pretrained(tmp_path / "tokenizer")
    common = ("--output_dir", tmp_path / "run", "--tokenizer", tmp_path / "tokenizer", "--max_steps", 3,
              "--num_hidden_layers", 1, "--batch_size", 1, "--block_size", 400, "--save_steps", 100)  # fmt: skip
    facts = tmp_path / "run" / "final" / target.FACTS
    call(target, monkeypatch, *common, "--minutes", 0, "--answers_per_family", 0)
    first = json.loads(facts.read_text())
    assert (first["steps"], first["tokens_seen"], first["right_answers"]) == (1, 400, {})
    monkeypatch.setattr(right_answers, "MAX_NEW_TOKENS", 4)
    call(target, monkeypatch, *common, "--answers_per_family", 1)
    second = json.loads(facts.read_text())
    assert (second["steps"], second["tokens_seen"]) == (3, 3 * 400) and second["flops"] > first["flops"] > 0
    assert second["right_answers"]["temperature 1"] == dict.fromkeys(["all", *(f.name for f in FAMILIES)], 0.0)
    model = AutoModelForCausalLM.from_pretrained(facts.parent)
    tokenizer = AutoTokenizer.from_pretrained(facts.parent)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.dtype == torch.bfloat16 and model.config.use_cache
