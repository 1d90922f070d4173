"""What is drafted, as a value."""

from .published import EAGLE_CHOICES, MEDUSA_CHOICES

__all__ = ["EAGLE_CHOICES", "MEDUSA_CHOICES"]
