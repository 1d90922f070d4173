"""Steps that must not be taken: those whose loss or gradients are infinite or no numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn


class NonFiniteError(FloatingPointError):
    """Training that has left the numbers; the newest checkpoint is from before."""


class StepGuard:
    """Counts steps that are skipped, and gives up after several in a row.

    A step is skipped on every process or on none. Skipping leaves weights and optimiser as they are, so a checkpoint
    that is written meanwhile is good.

    Args:
        limit: Steps in a row after which [`passes`] raises.

    Attributes:
        skipped: Steps skipped so far.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.skipped = 0
        self._in_a_row = 0

    def passes(self, loss: torch.Tensor, parameters: Iterable[nn.Parameter], *, step: int, processes: int) -> bool:
        """Whether a step may be taken.

        Args:
            loss: The step's, scalar.
            parameters: With the gradients of the whole step; of none, for a gradient scaler that looks at them itself.
            step: For the message.
            processes: That train together.

        Raises:
            NonFiniteError: if too many steps in a row may not.
        """
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        finite = torch.isfinite(loss.detach().float())
        for norm in torch._foreach_norm(grads) if grads else ():
            finite = finite & torch.isfinite(norm.float()).to(finite.device)
        if processes > 1:
            told = finite.to(torch.int32)
            dist.all_reduce(told, op=dist.ReduceOp.MIN)
            finite = told.bool()
        if bool(finite):
            self._in_a_row = 0
            return True
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= self.limit:
            raise NonFiniteError(
                f"loss or gradients were infinite or no numbers in {self._in_a_row} steps in a row, the last of them "
                f"step {step}; none was taken, and the newest checkpoint is good. Lower learning_rate, check the "
                "data, or train without fp16."
            )
        return False


def refuse_nonfinite_weights(model: nn.Module) -> None:
    """Before a checkpoint is written, and another one for it deleted.

    Raises:
        NonFiniteError: naming the first weight that is infinite or no number.
    """
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter.detach()).all()):
            raise NonFiniteError(
                f"the weight {name!r} is infinite or no number, so no checkpoint is written and none is deleted; go "
                "on from the newest one with a lower learning_rate."
            )
