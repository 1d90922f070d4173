"""`DraftHeadTrainer`: a `transformers.Trainer` whose loss is the multi-position unroll."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import EvalLoopOutput

from hf_specheads.heads.base import DraftHead
from hf_specheads.target.statistics import FeatureStatistics

from .arguments import DraftHeadTrainingArguments
from .checkpoints import AtomicCheckpoints
from .data import cut_prompts, default_collator, prepare_dataset
from .evaluation import LossMeter, generation_metrics
from .noise import feature_noise, noisy_embedding
from .publishing import HubCards
from .target_features import FrozenTarget, unroll_inputs
from .unroll import DEFAULT_LOSSES, PassLosses, Unroll

STATISTICS_TOKENS = 8192  # whose features say what the target was


# The order counts: what `AtomicCheckpoints` holds back while a checkpoint is unfinished is the push with the card.
class DraftHeadTrainer(AtomicCheckpoints, HubCards):
    """Trains draft heads of any family on what a frozen target says.

    Logs every loss component per draft position (`feature_loss_1`, `token_loss_1`, `top_k_loss_1`, ...), position 1
    first. Evaluation adds `eval_acceptance_length` and `eval_pos_acc_i` of `target.generate(assistant_model=heads)`.
    What is pushed to the Hub has the model card of draft heads; see [`publishing.HubCards`].

    Gradients are summed over processes and divided by the number of supervised rows of the whole optimizer step, so a
    step does not depend on how its batch is split over processes and accumulation steps.

    Args:
        model: The heads to train.
        target: Their target. **Frozen in place**; neither optimized nor saved.
        args: [`DraftHeadTrainingArguments`].
        train_dataset, eval_dataset: `datasets` with `messages`, `text` or `input_ids`; see [`data.prepare_dataset`].
        processing_class: Tokenizer, needed for `messages` and `text`.
        data_collator: Default: padded or packed sequences, as `args.packing` says.
        eval_prompts: Token ids of prompts for the acceptance metrics; default: cut from `eval_dataset`.
        **kwargs: As in `transformers.Trainer`.

    Raises:
        ValueError: if the passes leave a specialist untrained, or for FSDP and DeepSpeed.
        WrongTargetError: if the heads do not fit the target.
    """

    args: DraftHeadTrainingArguments
    model: DraftHead

    def __init__(
        self,
        model: DraftHead,
        target: PreTrainedModel,
        args: DraftHeadTrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        data_collator: Callable | None = None,
        eval_prompts: Sequence[Sequence[int]] | None = None,
        **kwargs: Any,
    ):
        self.num_passes = resolve_num_passes(model, args)
        model.bind(target, follow=False)
        with args.main_process_first(desc="tokenizing"):
            prepare = partial(prepare_dataset, tokenizer=processing_class, max_length=args.max_length)
            train_dataset = prepare(train_dataset)
            if isinstance(eval_dataset, dict):
                eval_dataset = {name: prepare(dataset) for name, dataset in eval_dataset.items()}
            else:
                eval_dataset = prepare(eval_dataset)
        if data_collator is None:
            data_collator = default_collator(processing_class, args.max_length, args.packing)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        self._refuse_sharding()
        if args.upstream_masking:
            warnings.warn(
                "upstream_masking=True trains with masks that drafting does not have; for parity experiments only.",
                stacklevel=2,
            )
        self.frozen_target = FrozenTarget(target)
        if not getattr(target, "hf_device_map", None):
            # transformers wraps `nn.Module.to`, which hides its `self` from type checkers.
            target.to(self.args.device)  # type: ignore[arg-type]
        if hasattr(model.config, "trained_positions"):  # heads whose positions differ
            model.config.trained_positions = self.num_passes
        model.config.train_max_length = args.max_length
        self._feature_statistics = FeatureStatistics(model.feature_layers)
        self._eval_prompts = eval_prompts
        self._micro_step = 0
        # Losses of weight 0 are logged only where the paper's three belong to the method.
        self.loss_names = [name for name, weight in args.loss_weights.items() if weight or name in DEFAULT_LOSSES]
        self._train_losses = LossMeter(self.num_passes, self.args.device, self.loss_names)

    def _refuse_sharding(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                "draft heads are a few layers and are trained data-parallel; FSDP and DeepSpeed are not supported. "
                "Launch without them (for a large target, load it with `device_map`)."
            )
        if self.args.n_gpu > 1:
            raise ValueError(
                f"{self.args.n_gpu} devices are visible to one process; start one process per device with "
                "`accelerate launch`, or show it a single device."
            )

    # ------------------------------------------------------------------ loss
    def start_unroll(
        self,
        batch: dict[str, torch.Tensor],
        num_items: torch.Tensor | float | None = None,
        *,
        training: bool = True,
        separate_backward: bool = False,
    ) -> Unroll:
        """The unroll of one batch: target features, input noise when training, and the rows."""
        features, final_features = self.features_of(batch, num_items, training)
        if training:
            self.remember_features(features, batch["loss_mask"])
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
            num_items=num_items,
            separate_backward=separate_backward,
        )

    def remember_features(self, features: torch.Tensor, loss_mask: torch.Tensor) -> None:
        """Keeps scale and centre of the first features in the heads' config, to tell whether a target is the same.

        Args:
            features: [B, T, F].
            loss_mask: [B, T].
        """
        statistics = self._feature_statistics
        if statistics.levels and statistics.tokens < STATISTICS_TOKENS:
            statistics.add(features.detach(), loss_mask)
            self.model.config.feature_statistics = statistics.to_dict()

    def features_of(
        self, batch: dict[str, torch.Tensor], num_items: torch.Tensor | float | None, training: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the heads read, [B, T, F], and the target's final features, [B, T, H].

        Args:
            batch: As the collators make it.
            num_items: Divisor of the losses, for trainers that have one of the target's.
            training: Whether the heads are being trained on the batch, or evaluated.
        """
        return self.frozen_target.features(batch, self.model.feature_layers)

    def weighted_loss(self, losses: PassLosses, position: int) -> torch.Tensor:
        """Weighted loss of one pass; scalar."""
        total = losses.weighted(**self.args.loss_weights) * self.args.pass_decay**position
        return total / self.num_passes if self.args.pass_reduction == "mean" else total

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, list[PassLosses]]]:
        """Weighted sum of all passes' losses and of [`shared_losses`], in one graph."""
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
        """Gradients of one batch. The heads are called without their DDP wrapper, and the gradients are summed over
        processes here, because several backwards per forward are more than DDP handles."""
        self.model.train()
        inputs = self._prepare_inputs(inputs)
        if num_items_in_batch is None:
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        loss = self.backward_batch(inputs, num_items_in_batch)
        self._micro_step += 1
        if self.accelerator.sync_gradients:
            self._micro_step = 0
            self._train_losses.steps += 1
            self._sum_gradients()
        # Trainer logs the mean over processes of what is a share of the whole step's loss.
        return loss * self.args.world_size

    def backward_batch(self, inputs: dict[str, torch.Tensor], num_items: torch.Tensor | float) -> torch.Tensor:
        """Forward and backward of one batch, the losses chunk by chunk; returns the weighted loss, detached."""
        apart = self.args.backward == "per_pass" and self.model.passes_are_detached
        together = 1 if apart else self.num_passes
        total = torch.zeros((), device=self.args.device)
        with self.accelerator.autocast():
            unroll = self.start_unroll(inputs, num_items, separate_backward=apart)
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
        return total

    def shared_losses(self) -> list[torch.Tensor]:
        """Weighted losses of the batch besides those of the passes, for trainers that have some."""
        return []

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """As `accelerator.backward` scales a loss before its backward."""
        loss = loss / self.accelerator.gradient_accumulation_steps
        return loss if self.accelerator.scaler is None else self.accelerator.scaler.scale(loss)

    def trained_parameters(self) -> list[nn.Parameter]:
        """What the next optimizer step changes."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def _sum_gradients(self) -> None:
        """All-reduce of all gradients as one flat tensor; a parameter unused on this process counts as zero."""
        if self.args.world_size <= 1:
            return
        parameters = self.trained_parameters()
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(summed.view_as(grad))

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
        """Seeded by run, step and process, so that a resumed run draws what an uninterrupted one draws."""
        step = [self.args.seed, self.state.global_step, self._micro_step, self.args.process_index]
        key = np.random.SeedSequence([*step, *kind])
        return torch.Generator(device).manual_seed(int(key.generate_state(1)[0]))

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor:
        """Supervised rows of one optimizer step, over all its batches and processes."""
        count = sum(torch.count_nonzero(batch["loss_mask"][:, 1:]) for batch in batch_samples)
        count = torch.as_tensor(count, device=device, dtype=torch.float32)
        if self.args.world_size > 1:
            dist.all_reduce(count)
        return count

    # ------------------------------------------------------------------ logging, evaluation
    def reset_losses(self) -> None:
        """Forgets losses gathered for the log so far."""
        self._train_losses.drain()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in Trainer; training logs gain each loss component per draft position."""
        if "loss" in logs:
            logs.update(self._train_losses.drain())
        super().log(logs, start_time)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> torch.utils.data.DataLoader:
        """As in Trainer, but processes may get different numbers of batches instead of some examples twice."""
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
        """Losses without noise over the evaluation set, and what generation with these heads accepts."""
        self.model.to(self.args.device).eval()
        meter = LossMeter(self.num_passes, self.args.device, self.loss_names)
        for batch in dataloader:
            inputs = self._prepare_inputs(batch)
            with torch.no_grad(), self.accelerator.autocast():
                unroll = self.start_unroll(inputs, 1.0, training=False)  # divided by 1: sums over rows
                passes = unroll.run_passes(self.num_passes, chunk_rows=self.args.loss_chunk_rows)
                for position, losses in enumerate(passes):
                    meter.add(position, losses)
            meter.steps += int(unroll.supervised.numel())
        metrics = self.evaluated_losses(meter)
        metrics.update(generation_metrics(self.model, self.frozen_target.model, self._prompts(dataloader), self.args))
        return EvalLoopOutput(
            predictions=None,  # type: ignore[arg-type]  # as Trainer's own loop, which wants losses only
            label_ids=None,
            metrics={f"{metric_key_prefix}_{name}": value for name, value in metrics.items()},
            num_samples=self.num_examples(dataloader),
        )

    def evaluated_losses(self, meter: LossMeter) -> dict[str, float]:
        """Losses of an evaluation per supervised row: `loss`, weighted as in training, and every component."""
        components = meter.drain(per_step_of_all=True)
        loss = 0.0
        for name, value in components.items():
            kind, _, position = name.rpartition("_loss_")
            if weight := self.args.loss_weights[kind]:
                loss += weight * self.args.pass_decay ** (int(position) - 1) * value
        return {"loss": loss / (self.num_passes if self.args.pass_reduction == "mean" else 1), **components}

    def _prompts(self, dataloader: torch.utils.data.DataLoader) -> list[list[int]]:
        args = self.args
        if self._eval_prompts is not None:
            return [list(prompt) for prompt in self._eval_prompts[: args.eval_acceptance_prompts]]
        return cut_prompts(dataloader.dataset, args.eval_acceptance_prompts, args.eval_prompt_length)


def resolve_num_passes(heads: DraftHead, args: DraftHeadTrainingArguments) -> int:
    """Draft positions to train: as the arguments say, else as the heads' config does.

    Raises:
        ValueError: if some specialist would have no position, or the heads are pruned.
    """
    passes = args.num_passes or heads.default_passes
    if problem := heads.passes_problem(passes):
        raise ValueError(f"num_passes={passes} {problem}")
    if heads.pruned_token_ids is not None:
        raise ValueError(
            f"these heads are pruned to {heads.config.pruned_vocab_size} tokens, which is for drafting; call "
            "`heads.prune_draft_vocabulary(None)` to train them, and prune them again afterwards."
        )
    return passes
