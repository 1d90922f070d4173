"""The engine behind one call of `generate` with draft heads."""

from .call import speculative_generate

__all__ = ["speculative_generate"]
