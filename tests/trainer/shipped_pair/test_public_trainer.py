"""The shipped pair's chats, with tools and the switch for thinking, go through the public commands."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from support.targets import own_target
from transformers import PreTrainedTokenizerFast

from hf_specheads import load_heads
from hf_specheads.trainer import prepare_dataset
from hf_specheads.trainer.__main__ import main as train
from hf_specheads.trainer.data.preparing import DataReport
from hf_specheads.trainer.data.sources import DataSource
from hf_specheads.trainer.regenerate import main as regenerate
from hf_specheads.trainer.shipped_pair.chat import chat_tokens
from hf_specheads.trainer.shipped_pair.tasks import FAMILIES, Example, examples


@pytest.fixture(scope="module")
def chats() -> list[Example]:
    """Of every family, some of them with thinking, tools and several turns."""
    return [example for family in FAMILIES for example in islice(examples(family, seed=11), 4)]


@pytest.fixture(scope="module")
def data(chats: list[Example], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = [example.to_row() for example in chats]
    kept = [{name: row[name] for name in ("messages", "tools", "chat_template_kwargs")} for row in rows]
    path.write_text("\n".join(json.dumps({**row, "tools": json.dumps(row["tools"] or [])}) for row in kept))
    return path


def test_rows_are_the_chats_own_tokens(
    chats: list[Example], data: Path, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    assert any(example.thinking for example in chats) and any(example.tools for example in chats)
    report = DataReport()
    prepared = prepare_dataset(DataSource(str(data)).load(), chat_tokenizer, 1024, report=report)
    assert report.bad == report.cut == report.unsupervised == 0
    for example, row in zip(chats, prepared, strict=True):
        ids, mask = chat_tokens(example, chat_tokenizer)
        assert (row["input_ids"], row["loss_mask"]) == (ids, mask), example.family


def test_they_are_answered_anew_and_trained_on(
    data: Path, chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capsys
) -> None:
    target = own_target("llama", vocab_size=len(chat_tokenizer), max_position_embeddings=1024, initializer_range=0.02)
    target.generation_config.eos_token_id = chat_tokenizer.convert_tokens_to_ids("<|im_end|>")
    target.save_pretrained(tmp_path / "target")
    chat_tokenizer.save_pretrained(tmp_path / "target")
    wanted = ["--target", str(tmp_path / "target"), "--data", str(data), "--out", str(tmp_path / "answers")]
    assert regenerate([*wanted, "--max-new-tokens", "4", "--limit", "16", "--quiet", "--debug"]) == 0
    assert "16 answered, 0 failed, 0 skipped" in capsys.readouterr().out
    common = [f"target={tmp_path / 'target'}", "max_steps=1", "per_device_train_batch_size=2", "use_cpu=true",
              "bf16=false", "max_length=1024", "eval_examples=2", "eval_acceptance_prompts=1",
              "eval_max_new_tokens=4", "--quiet", "--debug"]  # fmt: skip
    for name, source in (("own", tmp_path / "answers"), ("recorded", data)):
        assert train(["--config", "poss3", *common, f"train_data={source}", "train_data.name=null",
                      f"output_dir={tmp_path / name}"]) == 0  # fmt: skip
        assert load_heads(tmp_path / name).config.method == "poss"
