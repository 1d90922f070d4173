"""Draft trees as values: their configuration, their shape and the tree of one round."""

from .published import EAGLE_CHOICES, MEDUSA_CHOICES

__all__ = ["EAGLE_CHOICES", "MEDUSA_CHOICES"]
