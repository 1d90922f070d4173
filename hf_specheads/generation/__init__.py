"""One call of `generate`."""

from .call import speculative_generate

__all__ = ["speculative_generate"]
