"""Draft heads, one module per method."""

from .eagle import EagleHead
from .poss import PossHead

__all__ = ["EagleHead", "PossHead"]
