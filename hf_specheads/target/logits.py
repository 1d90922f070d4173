"""What a target applies to the output of its `lm_head` to get its logits: multipliers and a final soft-cap.

    logits = soft_cap * tanh(scale * lm_head(feature) / soft_cap)

Heads that draft through the target's `lm_head`, and losses that compare with the target's distribution, need the whole
function: `lm_head` alone yields the same most probable token but another distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import PreTrainedModel

# Names of config fields, as transformers' modeling code reads them.
MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")  # Cohere; Falcon-H1; Muse
DIVISORS = ("logits_scaling",)  # Granite, MiniCPM3
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap")  # Gemma, NanoChat; RecurrentGemma
MULTIPLY_BY_LOGITS_SCALING = ("hyperclovax",)  # `logits_scaling` multiplies here, and divides in all other families


@dataclass(frozen=True)
class LogitFunction:
    """Maps the output of a target's `lm_head` to the target's logits.

    Attributes:
        scale: Factor applied before the soft-cap.
        soft_cap: The c of `c * tanh(logits / c)`; `None` without a soft-cap.
    """

    scale: float = 1.0
    soft_cap: float | None = None

    @classmethod
    def of(cls, target: PreTrainedModel) -> Self:
        """Reads the function from the target's config. The trainer tests that it is complete before it trains."""
        config = target.config.get_text_config(decoder=True)
        scale = 1.0
        for name in MULTIPLIERS:
            scale *= _number(config, name) or 1.0
        for name in DIVISORS:
            divisor = _number(config, name) or 1.0
            multiplies = str(config.model_type).startswith(MULTIPLY_BY_LOGITS_SCALING)
            scale = scale * divisor if multiplies else scale / divisor
        caps = [cap for name in SOFT_CAPS if (cap := _number(config, name))]
        return cls(scale, caps[0] if caps else None)

    @property
    def is_identity(self) -> bool:
        """Whether the target's logits are exactly the output of its `lm_head`."""
        return self == IDENTITY

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the target's logits, with the dtype and shape [..., V] of the `lm_head`'s output."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits


IDENTITY = LogitFunction()


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
