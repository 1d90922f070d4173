"""What transformers' Trainer does around loss and backward, for a trainer with a `training_step` of its own."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn
from transformers import Trainer

from .arguments import DraftHeadTrainingArguments


class StepUpkeep(Trainer):
    """A `Trainer` whose optimizer may keep two sets of weights, and whose gradients may be clipped by value.

    Schedule-free optimizers train one set and use another, their average. Trainer switches to the average for an
    evaluation alone; here checkpoints and the heads after training are the average, too.
    """

    args: DraftHeadTrainingArguments

    def set_optimizer(self, mode: Literal["train", "eval"]) -> None:
        """Has the optimizer put the weights for training, or those for use, into the heads, if it keeps two sets."""
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def clear_cache(self) -> None:
        """Gives cached memory back to the device in every `torch_empty_cache_steps`-th step."""
        every = self.args.torch_empty_cache_steps
        if every is None or self.state.global_step % every:
            return
        clear_device_cache()
        if torch.backends.mps.is_available() and hasattr(torch.mps, "clear_graph_cache"):
            torch.mps.clear_graph_cache()

    def trained_parameters(self) -> list[nn.Parameter]:
        """What the next optimizer step changes."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        """As in Trainer, once a step, after clipping by norm; clips by value. The norm is that from before."""
        norm = super()._get_grad_norm(model, grad_norm)
        if self.args.max_grad_value is not None:
            self.accelerator.clip_grad_value_(self.trained_parameters(), self.args.max_grad_value)
        return norm

    def _load_best_model(self) -> None:
        self.set_optimizer("eval")  # before, because it changes the weights
        super()._load_best_model()


def compiling(args: DraftHeadTrainingArguments) -> dict[str, Any] | None:
    """Arguments of `torch.compile` for the target's decoder layers, as `torch_compile` asks for; `None`: not compiled.

    The target's forward is most of what a step computes outside of the heads, whose attention and losses are compiled
    on accelerators anyway. What Trainer itself would compile, the heads' forward, is not called in training.
    """
    if not args.torch_compile or args.shard_target:
        return None
    return {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}


def warn_of_settings(args: DraftHeadTrainingArguments) -> None:
    """Warns of settings that do something else than their name makes one think."""
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
