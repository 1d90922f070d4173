"""Draft heads, one module per method."""

from .eagle import EagleHead, EagleHeadConfig
from .medusa import MedusaHead, MedusaHeadConfig
from .poss import PossHead, PossHeadConfig

__all__ = ["EagleHead", "EagleHeadConfig", "MedusaHead", "MedusaHeadConfig", "PossHead", "PossHeadConfig"]
