"""DFlash and JetSpec heads: every draft position from one forward of a block, independent of the drafted path.

DFlash (arXiv 2602.06036): block rows see one another in both directions, and a single path is drafted. JetSpec (arXiv
2606.18394): a block row sees only rows up to itself. Because no slot depends on what is drafted at the others, the
best tree follows from the slots' distributions alone (DDTree, arXiv 2604.12989); `kind="dynamic"` grows that tree.
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedModel

from ..publishing.card.facts import Published
from .block import BlockHead
from .block_config import BlockHeadConfig

__all__ = ["DFlashHead", "DFlashHeadConfig"]

DFLASH_PAPER = (
    "DFlash: Block Diffusion for Flash Speculative Decoding, [arXiv:2602.06036](https://arxiv.org/abs/2602.06036)"
)
JETSPEC_PAPER = "JetSpec: Parallel Tree Drafting, [arXiv:2606.18394](https://arxiv.org/abs/2606.18394)"
DDTREE_PAPER = (
    "Accelerating Speculative Decoding with Block Diffusion Draft Trees, "
    "[arXiv:2604.12989](https://arxiv.org/abs/2604.12989)"
)


@strict
class DFlashHeadConfig(BlockHeadConfig):
    r"""Configuration of DFlash and JetSpec heads; see [`BlockHeadConfig`] for all fields. With method `"jetspec"`,
    `causal` is set."""

    model_type = "specheads_dflash"

    method: str = "dflash"

    @classmethod
    def fields_for_target(cls, target: PreTrainedModel, method: str) -> dict[str, Any]:
        return {**super().fields_for_target(target, method), "causal": method == "jetspec"}


class DFlashHead(BlockHead):
    """L layers over [context ; block]; the target's `lm_head` turns the slots' states into draft logits."""

    config_class = DFlashHeadConfig
    config: DFlashHeadConfig
    published: ClassVar[dict[str, Published]] = {
        "dflash": Published("DFlash", (DFLASH_PAPER, DDTREE_PAPER)),
        "jetspec": Published("JetSpec", (JETSPEC_PAPER, DFLASH_PAPER)),
    }

    def __init__(self, config: DFlashHeadConfig):
        super().__init__(config)
        self.post_init()
