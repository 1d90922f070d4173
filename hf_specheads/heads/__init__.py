"""Draft heads, one module per method."""

from .eagle import EagleHead, EagleHeadConfig
from .poss import PossHead, PossHeadConfig

__all__ = ["EagleHead", "EagleHeadConfig", "PossHead", "PossHeadConfig"]
