"""A model with another `lm_head`, for as long as we need one: a model that is not ours is never changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import torch
from torch import nn


class StandIn:
    """A model with another `lm_head` that shares all its other modules, and that nobody else sees.

    Args:
        model: The model, which is left as it is.
        lm_head: A module of it.
        project: What to compute instead, [..., h] -> [..., Vp].

    Attributes:
        model: The stand-in.
        project: As given.
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
    """The same module with a table of submodules of its own. A forward that was hung on it, as accelerate's hooks are,
    would run the original: it is left out; those of the submodules stay."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    vars(other).pop("forward", None)
    return other
