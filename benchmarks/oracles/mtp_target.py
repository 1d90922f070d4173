"""A tiny Qwen3-Next target with a briefly trained MTP layer in its checkpoint, to be served natively by other engines.

    python -m benchmarks.oracles.mtp_target FOLDER
    python -m benchmarks.oracles.compare_vllm --python ENV/bin/python --target FOLDER --heads mtp --to native \
        --limit 2 --max_new_tokens 48 --update --output benchmarks/results/oracles/vllm_blocks.json

The weights are random, so its text is too; the layer half learns a few of its texts by heart, is exported `--to mtp`
and put beside the target's file, as the export says. All layers have full attention: what is tried is the MTP layer.
(Of Qwen 3.5, which has the same layout, vLLM's class needs torchvision.)
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoTokenizer, Qwen3NextConfig, Qwen3NextForCausalLM

from hf_specheads import AutoDraftHead, export_heads

from ..diagnosis.tiny import learn
from ..results import SHIPPED_TARGET
from .block_heads import learnt_texts

DEPTH, STEPS, RATE = 3, 9, 1e-3
LAYERS = 3
SHAPE = {
    "hidden_size": 128, "num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "initializer_range": 0.12,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "mtp_num_hidden_layers": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip


def put_beside(folder: Path, layer: Path) -> None:
    """Moves the layer's weights beside the target's, and names all tensors in an index."""
    (layer / "model.safetensors").rename(folder / "mtp.safetensors")
    index = {}
    for name in ("model.safetensors", "mtp.safetensors"):
        with safe_open(folder / name, "pt") as file:
            index.update(dict.fromkeys(file.keys(), name))
    shutil.rmtree(layer)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def main(folder: Path) -> None:
    """Makes the target, trains the layer, and saves both as one checkpoint."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_TARGET)
    torch.manual_seed(0)
    target = Qwen3NextForCausalLM(Qwen3NextConfig(vocab_size=len(tokenizer), **SHAPE)).eval()
    tree = {"kind": "chain", "depth": DEPTH, "top_k": 1, "total_tokens": DEPTH + 1}
    heads = AutoDraftHead.from_target(target, "mtp", native=False, tree_config=tree).bind(target, follow=False)
    learn(heads, learnt_texts(target, tokenizer), steps=STEPS, passes=DEPTH, rate=RATE)
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    put_beside(folder, export_heads(heads, folder / "layer", to="mtp").folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
