"""Briefly trained block drafters and P-EAGLE heads for the shipped target, to be exported and served by other engines.

    python -m benchmarks.oracles.block_heads FOLDER [METHOD ...]
    python -m benchmarks.oracles.compare_vllm --python ENV/bin/python --heads FOLDER/dflash ... --to speculators \
        --limit 2 --max_new_tokens 48 --output benchmarks/results/oracles/vllm_blocks.json

Forty steps on eight texts of the target: enough that some drafts are accepted and others are not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_specheads import AutoDraftHead
from hf_specheads.diagnosis.evidence import Evidence

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
}
DEPTH = 4
CHAIN = {"kind": "chain", "depth": DEPTH, "top_k": 1, "total_tokens": DEPTH + 1}
NEW_TOKENS, STEPS, RATE = 48, 40, 2e-3


def learnt_texts(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Evidence:
    """What a target says to eight chats."""
    prompts = [prompt["input_ids"] for prompt in load_prompts(["chats"], tokenizer, 8)]
    return texts_of(target, prompts, NEW_TOKENS)


def main(folder: Path, methods: Iterable[str] = METHODS) -> None:
    """Trains and saves them."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_TARGET)
    target = AutoModelForCausalLM.from_pretrained(SHIPPED_TARGET, dtype=torch.float32).eval()
    evidence = learnt_texts(target, tokenizer)
    for method in methods:
        torch.manual_seed(0)
        heads = AutoDraftHead.from_target(target, method, tree_config=CHAIN, **METHODS[method])
        heads.bind(target, follow=False)
        passes = 1 if heads.passes_problem(DEPTH) else DEPTH
        learn(heads, evidence, steps=STEPS, passes=passes, rate=RATE).save_pretrained(folder / method)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or METHODS)
