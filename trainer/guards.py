"""Guards against steps and checkpoints with infinite or NaN values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn


class NonFiniteError(FloatingPointError):
    """Losses, gradients or weights are infinite or NaN; the newest checkpoint was saved before that."""


class StepGuard:
    """Decides whether a step is skipped, counts skipped steps, and raises after several in a row.

    A step is skipped on all processes or on none. Skipping leaves weights and optimizer unchanged, so checkpoints
    written meanwhile are valid.

    Args:
        limit: Number of consecutive skipped steps at which [`passes`] raises.

    Attributes:
        skipped: Number of steps skipped so far.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.skipped = 0
        self._in_a_row = 0

    def passes(self, loss: torch.Tensor, parameters: Iterable[nn.Parameter], *, step: int, processes: int) -> bool:
        """Returns whether loss and gradients of a step are finite, so that the step may be taken.

        Args:
            loss: Loss of the step, a scalar.
            parameters: Parameters with the gradients of the whole step; empty if a gradient scaler checks them itself.
            step: Number of the step, for the error message.
            processes: Number of processes that train together.

        Raises:
            NonFiniteError: if `limit` steps in a row were skipped.
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
                f"loss or gradients were infinite or NaN in {self._in_a_row} steps in a row, the last of them "
                f"step {step}. All of them were skipped, so the newest checkpoint is valid. Lower learning_rate, "
                "check the data, or train without fp16."
            )
        return False


def refuse_nonfinite_weights(model: nn.Module) -> None:
    """Refuses a model with infinite or NaN weights, before it is saved and replaces an older checkpoint.

    Raises:
        NonFiniteError: naming the first weight that is infinite or NaN.
    """
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter.detach()).all()):
            raise NonFiniteError(
                f"the weight {name!r} is infinite or NaN, so no checkpoint is written and none is deleted; resume "
                "from the newest one with a lower learning_rate."
            )
