"""Joint training of heads and a LoRA adapter of their target (Medusa-2, arXiv 2401.10774, section 2.2.2).

The target's own weights stay as they are. Its adapter learns to keep saying what the target says (or what the data
says) while its features become easier to draft from: the gradient of the heads' losses flows into it.
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

IN_TRAINING = {"fingerprint": None}  # `target_adapter` of heads whose adapter still changes


@dataclass
class JointTrainingArguments(DraftHeadTrainingArguments):
    """Arguments of [`JointTrainer`]; the loss is the heads' as in [`DraftHeadTrainingArguments`] plus the target's.

    (The paper's weights: 1 for the target, 0.2 * 0.8^k for the next-token loss of head k.)

    Args:
        target_lora_rank: r of the adapter.
        target_lora_alpha: The adapter's product counts alpha / r times.
        target_lora_modules: Names of the adapted modules, separated by commas; `"all-linear"` for all but the
            `lm_head`.
        target_loss_weight: Weight of the target's own loss.
        self_distillation: The target's loss is KL(p_0, p) against the target with its adapter switched off, so that it
            stays what it was (section 2.3.2); otherwise the cross-entropy against the next token of the data, which
            also fits the target to them.
        target_learning_rate: Peak learning rate of the adapter, default a quarter of the heads'.
        heads_warmup_steps: Optimizer steps at the start in which only the heads are trained: gradients of fresh heads
            would spoil the target.
        target_gradient_checkpointing: Keep of every decoder layer of the target its input only, and compute the layer
            again in the backward: memory of the graph falls by an order, time of a step grows by about a third.
        backward: `"summed"`; the heads share the target's graph.

    Raises:
        ValueError: if a value is out of range.
    """

    target_lora_rank: int = field(default=16, metadata={"help": "Rank of the target's adapter."})
    target_lora_alpha: float = field(default=32.0, metadata={"help": "The adapter counts alpha / rank times."})
    target_lora_modules: str = field(default="all-linear", metadata={"help": "Adapted modules, with commas."})
    target_loss_weight: float = field(default=1.0, metadata={"help": "Weight of the target's own loss."})
    self_distillation: bool = field(default=True, metadata={"help": "Keep to the target without its adapter."})
    target_learning_rate: float | None = field(default=None, metadata={"help": "Learning rate of the adapter."})
    heads_warmup_steps: int = field(default=0, metadata={"help": "Steps that train the heads alone."})
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
                f"`backward` must be 'summed' in joint training, got {self.backward!r}: all passes share the target's "
                "graph; leave it out."
            )
        if self.target_learning_rate is None:
            self.target_learning_rate = self.learning_rate / 4


class JointTrainer(DraftHeadTrainer):
    """Trains heads of any family, and an adapter of their target with them.

    The adapter is put on the target **in place**, and is saved in `target_adapter/` beside the heads; see
    `DraftHead.load_target_adapter`. Heads that come with one go on with theirs (load it on the target first). Logs
    `target_loss` besides the heads' losses; evaluation adds `eval_target_loss` to `eval_loss` with its weight.

    Args:
        model, target, args: As in [`DraftHeadTrainer`], with [`JointTrainingArguments`].
        **kwargs: As in [`DraftHeadTrainer`].

    Raises:
        ValueError: if the target has other adapters.
        WrongTargetError: if the heads do not fit the target.
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
                "the adapter on the target was not put there by this package; use `heads.load_target_adapter(target)`."
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
        """Whether the next optimizer step trains the heads alone."""
        return self.state.global_step < self.args.heads_warmup_steps

    # ------------------------------------------------------------------ loss
    def features_of(
        self, batch: dict[str, torch.Tensor], num_items: torch.Tensor | float | None, training: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in [`DraftHeadTrainer`], but they know how they came about; computes the target's own loss as well."""
        if "final_features" in batch:
            raise ValueError("joint training changes the target's features; train on batches without stored ones.")
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
        """The target's own loss over the supervised tokens; scalar.

        Args:
            batch: As the collators make it.
            final_features: [B, T, H], of the adapted target.
            teacher: [B, T, H], of the target without its adapter, or `None` to learn from the data.
            num_items: Divisor, default the number of supervised tokens.
        """
        rows = batch["loss_mask"][:, 1:].flatten().nonzero()[:, 0]
        wanted = batch["input_ids"][:, 1:].flatten() if teacher is None else teacher[:, :-1].flatten(0, 1)
        # Chunk by chunk, and again in the backward, so that the logits of all rows never exist.
        chunks = zip(
            final_features[:, :-1].flatten(0, 1)[rows].split(self.args.loss_chunk_rows),
            wanted[rows].split(self.args.loss_chunk_rows),
            strict=True,
        )
        values = [checkpoint(self._target_losses, *chunk, use_reentrant=False) for chunk in chunks]
        return masked_mean(torch.cat(values), num_items)

    def _target_losses(self, features: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Losses of rows [R, H], fp32 [R], towards tokens [R] or a teacher's features [R, H]."""
        logits = self.frozen_target.lm_head(features).float()
        if wanted.dim() == 1:
            return F.cross_entropy(logits, wanted, reduction="none")
        with torch.no_grad(), without_adapter(self.frozen_target.model):
            teacher = self.frozen_target.lm_head(wanted).float().log_softmax(dim=-1)
        return F.kl_div(logits.log_softmax(dim=-1), teacher, reduction="none", log_target=True).sum(dim=-1)

    # ------------------------------------------------------------------ optimizer steps
    def trained_parameters(self) -> list[nn.Parameter]:
        """Heads, and the adapter once it is trained."""
        return super().trained_parameters() + ([] if self.in_heads_warmup else self.adapter)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As in Trainer, with the adapter as a group of its own."""
        optimizer = super().create_optimizer(model)
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if id(self.adapter[0]) not in known:
            rate, decay = self.args.target_learning_rate, self.args.weight_decay
            optimizer.add_param_group({"params": self.adapter, "lr": rate, "weight_decay": decay})
        return optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As in [`DraftHeadTrainer`]; Trainer clears the gradients of the heads only."""
        if self._micro_step == 0:
            for parameter in self.adapter:
                parameter.grad = None
        alone = self.in_heads_warmup
        loss = super().training_step(*args, **kwargs)
        self._train_target_losses.steps += int(self.accelerator.sync_gradients and not alone)
        return loss

    def shared_losses(self) -> list[torch.Tensor]:
        """The target's own loss of the batch, which runs through the graph that the heads' rows come from."""
        return [] if self._target_loss is None else [self.args.target_loss_weight * self._target_loss]

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self.accelerator.clip_grad_norm_(self.trained_parameters(), self.args.max_grad_norm)

    # ------------------------------------------------------------------ logging, evaluation
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in [`DraftHeadTrainer`]; training logs gain `target_loss`."""
        if "loss" in logs:
            logs.update(_renamed(self._train_target_losses.drain()))
        super().log(logs, start_time)

    def evaluated_losses(self, meter: LossMeter) -> dict[str, float]:
        """As in [`DraftHeadTrainer`], with the adapted target's own loss."""
        losses = super().evaluated_losses(meter)
        for name, value in _renamed(self._eval_target_losses.drain(per_step_of_all=True)).items():
            losses[name] = value
            losses["loss"] += self.args.target_loss_weight * value
        return losses

    # ------------------------------------------------------------------ files
    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)  # the heads write the adapter beside themselves
        self.model.config.target_adapter = dict(IN_TRAINING)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        restore_adapter(self.frozen_target.model, Path(resume_from_checkpoint) / ADAPTER_FOLDER)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        restore_adapter(self.frozen_target.model, Path(str(self.state.best_model_checkpoint)) / ADAPTER_FOLDER)


def _checkpoint_layers(target: PreTrainedModel) -> None:
    """Has every decoder layer computed again in the backward, by itself.

    (transformers' own way asks for layers in training mode, which this target is not in: its dropout stays off.)

    Raises:
        ValueError: for a target whose layers nobody finds.
    """
    for layer in decoder_layers(target, "set target_gradient_checkpointing=False"):
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _renamed(losses: dict[str, float]) -> dict[str, float]:
    """`target_loss_1` of the meter as `target_loss`: the target has no draft positions."""
    return {name.removesuffix("_1"): value for name, value in losses.items()}
