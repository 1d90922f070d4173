"""One call of `generate`."""

from .loop import speculative_generate

__all__ = ["speculative_generate"]
