"""Targets and heads of given sizes with random weights, for measuring time where there are no real ones."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_specheads import AutoDraftHead, DraftHead, DraftTreeConfig
from hf_specheads.heads.auto import METHODS

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    },
    "llama-100m": {
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 12,
        "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    },
}  # fmt: skip
SHAPED_HEADS: dict[str, dict[str, Any]] = {
    "poss": {"num_specialists": 3, "positions_per_specialist": 2},
    "eagle": {},
    "eagle3": {},
}


def random_pair(
    shape: str, tree: DraftTreeConfig, dtype: torch.dtype, device: str, methods: tuple[str, ...] = tuple(SHAPED_HEADS)
) -> tuple[PreTrainedModel, dict[str, DraftHead]]:
    """A target of a shape and heads for it, of random weights; the heads draft every round."""
    torch.manual_seed(0)
    with torch.device(device):
        target = LlamaForCausalLM(LlamaConfig(**SHAPES[shape], eos_token_id=None, pad_token_id=0))
    target = target.to(dtype).eval()
    heads = {}
    for method in methods:
        options = SHAPED_HEADS[method]
        if method == "eagle3":
            tokens = min(SHAPES[shape]["vocab_size"], 32000)
            options = {"draft_token_ids": torch.arange(tokens), "draft_vocab_size": tokens}
        made = AutoDraftHead.from_target(target, method, tree_config=tree, **options)
        made = made.to(device=device, dtype=target.dtype).eval()
        made.adaptive = False
        heads[method] = made.bind(target)
    return target, heads


def pair_on_paper(shape: str, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, DraftHead]]:
    """The same without memory."""
    with torch.device("meta"):
        target = LlamaForCausalLM(LlamaConfig(**SHAPES[shape])).to(dtype)
        heads = {}
        for method, options in SHAPED_HEADS.items():
            head_class = METHODS[method]
            fields = head_class.config_class.fields_for_target(target, method) | options
            if method == "eagle3":
                fields["draft_vocab_size"] = min(SHAPES[shape]["vocab_size"], 32000)
            heads[method] = head_class(head_class.config_class(**fields)).to(target.dtype)
    return target, heads
