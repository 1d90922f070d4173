"""Work that transformers' Trainer does around loss and backward, for a trainer with its own `training_step`."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn
from transformers import Trainer

from .arguments import DraftHeadTrainingArguments


class StepUpkeep(Trainer):
    """A `Trainer` that supports schedule-free optimizers and clipping by value.

    Schedule-free optimizers keep two sets of weights: those being trained, and their average, which is meant for use.
    Trainer switches to the average only for evaluations; this class also switches for checkpoints and at the end of
    training.
    """

    args: DraftHeadTrainingArguments

    def set_optimizer(self, mode: Literal["train", "eval"]) -> None:
        """Switches the draft heads to the weights for training or for use, if the optimizer keeps both."""
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def clear_cache(self) -> None:
        """Empties the device's memory cache every `torch_empty_cache_steps` steps."""
        every = self.args.torch_empty_cache_steps
        if every is None or self.state.global_step % every:
            return
        clear_device_cache()
        if torch.backends.mps.is_available() and hasattr(torch.mps, "clear_graph_cache"):
            torch.mps.clear_graph_cache()

    def trained_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that the next optimizer step changes."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the gradient norm as Trainer does, then clips by value. Trainer calls this once per step, after
        clipping by norm; the norm is that before clipping."""
        norm = super()._get_grad_norm(model, grad_norm)
        if self.args.max_grad_value is not None:
            self.accelerator.clip_grad_value_(self.trained_parameters(), self.args.max_grad_value)
        return norm

    def _load_best_model(self) -> None:
        self.set_optimizer("eval")  # must come first, because it changes the weights
        super()._load_best_model()


def compiling(args: DraftHeadTrainingArguments) -> dict[str, Any] | None:
    """Returns the arguments of `torch.compile` for the target's decoder layers; `None` if they are not compiled.

    `torch_compile` compiles the target's layers, because its forward is most of a step's work outside of the draft
    heads, whose attention and losses are compiled on accelerators anyway. Trainer would compile the forward of the
    draft heads, which training does not call.
    """
    if not args.torch_compile or args.shard_target:
        return None
    return {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}


def warn_of_settings(args: DraftHeadTrainingArguments) -> None:
    """Warns of settings whose effect differs from what their names suggest."""
    if args.torch_compile and args.shard_target:
        warnings.warn(
            "torch_compile=True compiles no layers of a sharded target, which are gathered for every forward; the "
            "heads' attention and losses are compiled on accelerators without it.",
            stacklevel=3,
        )
    if args.upstream_masking:
        warnings.warn(
            "upstream_masking=True trains with masks that drafting does not have; for parity experiments only.",
            stacklevel=3,
        )
