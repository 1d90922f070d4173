"""POSS on the EAGLE-3 backbone: position specialists that share `fc`, norm, `lm_head` and draft vocabulary.

POSS: arXiv 2506.03566; EAGLE-3: arXiv 2503.01840. Draft position p belongs to specialist
`p // positions_per_specialist`. As in `poss.py`, a specialist starts from the target's rows and the drafted rows of
the tree so far. Training is EAGLE-3's training-time test, in which gradients also reach the earlier specialists.
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from ..publishing.card.facts import Published
from .eagle3 import EAGLE3_PAPER, Eagle3Head, Eagle3HeadConfig
from .poss import POSS_PAPER
from .specialists import SpecialistHeadConfig

__all__ = ["PossEagle3Head", "PossEagle3HeadConfig"]


@strict
class PossEagle3HeadConfig(Eagle3HeadConfig):
    r"""Configuration of POSS heads on the EAGLE-3 backbone: L decoder layers, everything else shared.

    Draft position p (0-based) belongs to specialist `min(p // positions_per_specialist, num_specialists - 1)`.
    """

    model_type = "specheads_poss_eagle3"
    required_fields: ClassVar[tuple[str, ...]] = (
        *Eagle3HeadConfig.required_fields, "num_specialists", "positions_per_specialist",
    )  # fmt: skip

    method: str = "poss-eagle3"
    num_specialists: int = 2
    positions_per_specialist: int = 3

    def validate_specialists(self) -> None:
        """POSS: any number of specialists and positions, both at least 1."""
        SpecialistHeadConfig.validate_specialists(self)


class PossEagle3Head(Eagle3Head):
    """L decoder layers, one per span of draft positions; everything else as in [`Eagle3Head`]."""

    config_class = PossEagle3HeadConfig
    config: PossEagle3HeadConfig
    published: ClassVar[dict[str, Published]] = {
        "poss-eagle3": Published("POSS on EAGLE-3", (POSS_PAPER, EAGLE3_PAPER))
    }

    @property
    def default_passes(self) -> int:
        return super(Eagle3Head, self).default_passes
