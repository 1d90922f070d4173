"""Small draft heads of every method for tiny targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_specheads import AutoDraftHead, DraftHead, DraftTreeConfig
from hf_specheads.heads.auto import METHODS

SCALED_ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 30000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 20000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


LEVELS = {"feature_layers": (0, 1, -1)}  # most targets here are too shallow for EAGLE-3's usual levels
SPECIALISTS = {"num_specialists": 2, "positions_per_specialist": 2}
# Options of small heads, by method.
OPTIONS: dict[str, dict[str, Any]] = {
    "poss": SPECIALISTS,
    "poss-lora": {**SPECIALISTS, "specialist_rank": 4},
    "eagle3": LEVELS,
    "poss-eagle3": {**LEVELS, **SPECIALISTS},
    "peagle": {**LEVELS, "num_hidden_layers": 2},
    "mtp": {"native": False},
    "lookup": {"longest_ngram": 2, "shortest_ngram": 1},
    "draft-lm": {"num_hidden_layers": 1},
    "dflash": {"num_hidden_layers": 2, "block_size": 5},
    "dflash2": {"num_hidden_layers": 2, "block_size": 5, "selector_rank": 6, "selector_top_k": 8},
    "domino": {"num_hidden_layers": 2, "block_size": 5, "gru_hidden_size": 12, "correction_rank": 6},
    "dspark": {"num_hidden_layers": 2, "block_size": 4, "markov_rank": 6, "confidence_head": False},
    "jetspec": {"num_hidden_layers": 2, "block_size": 4, "anchor_slot": "drafts"},
}


# Methods that share their drafting code with others. The default run of tests over all methods leaves them out.
ALIKE = ("hass", "poss-lora", "poss-eagle3", "jetspec", "dflash2", "domino", "peagle")
METHODS_BY_KIND = [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in METHODS]


def random_heads(
    target: PreTrainedModel,
    method: str = "eagle",
    tree: DraftTreeConfig | None = None,
    *,
    seed: int = 3,
    **changes: Any,
) -> DraftHead:
    """Makes freshly initialised heads, whose drafts are seldom right.

    Args:
        target: The target; the heads are not bound to it.
        method: A key of `METHODS`.
        tree: Tree config; by default 14 nodes on 4 levels.
        seed: Seed of the weights.
        **changes: Fields of the tree to change.
    """
    torch.manual_seed(seed)
    tree = (tree or DraftTreeConfig(depth=4, top_k=4, total_tokens=14)).replace(**changes)
    return AutoDraftHead.from_target(target, method, tree_config=tree, **OPTIONS.get(method, {})).eval()


def scrambled_heads(
    target: PreTrainedModel, method: str, *, seed: int = 0, noise: float = 0.2, dtype: torch.dtype = torch.float32,
    **options: Any,
) -> DraftHead:  # fmt: skip
    """Makes heads with all weights drawn anew, including norms and biases, so that any mix-up of two tensors changes
    results.

    Args:
        target: The target; the heads are not bound to it.
        method: A key of `METHODS`.
        seed: Seed of the weights.
        noise: Standard deviation of all weights that do not belong to a norm.
        dtype: Dtype of the weights.
        **options: Fields of the config.
    """
    heads = AutoDraftHead.from_target(target, method, dtype=torch.float32, **options).eval()
    return scramble(heads, seed, noise).to(dtype)


def scramble(heads: DraftHead, seed: int = 0, noise: float = 0.2) -> DraftHead:
    """Draws all weights anew, as [`scrambled_heads`] does, and returns the heads.

    Fresh Medusa heads all draft the same, so that rounding decides between nodes of equal scores; these do not.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * drawn if "norm" in name and parameter.dim() == 1 else noise * drawn)
    return heads
