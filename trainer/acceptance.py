"""Measures acceptance during training with `generate` itself.

One short call of `generate` before the first step shows what it refuses. For a target that supports no draft trees,
chains are measured. If nothing can be generated, a warning says so, and evaluation is restricted to losses. Failures
of generation never stop a training that has begun.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from hf_specheads.heads.base import DraftHead
from hf_specheads.metrics import acceptance_length, position_acceptance
from hf_specheads.tuning.turns import every_round_drafts

from .arguments import DraftHeadTrainingArguments
from .data.batches import cut_prompts
from .data.images import ImageChats
from .devices.sharding import led_by_the_first, share_here

TRIED_TOKENS = 3  # enough for the token from the prompt's forward and at least one round
GENERATED = ("acceptance_length", "pos_acc_")  # names, or their beginnings, of metrics measured by generation

Prompt = dict[str, torch.Tensor]  # arguments of `generate` for one sequence
Rounds = tuple[list[list[int]], list[list[int]]]  # accepted and offered draft tokens of every round, per sequence


class AcceptanceEvaluation:
    """Measures the acceptance of greedy generation with the draft heads being trained.

    Args:
        heads: The draft heads being trained.
        target: Their target: whole on every process, sharded over processes, or spread over devices.
        args: Training arguments of the run.
        prompts: Token ids of prompts to continue. Default: prompts cut from the evaluation data.
    """

    def __init__(
        self,
        heads: DraftHead,
        target: PreTrainedModel,
        args: DraftHeadTrainingArguments,
        prompts: Sequence[Sequence[int]] | None = None,
    ):
        self.heads, self.target, self.args, self.prompts = heads, target, args, prompts
        self._together = share_here(target) is not None
        self._chain = False
        self._tried = False
        self._possible = True

    @torch.no_grad()
    def rehearse(self, dataset: Any) -> None:
        """Tries generation once with a few tokens, and warns of metrics that evaluation will leave out or measure with
        chains.

        Args:
            dataset: Evaluation data set, or a dict of them, of which the first is used. The longest prompt is tried.

        Raises:
            ValueError: if `metric_for_best_model` is a metric that cannot be measured.
        """
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()))
        if self._tried or not (prompts := self._prompts_of(dataset)):
            return
        self._tried = True
        longest = max(prompts, key=_length)
        if (refused := self._problem(longest)) is None:
            return
        self._chain = not self.heads.tree_config.is_chain
        if self._chain and self._problem(longest) is None:
            warnings.warn(f"evaluation drafts chains instead of trees: {refused}", stacklevel=3)
            return
        self._possible = False
        metric = str(self.args.metric_for_best_model or "").removeprefix("eval_")
        if metric.startswith(GENERATED):
            raise ValueError(
                f"metric_for_best_model={self.args.metric_for_best_model!r} cannot be measured with this target: "
                f"{refused} Choose another, e.g. metric_for_best_model=loss."
            )
        warnings.warn(
            f"evaluation leaves out acceptance_length and pos_acc, and measures losses alone: {refused}", stacklevel=3
        )

    @torch.no_grad()
    def measure(self, dataset: Any) -> dict[str, float]:
        """Measures acceptance with `generate`, pooled over the rounds of all prompts.

        Args:
            dataset: Prepared examples. If every process holds a whole target, the prompts are divided among processes.

        Returns:
            `acceptance_length` and `pos_acc_1`, ...; empty without prompts, or if generation fails.
        """
        self.rehearse(dataset)
        if not self._possible or not (prompts := self._prompts_of(dataset)):
            return {}
        (accepted, offered), failed = self._everyones(prompts)
        if failed is not None:
            warnings.warn(f"this evaluation leaves out acceptance_length and pos_acc: {failed}", stacklevel=2)
            return {}
        if not any(accepted):
            return {}
        metrics = {"acceptance_length": acceptance_length(accepted)}
        places = enumerate(position_acceptance(accepted, offered), start=1)
        return metrics | {f"pos_acc_{i}": value for i, value in places}

    def _prompts_of(self, dataset: Any) -> list[Prompt]:
        count = self.args.eval_acceptance_prompts
        if self.prompts is not None:
            return [as_prompt(prompt) for prompt in self.prompts[:count]]
        if isinstance(dataset, ImageChats):
            return dataset.prompts(count)
        return [as_prompt(ids) for ids in cut_prompts(dataset, count, self.args.eval_prompt_length)]

    def _problem(self, prompt: Prompt) -> str | None:
        """Returns why the prompt cannot be continued on some process, `None` if it can be on all."""
        copies = [prompt] * (1 if self._together else self.args.world_size)
        return self._everyones(copies, TRIED_TOKENS)[1]

    def _everyones(self, prompts: Sequence[Prompt], at_most: int | None = None) -> tuple[Rounds, str | None]:
        """Generates from all prompts on all processes; returns all rounds and the first failure."""
        processes, index = self.args.world_size, self.args.process_index
        if processes <= 1:
            parts = [self._continue(prompts, at_most)]
        elif self._together:
            parts = [led_by_the_first(self.target, lambda: self._continue(prompts, at_most))]
        else:
            parts = [(([], []), None)] * processes
            dist.all_gather_object(parts, self._continue(prompts[index::processes], at_most))
        accepted = [sequence for (theirs, _), _ in parts for sequence in theirs]
        offered = [sequence for (_, theirs), _ in parts for sequence in theirs]
        return (accepted, offered), next((failed for _, failed in parts if failed is not None), None)

    def _continue(self, prompts: Sequence[Prompt], at_most: int | None) -> tuple[Rounds, str | None]:
        """Generates from the prompts on this process; returns their rounds, and the failure that ended generation."""
        accepted: list[list[int]] = []
        offered: list[list[int]] = []
        was_training = self.heads.training
        self.heads.eval()
        try:
            for prompt in prompts:
                stats = self._generate(prompt, at_most)
                accepted += stats.num_accepted
                offered += stats.offered
        except Exception as error:  # training must go on, whatever the error
            return (accepted, offered), _told(error)
        finally:
            self.heads.train(was_training)
        return (accepted, offered), None

    def _generate(self, prompt: Prompt, at_most: int | None) -> Any:
        """Continues a prompt and returns the statistics; with `at_most`, generation stops after about that many
        tokens."""
        heads, inputs = self.heads, {name: value.to(self.target.device) for name, value in prompt.items()}
        if self._chain:
            depth = heads.tree_config.depth
            heads = heads.with_tree(kind="chain", lookup=0, top_k=1, total_tokens=depth + 1)
        enough = [] if at_most is None else [_Enough(_length(prompt) + at_most)]
        with every_round_drafts(heads):
            cast(Any, self.target).generate(
                **inputs,
                assistant_model=heads,
                do_sample=False,
                max_new_tokens=self.args.eval_max_new_tokens,
                stopping_criteria=StoppingCriteriaList(enough),
            )
        return heads.last_stats


def as_prompt(ids: Sequence[int]) -> Prompt:
    """Returns arguments of `generate` for token ids."""
    row = torch.tensor([list(ids)])
    return {"input_ids": row, "attention_mask": torch.ones_like(row)}


def _length(prompt: Prompt) -> int:
    return prompt["input_ids"].shape[1]


class _Enough(StoppingCriteria):
    """Stops generation at a length. Unlike a smaller `max_new_tokens`, this leaves the call's checks of its maximum
    length as in a full evaluation."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.new_full(input_ids.shape[:1], input_ids.shape[1] >= self.length, dtype=torch.bool)


def _told(error: Exception) -> str:
    """Returns the message of a refusal (`ValueError`) as it is, and that of any other error with its class."""
    words = " ".join(str(error).split())
    return words if isinstance(error, ValueError) else f"{type(error).__name__}: {words}"
