"""The commands of docs/training.md, one after the other: at toy size, and for the shipped target."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml
from support.hub.endpoint import HubEndpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specheads import load_heads
from hf_specheads.cli import main
from hf_specheads.cli.prompts import read_prompts, texts_of
from hf_specheads.texts import left_padded
from hf_specheads.trainer.recipe import Recipe
from hf_specheads.trainer.shipped_pair.tasks import FAMILIES, example_at

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
SHIPPED = ROOT / "model_cards"
TRAINING = ["max_steps=2", "per_device_train_batch_size=2", "use_cpu=true", "bf16=false", "max_length=64",
            "eval_examples=2", "eval_acceptance_prompts=1", "eval_max_new_tokens=4", "learning_rate=1e-3",
            "save_strategy=no"]  # fmt: skip
TOY = {
    "regenerate": ["--max-new-tokens", "6", "--max-length", "48"],
    "train": TRAINING,
    "eval": ["--max-new-tokens", "6"],
    "tune": ["--max-new-tokens", "4", "--repeats", "1", "--limit", "1"],
    "push": ["--to-folder", "runs/repository"],
}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% if m['role'] == 'assistant' %}</s> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"
)


def commands() -> list[list[str]]:
    [block] = re.findall(r"```bash\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    return [shlex.split(line) for line in block.splitlines()]


@pytest.fixture
def names(tmp_path: Path, target, tokenizer, monkeypatch) -> dict[str, str]:
    """What the document's names stand for."""
    monkeypatch.chdir(tmp_path)
    tokenizer.chat_template = TEMPLATE
    target.generation_config.eos_token_id = [2, *range(9, 99, 4)]
    target.save_pretrained("target")
    tokenizer.save_pretrained("target")
    chats = [{"messages": [{"role": "user", "content": f"w{i} w{i + 1}"}]} for i in range(8)]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, chats)))
    Path("held_out.jsonl").write_text("\n".join(json.dumps({"prompt": f"w{i} w5"}) for i in (3, 7)))
    return {"T": "target", "PROMPTS": "prompts.jsonl", "HELD_OUT": "held_out.jsonl"}


def test_from_a_target_to_published_heads_in_six_commands(names: dict[str, str], tmp_path: Path) -> None:
    written = commands()
    assert [words[1] for words in written] == ["regenerate", "train", "train", "eval", "tune", "push"]
    for words in written:
        words, into = (words[:-2], words[-1]) if words[-2] == ">" else (words, "said.txt")
        words = [re.sub(r"(?<=target=)T$", "target", names.get(word, word)) for word in words]
        with open(into, "w") as stream, redirect_stdout(stream):
            assert main([*words[1:], *TOY[words[1]]]) == 0, words
    heads = load_heads(tmp_path / "runs" / "repository")
    assert heads.config.method == "poss" and heads.config.num_specialists == 2
    card = (tmp_path / "runs" / "repository" / "README.md").read_text()
    assert json.loads((tmp_path / "runs" / "eval.json").read_text()) and "acceptance" in card.lower()


# ---------------------------------------------------------------------- the shipped pair
SMALL = {
    "regenerate": ["--max-new-tokens", "12", "--max-length", "512", "--temperature", "0", "1",
                   "--heads", str(SHIPPED / "poss3-longer")],
    "train": ["max_steps=2", "warmup_steps=0", "learning_rate=1e-3", "packing=true", "max_length=256",
              "per_device_train_batch_size=1", "use_cpu=true", "eval_examples=2", "eval_acceptance_prompts=1",
              "eval_max_new_tokens=8", "save_strategy=no", "dataset_num_proc=1"],
    "eval": ["--max-new-tokens", "16"],
    "tune": ["--max-new-tokens", "4", "--repeats", "1", "--limit", "1"],
    "push": [],
}  # fmt: skip


@pytest.fixture
def shipped(tmp_path: Path) -> dict[str, str]:
    """What the document's names stand for: chats of the shipped target's tasks, whose answers nobody gives away."""
    asked = [
        {"messages": one.prompt, "tools": one.tools, "chat_template_kwargs": {"enable_thinking": one.thinking}}
        for one in (example_at(family, 0, seed=4000) for family in FAMILIES)
    ]
    held_out = [example_at(FAMILIES[index], 0, 4000, held_out=True).to_row() for index in (4, 12)]
    for name, rows in (("prompts", asked), ("held_out", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "T": str(SHIPPED / "target"),
        "PROMPTS": str(tmp_path / "prompts.jsonl"),
        "HELD_OUT": str(tmp_path / "held_out.jsonl"),
    }


def command(words: list[str], names: dict[str, str], folder: Path) -> list[str]:
    """A command of the document with paths for its names, in a folder for `runs/`."""
    words = [re.sub(r"(?<=target=)T$", lambda _: names["T"], names.get(word, word)) for word in words]
    return [re.sub(r"^(\w+=)?runs/", lambda found: f"{found[1] or ''}{folder}/", word) for word in words]


def text_by_id(name: str, target_folder: str, prompts: str) -> list[tuple[list[int], list[int], int]]:
    """New tokens of each prompt, plainly and with the heads of a repository, and rounds; in a process with a Hub."""
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    heads = load_heads(name, dtype=torch.float32)
    found = []
    for ids in texts_of(read_prompts([Path(prompts)]), tokenizer):
        options = {**left_padded([ids], 0), "max_new_tokens": 24, "do_sample": False}
        plain = target.generate(**options)[0, len(ids) :].tolist()
        drafted = target.generate(**options, assistant_model=heads)[0, len(ids) :].tolist()
        found.append((plain, drafted, heads.last_stats.rounds))
    return found


def test_the_shipped_heads_are_retrained_by_these_commands(
    hub: HubEndpoint, shipped: dict[str, str], tmp_path: Path, monkeypatch
) -> None:
    """From chats to heads that are loaded by their id and generate the target's own text."""
    for setting, few in (("SIZES", (3, 12)), ("TOP_KS", (1, 3))):  # of the trees that are timed
        monkeypatch.setattr(import_module("hf_specheads.tuning.tune"), setting, few)
    runs, name, trained = tmp_path / "runs", hub.new_name(), iter((["from_heads=" + str(SHIPPED / "eagle")], []))
    runs.mkdir()
    for words in commands():
        words, into = (words[:-2], words[-1]) if words[-2] == ">" else (words, "runs/said.txt")
        words = command([*words[1:], *SMALL[words[1]]], {**shipped, "org/heads": name}, runs)
        words += next(trained) if words[0] == "train" else []
        if words[0] == "push":
            assert hub.run(main, words) == 0
            continue
        with open(runs.parent / into, "w") as stream, redirect_stdout(stream):
            assert main(words) == 0, words
    told = json.loads((runs / "eval.json").read_text())
    assert told["prompts"] == 2 and told["acceptance_length"] > 1.5 and told["identical"] is True
    texts = hub.run(text_by_id, name, shipped["T"], shipped["HELD_OUT"])
    assert len(texts) == 2
    for plain, drafted, rounds in texts:
        assert drafted == plain and 0 < rounds < len(plain)


def test_the_recipe_in_the_document_is_one() -> None:
    [block] = re.findall(r"```yaml\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    recipe = Recipe.from_dict({"target": "T", **yaml.safe_load(block)})
    assert [source.weight for source in recipe.train_sources] == [3, 1] and recipe.training["packing"] is True
