"""Device and dtype of draft heads: those of their target, unless the user chose others."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import cast

import torch
import transformers
from transformers import PreTrainedModel

from ..contract import DraftingContract
from ..errors import UnsupportedGenerationError
from ..target.borrowed import BorrowedModules

logger = logging.getLogger("hf_specheads")

DeviceMap = str | int | dict | torch.device | None  # the `device_map` argument of `from_pretrained`


def announce(line: str) -> None:
    """Logs something that was found or decided for the user, so that it is visible by default.

    The line is logged at level INFO if a handler shows that level. Otherwise (the default) it is logged as a warning,
    which Python and notebooks print. `logging.getLogger("hf_specheads")` and transformers' verbosity can silence it.
    """
    if transformers.utils.logging.get_verbosity() > logging.WARNING:
        return
    shown = logger.isEnabledFor(logging.INFO) and logger.hasHandlers()
    logger.log(logging.INFO if shown else logging.WARNING, "%s", line)


@dataclass(frozen=True)
class Placement:
    """Whether heads follow their target when they are bound to it.

    Attributes:
        device: Move the heads to the device of the target's `lm_head`.
        dtype: Convert the heads to the target's dtype.
    """

    device: bool = True
    dtype: bool = False

    @classmethod
    def asked_for(cls, device_map: DeviceMap, dtype: torch.dtype | str | None) -> Placement:
        """Placement of loaded heads: they follow in what the user did not specify."""
        return cls(device=device_map is None, dtype=dtype in (None, "auto"))

    def follow(self, heads: DraftingContract, target: PreTrainedModel, borrowed: BorrowedModules) -> None:
        """Moves heads to the modules that they borrow. Copies of the heads share their weights and move along.

        Raises:
            UnsupportedGenerationError: if heads that call modules of the target are to stay on another device, or if
                the heads are on the `meta` device, which has no weights to move.
        """
        module = cast(PreTrainedModel, heads)
        if heads.device.type == "meta":
            raise UnsupportedGenerationError(
                f"these {heads.config.method} heads are on the meta device, where tensors have no values; load them "
                "with `load_heads`, without setting `device_map` to 'meta', and do not move them to that device."
            )
        device = borrowed.device if self.device else heads.device
        dtype = target.dtype if self.dtype and not getattr(heads, "is_quantized", False) else heads.dtype
        if problem := device_problem(heads, device, borrowed):
            raise UnsupportedGenerationError(problem)
        if (device, dtype) == (heads.device, heads.dtype):
            return
        announce(
            f"{module.name_or_path or type(heads).__name__}: the heads follow their target, from {heads.device}, "
            f"{heads.dtype} to {device}, {dtype}"
        )
        module.to(device=device, dtype=dtype)  # type: ignore[arg-type]


def device_problem(heads: DraftingContract, device: torch.device, borrowed: BorrowedModules) -> str | None:
    """Says why heads on a device cannot call the modules they borrow, and what to do; `None` if they can."""
    if device == borrowed.device or not heads.borrows:
        return None
    return (
        f"these {heads.config.method} heads are to stay on {device}, and the target's `lm_head`, which drafting calls "
        f"or reads beside, is on {borrowed.device}; load them without a `device_map`, or with "
        f"device_map={{'': '{borrowed.device}'}}."
    )
