"""Where heads live, and in which dtype: with their target, as far as nobody chose otherwise."""

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

DeviceMap = str | int | dict | torch.device | None  # as `from_pretrained` takes it


def announce(line: str) -> None:
    """Logs what was found or decided for the user, visibly unless logging was turned down.

    The line is information; where nobody shows information, as by default, it is logged as a warning, which Python
    and notebooks print. `logging.getLogger("hf_specheads")` and transformers' verbosity silence it.
    """
    if transformers.utils.logging.get_verbosity() > logging.WARNING:
        return
    shown = logger.isEnabledFor(logging.INFO) and logger.hasHandlers()
    logger.log(logging.INFO if shown else logging.WARNING, "%s", line)


@dataclass(frozen=True)
class Placement:
    """What heads follow their target in when they are bound to it.

    Attributes:
        device: To the device of its `lm_head`.
        dtype: To its dtype.
    """

    device: bool = True
    dtype: bool = False

    @classmethod
    def asked_for(cls, device_map: DeviceMap, dtype: torch.dtype | str | None) -> Placement:
        """Of heads that are loaded: what the user named stays."""
        return cls(device=device_map is None, dtype=dtype in (None, "auto"))

    def follow(self, heads: DraftingContract, target: PreTrainedModel, borrowed: BorrowedModules) -> None:
        """Moves heads to what they borrow; weights are shared with copies of the heads, which move along.

        Raises:
            UnsupportedGenerationError: if heads that call modules of the target are to stay on another device, or if
                heads are on the `meta` device, where there are no weights to move.
        """
        module = cast(PreTrainedModel, heads)
        if heads.device.type == "meta":
            raise UnsupportedGenerationError(
                f"these {heads.config.method} heads are on the meta device, where tensors hold no numbers; load them "
                "with `load_heads` and no `device_map` of 'meta', and do not move them there."
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
    """Why heads on a device cannot call what they borrow, with the mend; `None` if they can, or borrow nothing."""
    if device == borrowed.device or not heads.borrows:
        return None
    return (
        f"these {heads.config.method} heads are to stay on {device}, and the target's `lm_head`, which drafting calls "
        f"or reads beside, is on {borrowed.device}; load them without a `device_map`, or with "
        f"device_map={{'': '{borrowed.device}'}}."
    )
