"""Names in the layout of Hydra and Hydra++, and their names in our heads, for reading and writing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..keys import FIRST_LAYER, INPUT_NORM, LAYER_WEIGHTS, POST_NORM

EMBEDDING_COPY = "input_embed_fn.weight"
PREFIX = "prefix_embeding_layer."  # the authors' spelling
PREFIX_LAYER = f"{PREFIX}{FIRST_LAYER}"
ROPE_TABLE = f"{PREFIX_LAYER}self_attn.rotary_emb.inv_freq"
BLOCKS, PROJECTIONS = "hydra_mlp.", "hydra_lm_head."
BLOCK = re.compile(rf"{re.escape(BLOCKS)}(\d{{1,3}})\.(\d{{1,3}})\.linear\.weight")
RESIDUAL = "res_connection."
PARTS = ("weight", "bias")
# Fields of `config.json`.
NUM_HEADS, NUM_BLOCKS = "hydra_num_heads", "hydra_num_layers"
HEAD_ARCH, GROUNDED, OFFSET = "hydra_head_arch", "grounded_heads", "hidden_state_offset"


@dataclass(frozen=True)
class Numbering:
    """Numbering of the modules in the authors' heads.

    Attributes:
        prefixed: Whether these are Hydra++ heads. Their blocks and projections have odd indices, because a dropout
            module precedes each of them.
        grounded: Whether the first block of every Hydra head has two parts.
    """

    prefixed: bool
    grounded: bool

    def place(self, block: int) -> int:
        """Index of a block within its Hydra head."""
        return 2 * block + 1 if self.prefixed else block

    def block(self, head: int, block: int) -> str:
        """Prefix of a block's keys."""
        return f"{BLOCKS}{head}.{self.place(block)}."

    def linear(self, head: int, block: int) -> dict[str, str]:
        """Keys of a block's linear layer, which every block has, by part."""
        return {part: f"{self.block(head, block)}linear.{part}" for part in PARTS}

    def projection(self, head: int) -> dict[str, str]:
        """Keys of a Hydra head's projection, by part."""
        return {part: f"{PROJECTIONS}{head}{'.1' if self.prefixed else ''}.{part}" for part in PARTS}

    def names(self, num_heads: int, num_blocks: int, stored: int, layer_biases: Iterable[str]) -> dict[str, str]:
        """Maps every name in the authors' layout to the name in our heads.

        Args:
            num_heads: Number of Hydra heads.
            num_blocks: Number of blocks that each Hydra head applies.
            stored: Number of distinct blocks per Hydra head; later blocks reuse the last of them.
            layer_biases: Keys of the prefix layer's biases, without its prefix.
        """
        names: dict[str, str] = {}
        for head in range(num_heads):
            names |= {theirs: f"lm_heads.{head}.{part}" for part, theirs in self.projection(head).items()}
            for block in range(num_blocks):
                ours, two_parts = f"blocks.{head}.{min(block, stored - 1)}.", self.grounded and block == 0
                for part, theirs in self.linear(head, block).items():
                    names[theirs] = f"{ours}{'linear.' if two_parts else ''}{part}"
                    if two_parts:
                        names[f"{self.block(head, block)}{RESIDUAL}{part}"] = f"{ours}residual.{part}"
        if not self.prefixed:
            return names
        parts = (*LAYER_WEIGHTS, INPUT_NORM, POST_NORM, *layer_biases)
        names |= {f"{PREFIX_LAYER}{part}": f"prefix.{part}" for part in parts}
        return names | {f"{PREFIX}norm.weight": "prefix.norm.weight"}
