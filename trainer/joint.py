"""Joint training of draft heads and a LoRA adapter of their target (Medusa-2, arXiv 2401.10774, section 2.2.2).

The target's own weights stay fixed. The gradient of the draft heads' losses flows into the adapter, so that the
target's features become easier to draft from. The target's own loss keeps the adapted target close to the original
target, or fits it to the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_specheads.heads.base import DraftHead
from hf_specheads.target.adapter import (
    ADAPTER_FOLDER,
    adapter_parameters,
    add_adapter,
    restore_adapter,
    without_adapter,
)

from .arguments import DraftHeadTrainingArguments
from .devices.sharding import decoder_layers
from .evaluation import LossMeter
from .trainer import DraftHeadTrainer
from .unroll.losses import masked_mean
from .unroll.unroll import PassLosses

IN_TRAINING = {"fingerprint": None}  # config's `target_adapter` while the adapter is being trained


@dataclass
class JointTrainingArguments(DraftHeadTrainingArguments):
    """Arguments of [`JointTrainer`], whose loss is that of [`DraftHeadTrainingArguments`] plus a loss of the target.

    The paper's weights are 1 for the target and 0.2 * 0.8^k for the next-token loss of head k.

    Args:
        target_lora_rank: Rank r of the adapter.
        target_lora_alpha: The adapter's product is scaled by alpha / r.
        target_lora_modules: Names of the adapted modules, separated by commas; `"all-linear"` adapts all linear
            modules except the `lm_head`.
        target_loss_weight: Weight of the target's own loss.
        self_distillation: If `True`, the target's loss is KL(p_0, p), where p_0 is the distribution with the adapter
            switched off, so that the target stays what it was (section 2.3.2). If `False`, it is the cross-entropy
            against the next token of the data, which also fits the target to the data.
        target_learning_rate: Peak learning rate of the adapter. Default: a quarter of `learning_rate`.
        heads_warmup_steps: Optimizer steps at the start that train only the draft heads, because gradients of
            untrained draft heads would spoil the target.
        target_gradient_checkpointing: Keep only the input of every decoder layer of the target and compute the layer
            again in the backward. The graph's memory falls by an order of magnitude; a step takes about a third
            longer.
        backward: Must be `"summed"`, because all passes share the target's graph.

    Raises:
        ValueError: if a value is out of range.
    """

    target_lora_rank: int = field(default=16, metadata={"help": "Rank of the target's adapter."})
    target_lora_alpha: float = field(
        default=32.0, metadata={"help": "The adapter's product is scaled by alpha / rank."}
    )
    target_lora_modules: str = field(default="all-linear", metadata={"help": "Adapted modules, separated by commas."})
    target_loss_weight: float = field(default=1.0, metadata={"help": "Weight of the target's own loss."})
    self_distillation: bool = field(
        default=True, metadata={"help": "Train the target to match itself without adapter."}
    )
    target_learning_rate: float | None = field(default=None, metadata={"help": "Learning rate of the adapter."})
    heads_warmup_steps: int = field(default=0, metadata={"help": "First steps, which train only the heads."})
    target_gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Compute the target's layers again in the backward."}
    )
    backward: str = field(default="summed", metadata={"help": "Must be 'summed'."})

    def __post_init__(self) -> None:
        super().__post_init__()
        minima = {"target_lora_rank": 1, "target_loss_weight": 0, "heads_warmup_steps": 0, "target_learning_rate": 0}
        for name, minimum in minima.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"`{name}` must be at least {minimum}, got {value!r}.")
        if self.target_lora_alpha <= 0:
            raise ValueError(f"`target_lora_alpha` must be above 0, got {self.target_lora_alpha!r}.")
        if self.backward != "summed":
            raise ValueError(
                f"`backward` must be 'summed' in joint training, got {self.backward!r}; all passes share the target's "
                "graph, so leave the option out."
            )
        if self.target_learning_rate is None:
            self.target_learning_rate = self.learning_rate / 4


class JointTrainer(DraftHeadTrainer):
    """Trains draft heads of any family together with an adapter of their target.

    The adapter is put on the target **in place**, and is saved in `target_adapter/` beside the draft heads; see
    `DraftHead.load_target_adapter`. Draft heads that already have an adapter continue with it; load it on the target
    first. The log holds `target_loss` besides the losses of the draft heads. Evaluation reports `eval_target_loss`
    and adds it, weighted, to `eval_loss`.

    Args:
        model, target, args: As in [`DraftHeadTrainer`], with [`JointTrainingArguments`].
        **kwargs: As in [`DraftHeadTrainer`].

    Raises:
        ValueError: if the target has other adapters.
        WrongTargetError: if the draft heads do not fit the target.
    """

    args: JointTrainingArguments
    trains_target = True

    def __init__(self, model: DraftHead, target: PreTrainedModel, args: JointTrainingArguments, **kwargs: Any):
        if not isinstance(args, JointTrainingArguments):
            raise ValueError(f"joint training takes JointTrainingArguments, got {type(args).__name__}.")
        model.check_target(target)
        if model.config.target_adapter is None:
            add_adapter(target, args.target_lora_rank, args.target_lora_alpha, args.target_lora_modules)
        model.config.target_adapter = dict(IN_TRAINING)
        super().__init__(model, target, args, **kwargs)
        self.adapter = adapter_parameters(target)
        if not self.adapter:
            raise ValueError(
                "the adapter on the target was not added by this package; call `heads.load_target_adapter(target)`."
            )
        if self.args.target_gradient_checkpointing:
            _checkpoint_layers(target)
        for parameter in self.adapter:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
            if self.args.world_size > 1:
                dist.broadcast(parameter.data, 0)
        self._target_loss: torch.Tensor | None = None
        self._train_target_losses, self._eval_target_losses = (
            LossMeter(1, self.args.device, ["target"]) for _ in range(2)
        )
        self._meters.append(self._train_target_losses)

    @property
    def in_heads_warmup(self) -> bool:
        """Whether the next optimizer step trains only the draft heads."""
        return self.state.global_step < self.args.heads_warmup_steps

    # ------------------------------------------------------------------ loss
    def features_of(
        self, batch: dict[str, torch.Tensor], num_items: torch.Tensor | float | None, training: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns features as [`DraftHeadTrainer`] does, but with their graph; also computes the target's own loss."""
        if "final_features" in batch:
            raise ValueError("joint training changes the target's features; train on data without stored features.")
        alone = training and self.in_heads_warmup
        teacher = None if alone or not self.args.self_distillation else self._features_without_adapter(batch)
        with torch.set_grad_enabled(torch.is_grad_enabled() and training and not alone):
            features, final = self.frozen_target.compute_features(batch, self.model.feature_layers)
            self._target_loss = None if alone else self.target_loss(batch, final, teacher, num_items)
        if self._target_loss is not None:
            meter = self._train_target_losses if training else self._eval_target_losses
            meter.add(0, PassLosses({"target": self._target_loss}, None))
            meter.steps += 0 if training else int(batch["loss_mask"][:, 1:].count_nonzero())
        return features, final

    @torch.no_grad()
    def _features_without_adapter(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with without_adapter(self.frozen_target.model):
            return self.frozen_target.compute_features(batch)[1]

    def target_loss(
        self,
        batch: dict[str, torch.Tensor],
        final_features: torch.Tensor,
        teacher: torch.Tensor | None,
        num_items: torch.Tensor | float | None,
    ) -> torch.Tensor:
        """Returns the target's own loss over the supervised tokens, a scalar.

        Args:
            batch: Batch from a collator.
            final_features: [B, T, H], final features of the adapted target.
            teacher: [B, T, H], final features of the target without its adapter, or `None` to learn from the data.
            num_items: Divisor of the loss. Default: the number of supervised tokens.
        """
        rows = batch["loss_mask"][:, 1:].flatten().nonzero()[:, 0]
        wanted = batch["input_ids"][:, 1:].flatten() if teacher is None else teacher[:, :-1].flatten(0, 1)
        # Logits are computed in chunks, and again in the backward, so that those of all rows never exist together.
        chunks = zip(
            final_features[:, :-1].flatten(0, 1)[rows].split(self.args.loss_chunk_rows),
            wanted[rows].split(self.args.loss_chunk_rows),
            strict=True,
        )
        values = [checkpoint(self._target_losses, *chunk, use_reentrant=False) for chunk in chunks]
        return masked_mean(torch.cat(values), num_items)

    def _target_losses(self, features: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Returns fp32 [R], the losses of features [R, H] against token ids [R] or a teacher's features [R, H]."""
        logits = self.frozen_target.lm_head(features).float()
        if wanted.dim() == 1:
            return F.cross_entropy(logits, wanted, reduction="none")
        with torch.no_grad(), without_adapter(self.frozen_target.model):
            teacher = self.frozen_target.lm_head(wanted).float().log_softmax(dim=-1)
        return F.kl_div(logits.log_softmax(dim=-1), teacher, reduction="none", log_target=True).sum(dim=-1)

    # ------------------------------------------------------------------ optimizer steps
    def trained_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of the draft heads, and those of the adapter after the warm-up."""
        return super().trained_parameters() + ([] if self.in_heads_warmup else self.adapter)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Creates the optimizer as Trainer does, with the adapter as a parameter group of its own."""
        optimizer = super().create_optimizer(model)
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if id(self.adapter[0]) not in known:
            rate, decay = self.args.target_learning_rate, self.args.weight_decay
            optimizer.add_param_group({"params": self.adapter, "lr": rate, "weight_decay": decay})
        return optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs the step of [`DraftHeadTrainer`], and clears the adapter's gradients, which Trainer leaves alone."""
        if self._micro_step == 0:
            for parameter in self.adapter:
                parameter.grad = None
        alone = self.in_heads_warmup
        loss = super().training_step(*args, **kwargs)
        self._train_target_losses.steps += int(self.accelerator.sync_gradients and not alone)
        return loss

    def shared_losses(self) -> list[torch.Tensor]:
        """Returns the target's own weighted loss, which shares a graph with the features that the draft heads read."""
        return [] if self._target_loss is None else [self.args.target_loss_weight * self._target_loss]

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self.accelerator.clip_grad_norm_(self.trained_parameters(), self.args.max_grad_norm)

    # ------------------------------------------------------------------ logging, evaluation
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs as [`DraftHeadTrainer`] does, and adds `target_loss` to training logs."""
        if "loss" in logs:
            logs.update(_renamed(self._train_target_losses.drain()))
        super().log(logs, start_time)

    def evaluated_losses(self, meter: LossMeter) -> dict[str, float]:
        """Returns the losses of [`DraftHeadTrainer`], with the adapted target's own loss added."""
        losses = super().evaluated_losses(meter)
        for name, value in _renamed(self._eval_target_losses.drain(per_step_of_all=True)).items():
            losses[name] = value
            losses["loss"] += self.args.target_loss_weight * value
        return losses

    # ------------------------------------------------------------------ files
    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)  # saving the draft heads also saves the adapter beside them
        self.model.config.target_adapter = dict(IN_TRAINING)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        restore_adapter(self.frozen_target.model, Path(resume_from_checkpoint) / ADAPTER_FOLDER)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        restore_adapter(self.frozen_target.model, Path(str(self.state.best_model_checkpoint)) / ADAPTER_FOLDER)


def _checkpoint_layers(target: PreTrainedModel) -> None:
    """Makes the backward compute every decoder layer again, one layer at a time.

    The checkpointing of transformers requires layers in training mode; this target stays in evaluation mode, so that
    its dropout is off.

    Raises:
        ValueError: for a target whose decoder layers cannot be found.
    """
    for layer in decoder_layers(target, "set target_gradient_checkpointing=False"):
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _renamed(losses: dict[str, float]) -> dict[str, float]:
    """Renames the meter's `target_loss_1` to `target_loss`, because the target has no draft positions."""
    return {name.removesuffix("_1"): value for name, value in losses.items()}
