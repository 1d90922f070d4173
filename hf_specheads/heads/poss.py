"""POSS heads: position specialists that share `fc` (arXiv 2506.03566).

Draft position p belongs to specialist `p // positions_per_specialist`. Each specialist owns its draft cache: it starts
at its first position from target features of the committed rows and drafted features of the tree so far, and past the
last trained position the last specialist continues. (The authors' code runs specialist 0 on another specialist's cache
in the first round of a generation; that is a bug and is not reproduced.)
"""

from __future__ import annotations

from ..configuration import PossHeadConfig
from .eagle import EagleHead


class PossHead(EagleHead):
    """L decoder layers, one per span of draft positions; everything else as in [`EagleHead`]."""

    config_class = PossHeadConfig
    config: PossHeadConfig
