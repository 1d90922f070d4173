"""Training of draft heads: the multi-position unroll, its losses, and a `transformers.Trainer` around them.

Installed as `hf_specheads.trainer`; run as `python -m hf_specheads.trainer --config recipe.yaml key=value ...`.
"""

from .unroll import PassLosses, Unroll, unroll_losses

__all__ = ["PassLosses", "Unroll", "unroll_losses"]
