"""`DraftHeadTrainer`: a `transformers.Trainer` whose loss is the multi-position unroll."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from hf_specheads.heads.base import DraftHead
from hf_specheads.target.statistics import FeatureStatistics

from .acceptance import AcceptanceEvaluation
from .arguments import DraftHeadTrainingArguments
from .checkpoints import AtomicCheckpoints
from .data.anchors import anchors_of, count_rounds
from .data.collators import choose_collator
from .data.packing import Examples
from .data.preparing import DataReport, endless, prepare_for
from .devices.gradients import first_process_first, refuse_sharding, sum_gradients
from .devices.sharding import in_step, shard_target
from .devices.utilisation import peak_flops
from .evaluation import AgreementMeter, LossMeter, Throughput
from .guards import StepGuard
from .identity import run_identity
from .methods import complete_arguments, progress_of, resolve_num_passes
from .probes import refuse_leaking_packing, refuse_other_features, refuse_other_logits
from .publishing import HubCards
from .unroll.noise import feature_noise, noisy_embedding
from .unroll.target_features import FrozenTarget, unroll_inputs
from .unroll.unroll import DEFAULT_LOSSES, PassLosses, Unroll
from .upkeep import compiling, warn_of_settings


# The order of bases matters: `AtomicCheckpoints` must wrap the push of `HubCards` to delay it until a checkpoint is
# complete.
class DraftHeadTrainer(AtomicCheckpoints, HubCards):
    """Trains draft heads of any family on the features and the distribution of a frozen target.

    The log holds every loss component per draft position (`feature_loss_1`, `token_loss_1`, `top_k_loss_1`, ...;
    positions count from 1), the agreement of the drafts with the target (`accuracy_1`, `acceptance_1`, ...), and
    tokens per second. Evaluation adds `eval_acceptance_length` and `eval_pos_acc_i`, measured with
    `target.generate(assistant_model=heads)`. Pushes to the Hub carry the model card of draft heads; see
    [`publishing.HubCards`].

    Gradients are summed over processes and divided by the number of supervised rows of the whole optimizer step, so a
    step does not depend on how its batch is split over processes and accumulation steps.

    Args:
        model: Draft heads to train.
        target: Target of the draft heads. **Frozen in place**; neither optimized nor saved.
        args: [`DraftHeadTrainingArguments`].
        train_dataset, eval_dataset: `datasets` with chats, texts or token ids; see [`preparing.prepare_dataset`].
        processing_class: Tokenizer, required unless the data are token ids; a processor for chats with images.
        data_collator: Default: pads or packs sequences, depending on `args.packing`.
        eval_prompts: Token ids of the prompts for the acceptance metrics. Default: prompts cut from `eval_dataset`.
        **kwargs: As in `transformers.Trainer`.

    Raises:
        ValueError: if the passes leave a specialist untrained, or for FSDP and DeepSpeed.
        WrongTargetError: if the draft heads do not fit the target.
    """

    args: DraftHeadTrainingArguments
    model: DraftHead
    trains_target: ClassVar[bool] = False  # whether an adapter of the target is trained too

    def __init__(
        self,
        model: DraftHead,
        target: PreTrainedModel,
        args: DraftHeadTrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        data_collator: Callable | None = None,
        eval_prompts: Sequence[Sequence[int]] | None = None,
        **kwargs: Any,
    ):
        args = copy.copy(args)  # `complete_arguments` changes it in place
        complete_arguments(args, model, joint=self.trains_target)
        self.num_passes = resolve_num_passes(model, args)
        model.bind(target, follow=False)
        self.data_report = DataReport()
        with first_process_first(args):
            train_dataset = prepare_for(args, train_dataset, processing_class, self.data_report, pack=args.packing)
            eval_dataset = prepare_for(args, eval_dataset, processing_class)
        if not hasattr(train_dataset, "__len__") and hasattr(train_dataset, "column_names"):
            train_dataset = endless(train_dataset)
            # Every process reads the stream and keeps its share: dispatched batches would need equal lengths.
            args.accelerator_config = copy.copy(args.accelerator_config)
            args.accelerator_config.dispatch_batches = False
        if data_collator is None:
            data = [train_dataset, eval_dataset]
            data_collator = choose_collator(data, model, target, processing_class, args, self.trains_target)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        given = self.optimizer
        self.optimizer_given = None if given is None else type(given).__name__
        refuse_sharding(self)
        warn_of_settings(args)
        self._place_target(target)
        refuse_other_features(self.frozen_target, model.feature_layers, model.config.feature_size)
        if hasattr(model.config, "trained_positions"):  # only some methods record this
            model.config.trained_positions = self.num_passes
        model.config.train_max_length = args.max_length
        self._feature_statistics = FeatureStatistics(model.feature_layers)
        self._acceptance = AcceptanceEvaluation(model, self.frozen_target.model, self.args, eval_prompts)
        self._begin_measuring()

    def _place_target(self, target: PreTrainedModel) -> None:
        """Places the target on its devices, and refuses a target whose logits or packed rows would be wrong."""
        args, self.frozen_target = self.args, FrozenTarget(target, compiling(self.args))
        if args.shard_target:  # before `to(device)`, so that no device holds the whole target
            shard_target(target, args, self.trains_target)
        if not getattr(target, "hf_device_map", None):
            # transformers wraps `nn.Module.to` in a way that hides `self` from type checkers.
            target.to(args.device)  # type: ignore[arg-type]
        refuse_other_logits(self.frozen_target)
        if args.packing:
            refuse_leaking_packing(self.frozen_target)

    def _begin_measuring(self) -> None:
        args, self._micro_step = self.args, 0
        self.loss_names = [name for name, weight in args.loss_weights.items() if weight or name in DEFAULT_LOSSES]
        self._train_losses = LossMeter(self.num_passes, self.args.device, self.loss_names)
        self._meters = [self._train_losses]  # training meters, rolled back when a step is skipped
        self._agreement = AgreementMeter(self.num_passes, self.args.device)
        self._throughput = Throughput(peak_flops(args))
        self._step_guard, self._step_loss = StepGuard(args.max_nonfinite_steps), torch.zeros((), dtype=torch.float32)

    def identity(self) -> dict[str, Any]:
        """Returns what identifies this run; see [`identity.run_identity`]."""
        given = self.optimizer_given
        return run_identity(self.model, self.args, self.num_passes, self.train_dataset, given)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains as `Trainer.train` does, after a trial of the generation that evaluations will run."""
        if self.eval_dataset is not None:
            self._acceptance.rehearse(self.eval_dataset)
        output = super().train(*args, **kwargs)
        self.set_optimizer("eval")
        return output

    # ------------------------------------------------------------------ loss
    def start_unroll(
        self,
        batch: dict[str, torch.Tensor],
        num_items: torch.Tensor | float | None = None,
        *,
        training: bool = True,
        separate_backward: bool = False,
        measure: bool = False,
    ) -> Unroll:
        """Builds the unroll of one batch: computes target features, adds noise when training, and forms the rows."""
        features, final_features = self.features_of(batch, num_items, training)
        if training:
            self._feature_statistics.remember(self.model.config, features, batch["loss_mask"])
        noise = self._noise(features, batch) if training else None
        return Unroll(
            self.model,
            **unroll_inputs(batch, features, final_features, noise),
            embed_tokens=self._embedding(batch) if training else self.frozen_target.embed_tokens,
            lm_head=self.frozen_target.lm_head,
            num_passes=self.num_passes,
            top_k=self.args.top_k,
            lk_decay=self.args.lk_decay,
            losses=tuple(self.loss_names),
            upstream_masking=self.args.upstream_masking and self.num_passes > 1,
            anchors=anchors_of(
                self.model, batch, self.args.num_anchors, self._seed(2) if training else self.args.seed
            ),
            num_items=num_items,
            separate_backward=separate_backward,
            measure=measure,
        )

    def features_of(
        self, batch: dict[str, torch.Tensor], num_items: torch.Tensor | float | None, training: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the features that the draft heads read, [B, T, F], and the target's final features, [B, T, H].

        Args:
            batch: Batch from a collator.
            num_items: Divisor of the losses, used by trainers that add a loss of the target itself.
            training: Whether the draft heads are being trained on the batch rather than evaluated.
        """
        return self.frozen_target.features(batch, self.model.feature_layers)

    def weighted_loss(self, losses: PassLosses, position: int) -> torch.Tensor:
        """Returns the weighted loss of one pass, a scalar."""
        total = losses.weighted(**self.args.loss_weights_at(progress_of(self.state))) * self.args.decay_at(position)
        return total / self.num_passes if self.args.pass_reduction == "mean" else total

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, list[PassLosses]]]:
        """Returns the weighted sum of the losses of all passes and of [`shared_losses`], in one graph."""
        unroll = self.start_unroll(inputs, num_items_in_batch, training=self.model.training)
        passes = [unroll.next_pass() for _ in range(self.num_passes)]
        loss = torch.stack([self.weighted_loss(losses, position) for position, losses in enumerate(passes)]).sum()
        loss = sum(self.shared_losses(), loss)
        return (loss, {"passes": passes}) if return_outputs else loss

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Computes the gradients of one batch. The draft heads run without their DDP wrapper, and gradients are summed
        over processes here, because DDP does not support several backwards per forward."""
        self.model.train()
        self.set_optimizer("train")
        inputs = self._prepare_inputs(inputs)
        if num_items_in_batch is None:
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        if self._micro_step == 0:
            self._step_loss = torch.zeros((), dtype=torch.float32, device=self.args.device)
            for meter in self._meters:
                meter.mark()
        loss = self._throughput.of(inputs, lambda: self.backward_batch(inputs, num_items_in_batch))
        self.clear_cache()
        self._step_loss += loss
        self._micro_step += 1
        if self.accelerator.sync_gradients:
            self._micro_step = 0
            sum_gradients(self.trained_parameters(), self.args.world_size)
            self._count_or_skip_step()
        # Trainer logs the mean over processes, but this loss is one process's share of the step's loss.
        return loss * self.args.world_size

    def _count_or_skip_step(self) -> None:
        """Counts the step, or clears its gradients if its loss or gradients are infinite or NaN."""
        scaled = self.accelerator.scaler is not None  # a gradient scaler checks gradients itself and lowers its scale
        parameters = self.trained_parameters()
        guarded = {"step": self.state.global_step + 1, "processes": self.args.world_size}
        if self._step_guard.passes(self._step_loss, () if scaled else parameters, **guarded):
            self._train_losses.steps += 1
            return
        for parameter in parameters:
            parameter.grad = None
        for meter in self._meters:
            meter.roll_back()

    def backward_batch(self, inputs: dict[str, torch.Tensor], num_items: torch.Tensor | float) -> torch.Tensor:
        """Runs forward and backward of one batch, with losses in chunks; returns the weighted loss, detached."""
        apart = self.args.backward == "per_pass" and self.model.passes_are_detached
        together = 1 if apart else self.num_passes
        total = torch.zeros((), dtype=torch.float32, device=self.args.device)
        with self.accelerator.autocast():
            unroll = self.start_unroll(inputs, num_items, separate_backward=apart, measure=self._is_logged_step())
        total += sum(loss.detach() for loss in self.shared_losses())
        for first in range(0, self.num_passes, together):
            with self.accelerator.autocast():
                passes = unroll.run_passes(
                    together,
                    self.weighted_loss,
                    self.accelerator.backward,
                    self.args.loss_chunk_rows,
                    [self._scaled(loss) for loss in self.shared_losses()],
                )
            for position, losses in enumerate(passes, start=first):
                self._train_losses.add(position, losses)
                total += self.weighted_loss(losses, position)
        unroll.finish_backward()
        self._agreement.sums += unroll.measured
        return total

    def _is_logged_step(self) -> bool:
        """Whether the current step is logged; other steps skip the cost of measuring agreement with the target."""
        step = self.state.global_step + 1
        return step % max(int(self.state.logging_steps or 1), 1) == 0 or (step == 1 and self.args.logging_first_step)

    def shared_losses(self) -> list[torch.Tensor]:
        """Returns weighted losses of the batch other than those of the passes; subclasses may add some."""
        return []

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Scales a loss the way `accelerator.backward` does before its backward."""
        loss = loss / self.accelerator.gradient_accumulation_steps
        return loss if self.accelerator.scaler is None else self.accelerator.scaler.scale(loss)

    def _noise(self, features: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor | None:
        if self.args.feature_noise == 0:
            return None
        generator = self._noise_generator(features.device)
        return feature_noise(features, batch, self.args.feature_noise, self.args.feature_noise_scaling, generator)

    def _embedding(self, batch: dict[str, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        embed_tokens, alpha = self.frozen_target.embed_tokens, self.args.embedding_noise
        if alpha == 0:
            return embed_tokens
        return noisy_embedding(embed_tokens, batch, alpha, self._noise_generator(batch["input_ids"].device, 1))

    def _noise_generator(self, device: torch.device, *kind: int) -> torch.Generator:
        return torch.Generator(device).manual_seed(self._seed(*kind))

    def _seed(self, *kind: int) -> int:
        """Derives a seed from run, step and process, so that a resumed run draws the same numbers as an uninterrupted
        run."""
        step = [self.args.seed, self.state.global_step, self._micro_step, self.args.process_index]
        return int(np.random.SeedSequence([*step, *kind]).generate_state(1)[0])

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor:
        """Counts the rows at which rounds start, over all batches and processes of one optimizer step."""
        return count_rounds(self.model, batch_samples, self.args, device)

    # ------------------------------------------------------------------ logging, evaluation
    def reset_losses(self) -> None:
        """Discards the losses and agreement gathered for the log so far."""
        self._train_losses.drain()
        self._agreement.drain()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs as `Trainer.log` does, and adds to training logs each loss component per draft position, accuracy and
        acceptance per draft position (of the logged steps only), tokens per second, and `mfu` of known devices."""
        if "loss" in logs:
            logs.update({**self._train_losses.drain(), **self._agreement.drain(), **self._throughput.drain()})
            if self._step_guard.skipped:
                logs["skipped_steps"] = self._step_guard.skipped
        super().log(logs, start_time)

    def get_eval_dataloader(self, eval_dataset: str | Examples | None = None) -> torch.utils.data.DataLoader:
        """Builds the dataloader as Trainer does, but gives processes different numbers of batches where needed rather
        than repeat examples."""
        even = self.accelerator.even_batches
        self.accelerator.even_batches = False
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.accelerator.even_batches = even

    def evaluation_loop(
        self,
        dataloader: torch.utils.data.DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Measures the losses over the evaluation set, without noise, and the acceptance of generation."""
        with self._throughput.paused():
            return self._evaluation_loop(dataloader, metric_key_prefix)

    def _evaluation_loop(self, dataloader: torch.utils.data.DataLoader, prefix: str) -> EvalLoopOutput:
        self.model.to(self.args.device).eval()
        self.set_optimizer("eval")
        meter = LossMeter(self.num_passes, self.args.device, self.loss_names)
        agreement = AgreementMeter(self.num_passes, self.args.device)
        model = self.frozen_target.model
        for batch in in_step(dataloader, model) if self.args.shard_target else dataloader:
            inputs = self._prepare_inputs(batch)
            with torch.no_grad(), self.accelerator.autocast():
                # A divisor of 1 makes the losses sums over rows.
                unroll = self.start_unroll(inputs, 1.0, training=False, measure=True)
                passes = unroll.run_passes(self.num_passes, chunk_rows=self.args.loss_chunk_rows)
                for position, losses in enumerate(passes):
                    meter.add(position, losses)
            meter.steps += unroll.num_rounds
            agreement.sums += unroll.measured
        metrics = {**self.evaluated_losses(meter), **agreement.drain()}
        metrics.update(self._acceptance.measure(dataloader.dataset))
        return EvalLoopOutput(
            predictions=None,  # type: ignore[arg-type]  # Trainer's own loop also returns None for losses only
            label_ids=None,
            metrics={f"{prefix}_{name}": value for name, value in metrics.items()},
            num_samples=self.num_examples(dataloader),
        )

    def evaluated_losses(self, meter: LossMeter) -> dict[str, float]:
        """Returns evaluation losses per supervised row: `loss`, weighted as at the end of training, and every
        component."""
        components = meter.drain(per_step_of_all=True)
        loss = 0.0
        for name, value in components.items():
            kind, _, position = name.rpartition("_loss_")
            if weight := self.args.loss_weights_at(1)[kind]:
                loss += weight * self.args.decay_at(int(position) - 1) * value
        return {"loss": loss / (self.num_passes if self.args.pass_reduction == "mean" else 1), **components}
