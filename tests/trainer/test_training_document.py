"""The commands of docs/training.md, one after the other, at toy size."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import yaml

from hf_specheads import load_heads
from hf_specheads.cli import main
from hf_specheads.trainer.recipe import Recipe

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
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


def test_the_recipe_in_the_document_is_one() -> None:
    [block] = re.findall(r"```yaml\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    recipe = Recipe.from_dict({"target": "T", **yaml.safe_load(block)})
    assert [source.weight for source in recipe.train_sources] == [3, 1] and recipe.training["packing"] is True
