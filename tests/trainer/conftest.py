"""Heads, data and trainers of the training tests."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import yaml
from support.targets import VOCAB, training_target
from support.tokenizers import word_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from hf_specheads import AutoDraftHead, DraftHead
from hf_specheads.trainer import DraftHeadTrainer, DraftHeadTrainingArguments
from hf_specheads.trainer.__main__ import main

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", ":", "\n"] + [f"w{i}" for i in range(VOCAB - 8)]


def make_heads(target: LlamaForCausalLM, method: str = "poss", seed: int = 1, **options) -> DraftHead:
    """Heads with weights large enough that attention matters."""
    torch.manual_seed(seed)
    if method == "poss":
        options = {"num_specialists": 2, "positions_per_specialist": 2, **options}
    heads = AutoDraftHead.from_target(target, method, **options)
    with torch.no_grad():
        for parameter in heads.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return heads


@pytest.fixture
def target() -> LlamaForCausalLM:
    return training_target()


@pytest.fixture
def heads(target: LlamaForCausalLM) -> DraftHead:
    return make_heads(target)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per whitespace-separated word."""
    return word_tokenizer(WORDS, bos_token="<s>", eos_token="</s>")


def make_examples(count: int = 16, seed: int = 3, longest: int = 24) -> list[dict[str, list[int]]]:
    """Token ids of different lengths; the first tokens of each are not supervised."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for _ in range(count):
        length = int(torch.randint(8, longest, (), generator=generator))
        ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        examples.append({"input_ids": ids, "loss_mask": [0] * 3 + [1] * (length - 3)})
    return examples


@pytest.fixture
def make_trainer(tmp_path, target, heads):
    """A trainer on the tiny target; keyword arguments go to the training arguments."""
    from datasets import Dataset

    def make(
        model: DraftHead = heads, folder: str = "run", data=None, eval_data=None, of=target, **arguments
    ) -> DraftHeadTrainer:
        defaults = {
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "eval_acceptance_prompts": 0,
            "max_length": 64,
        }
        args = DraftHeadTrainingArguments(
            output_dir=str(tmp_path / folder),
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
            **{**defaults, **arguments},
        )
        train = Dataset.from_list(make_examples()) if data is None else data
        return DraftHeadTrainer(model=model, target=of, args=args, train_dataset=train, eval_dataset=eval_data)

    return make


@dataclasses.dataclass
class Workspace:
    """A saved tiny target with tokenizer and data, and the recipe that trains on them."""

    options: list[str]

    def run(self, *changes: str) -> None:
        assert main(list(changes)) == 0


@pytest.fixture
def workspace(tmp_path, target, tokenizer) -> Workspace:
    """SGD, because Adam turns rounding of tiny gradients into sign flips."""
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    words = tokenizer.convert_ids_to_tokens
    lines = [json.dumps({"text": " ".join(words(e["input_ids"]))}) for e in make_examples(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    recipe = {
        "target": str(tmp_path / "target"),
        "method": "poss",
        "heads": {"num_specialists": 2, "positions_per_specialist": 2},
        "train_data": str(tmp_path / "train.jsonl"),
        "eval_examples": 4,
        "training": {
            "max_steps": 3,
            "per_device_train_batch_size": 4,
            "learning_rate": 0.05,
            "optim": "sgd",
            "logging_steps": 1,
            "save_strategy": "no",
            "eval_strategy": "no",
            "eval_acceptance_prompts": 2,
            "eval_max_new_tokens": 8,
            "max_length": 32,
            "use_cpu": True,
            "disable_tqdm": True,
        },
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return Workspace(["--config", str(tmp_path / "recipe.yaml")])
