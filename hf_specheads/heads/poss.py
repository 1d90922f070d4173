"""POSS heads: position specialists that share `fc` (arXiv 2506.03566).

Draft position p belongs to specialist `p // positions_per_specialist`. Each specialist has its own draft cache: at its
first position, it starts from target features of the committed rows and drafted features of the tree so far. Past the
last trained position, the last specialist continues. (The authors' code runs specialist 0 on another specialist's
cache in the first round of a generation; that is a bug and is not reproduced.)
"""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from ..publishing.card.facts import Published
from .eagle import EAGLE_PAPERS, HASS_PAPER, EagleHead, EagleHeadConfig
from .specialists import SpecialistHeadConfig

__all__ = ["PossHead", "PossHeadConfig"]


@strict
class PossHeadConfig(EagleHeadConfig):
    r"""Configuration of POSS heads: L position specialists that share `fc` (arXiv 2506.03566).

    Draft position p (0-based) belongs to specialist `min(p // positions_per_specialist, num_specialists - 1)`.
    """

    model_type = "specheads_poss"
    required_fields: ClassVar[tuple[str, ...]] = (
        *EagleHeadConfig.required_fields, "num_specialists", "positions_per_specialist",
    )  # fmt: skip

    method: str = "poss"
    num_specialists: int = 2
    positions_per_specialist: int = 3

    def validate_specialists(self) -> None:
        """POSS: any number of specialists and positions, both at least 1."""
        SpecialistHeadConfig.validate_specialists(self)


POSS_PAPER = (
    "POSS: Position Specialist Generates Better Draft for Speculative Decoding, "
    "[arXiv:2506.03566](https://arxiv.org/abs/2506.03566)"
)
POSS_PAPERS = (POSS_PAPER, HASS_PAPER, *EAGLE_PAPERS)


class PossHead(EagleHead):
    """L decoder layers, one per span of draft positions; everything else as in [`EagleHead`]."""

    config_class = PossHeadConfig
    config: PossHeadConfig
    published: ClassVar[dict[str, Published]] = {"poss": Published("POSS", POSS_PAPERS)}
