"""[`StandIn`]: a model with another `lm_head`, made without changing the original model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import torch
from torch import nn


class StandIn:
    """A copy of a model with another `lm_head`, which shares all other modules with the original.

    Args:
        model: The original model, which is not changed.
        lm_head: The module of the model to replace.
        project: Function that replaces it, [..., h] -> [..., Vp].

    Attributes:
        model: The copy.
        project: The function that was passed.
    """

    def __init__(self, model: nn.Module, lm_head: nn.Module, project: Callable[[torch.Tensor], torch.Tensor]):
        self.project = project
        *path, name = next(name for name, module in model.named_modules() if module is lm_head).split(".")
        self.model = inner = _shallow(model)
        for step in path:
            inner._modules[step] = inner = _shallow(cast(nn.Module, inner._modules[step]))
        inner._modules[name] = _Projecting(project)


class _Projecting(nn.Module):
    def __init__(self, project: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.project = project

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.project(hidden)


def _shallow(module: nn.Module) -> nn.Module:
    """Copies a module with its own table of submodules. A `forward` set on the instance, as by accelerate's hooks,
    would run the original module, so it is dropped; those of the submodules stay."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    vars(other).pop("forward", None)
    return other
