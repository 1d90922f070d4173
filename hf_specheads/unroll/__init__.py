"""Unrolling heads in training: one pass per draft position."""

from .rows import DraftedPass, TrainingRows, later

__all__ = ["DraftedPass", "TrainingRows", "later"]
