"""Projections from hidden states to logits: copying some of their rows, and the weight of a target's `lm_head`."""

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import nn
from transformers import PreTrainedModel

from .borrowed import BorrowedModules
from .identity import target_sizes
from .logits import IDENTITY, LogitFunction

ROWS_AT_ONCE = 256  # unit vectors given to a module in one call, each of which reads one column of its weight


# ---------------------------------------------------------------------- rows of projections to logits
@dataclass(frozen=True)
class Projection:
    """A copy of some rows of a projection to logits: `[..., H] -> [..., Vp]`.

    Attributes:
        weight: [Vp, H], contiguous.
        bias: [Vp], or `None`.
        after: Function that the target applies to the output of its `lm_head`; the identity for projections that
            belong to the heads.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    after: LogitFunction = IDENTITY

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.after(nn.functional.linear(hidden.to(self.weight), self.weight, self.bias))


def has_plain_weight(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a linear module is a plain `nn.Linear`: not quantised, offloaded, adapted or wrapped."""
    if type(module) is not nn.Linear:
        return False
    weight = getattr(module, "weight", None)
    return (
        type(weight) in (nn.Parameter, torch.Tensor)
        and weight.dtype.is_floating_point
        and weight.device.type != "meta"
    )


@torch.no_grad()
def projection_rows(module: nn.Module, width: int, token_ids: torch.Tensor, like: torch.Tensor) -> Projection:
    """Copies rows of a projection, from its weight or, if the module is not plain, by calling it on unit vectors.

    Args:
        module: Linear map from [..., H] to [..., V], possibly with a bias.
        width: Width H of the module's inputs.
        token_ids: int64 [Vp], the rows to copy.
        like: A tensor with the device and dtype of the module's inputs, used if the module is called.
    """
    if has_plain_weight(module):
        ids = token_ids.to(module.weight.device)
        return Projection(module.weight.detach()[ids], None if module.bias is None else module.bias.detach()[ids])
    bias = module(like.new_zeros(1, width))[0, token_ids.to(like.device)]
    columns = []
    for start in range(0, width, ROWS_AT_ONCE):
        units = torch.eye(width, dtype=like.dtype, device=like.device)[start : start + ROWS_AT_ONCE]
        columns.append(module(units)[:, token_ids.to(like.device)] - bias)
    return Projection(torch.cat(columns).T.contiguous(), bias if bool(bias.any()) else None)


def output_weight(target: PreTrainedModel) -> torch.Tensor:
    """Returns the weight [V, H] from which a target's logits follow, except for a soft-cap.

    This is the weight of the target's `lm_head` times its multipliers. If the `lm_head` is not a plain linear module,
    e.g. quantised or offloaded, the weight is read by calling the module.
    """
    rows = torch.arange(target.config.get_text_config(decoder=True).vocab_size)
    like = torch.zeros(1, dtype=target.dtype, device=BorrowedModules.of(target).device)
    weight = projection_rows(target.get_output_embeddings(), target_sizes(target)["feature_size"], rows, like).weight
    scale = LogitFunction.of(target).scale
    return weight if scale == 1.0 else weight * scale
