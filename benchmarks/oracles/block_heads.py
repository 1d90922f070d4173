"""Trains heads briefly, for export to other engines: block drafters and P-EAGLE heads for the shipped target, and an
MTP layer in the checkpoint of a tiny Qwen3-Next.

    python -m benchmarks.oracles.block_heads FOLDER [METHOD ...]
    python -m benchmarks.oracles.compare_vllm --python ENV/bin/python --heads FOLDER/dflash ... --to speculators \
        --limit 2 --max_new_tokens 48 --output benchmarks/results/oracles/vllm_blocks.json
    python -m benchmarks.oracles.compare_vllm --python ENV/bin/python --target FOLDER/mtp --heads mtp --to native \
        --limit 2 --max_new_tokens 48 --update --output benchmarks/results/oracles/vllm_blocks.json

Training takes forty steps on eight texts of the target (nine for the MTP layer): enough that some drafts are accepted
and others are not.

The weights of the Qwen3-Next are random, and so is its text. The MTP layer partly memorises a few of its texts, is
exported `--to mtp` and placed beside the target's file, as the export instructs. All layers have full attention,
because only the MTP layer is under test. (Qwen 3.5 has the same layout, but its class in vLLM needs torchvision.)
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from hf_specheads import AutoDraftHead, DraftHead, export_heads

from ..diagnosis.tiny import learn, texts_of
from ..results import SHIPPED_TARGET
from ..setup import load_prompts

SIZES = {"num_hidden_layers": 2, "feature_layers": (2, 8, 13)}
METHODS: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": 5, **SIZES},
    "dflash2": {"block_size": 5, "selector_rank": 32, **SIZES},
    "dspark": {"block_size": 4, "markov_rank": 32, **SIZES},
    "peagle": SIZES,
    "draft-lm": {"num_hidden_layers": 2},
    "mtp": {"native": False},
}
DEPTH, MTP_DEPTH, NEW_TOKENS = 4, 3, 48
LAYERS = 3
QWEN3_NEXT = {
    "hidden_size": 128, "num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "initializer_range": 0.12,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "mtp_num_hidden_layers": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip


def taught(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, method: str, depth: int, steps: int, rate: float
) -> DraftHead:
    """Makes heads that draft chains and trains them for some steps on the target's answers to eight chats."""
    tree = {"kind": "chain", "depth": depth, "top_k": 1, "total_tokens": depth + 1}
    heads = AutoDraftHead.from_target(target, method, tree_config=tree, **METHODS[method]).bind(target, follow=False)
    prompts = [prompt["input_ids"] for prompt in load_prompts(["chats"], tokenizer, 8)]
    passes = 1 if heads.passes_problem(depth) else depth
    return learn(heads, texts_of(target, prompts, NEW_TOKENS), steps=steps, passes=passes, rate=rate)


def save_with_mtp_layer(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Saves the target, the layer's weights beside its own, and an index that names all tensors."""
    heads = taught(target, tokenizer, "mtp", MTP_DEPTH, steps=9, rate=1e-3)
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    layer = export_heads(heads, folder / "layer", to="mtp").folder
    (layer / "model.safetensors").rename(folder / "mtp.safetensors")
    index = {}
    for name in ("model.safetensors", "mtp.safetensors"):
        with safe_open(folder / name, "pt") as file:
            index.update(dict.fromkeys(file.keys(), name))
    shutil.rmtree(layer)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def main(folder: Path, methods: Iterable[str] = METHODS) -> None:
    """Trains and saves the heads of all methods."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_TARGET)
    target = AutoModelForCausalLM.from_pretrained(SHIPPED_TARGET, dtype=torch.float32).eval()
    for method in methods:
        torch.manual_seed(0)
        if method == "mtp":
            tiny = Qwen3NextForCausalLM(Qwen3NextConfig(vocab_size=len(tokenizer), **QWEN3_NEXT)).eval()
            save_with_mtp_layer(tiny, tokenizer, folder / method)
        else:
            taught(target, tokenizer, method, DEPTH, steps=40, rate=2e-3).save_pretrained(folder / method)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or METHODS)
