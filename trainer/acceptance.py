"""Acceptance while training: measured by `generate` itself, tried before the first step, and never a reason to stop.

What `generate` refuses is known when training begins, because one short call is made then. A target that takes no
trees is measured with chains; where nothing can be generated, evaluation is of losses alone, and says so.
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

TRIED_TOKENS = 3  # the prompt's own, and at least one of a round
GENERATED = ("acceptance_length", "pos_acc_")  # what metrics of generation are called

Prompt = dict[str, torch.Tensor]  # arguments of `generate` for one sequence
Rounds = tuple[list[list[int]], list[list[int]]]  # accepted and offered draft tokens of every round, per sequence


class AcceptanceEvaluation:
    """Acceptance of greedy generation with the heads being trained.

    Args:
        heads: That are trained.
        target: Their target, whole on every process, sharded over them, or spread over devices.
        args: Of the run.
        prompts: Token ids of prompts to continue; default: cut from the data that are evaluated.
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
        """Generates a few tokens, once, and warns of what evaluation will leave out or measure otherwise.

        Args:
            dataset: To be evaluated, or several by name; the longest prompt is tried.

        Raises:
            ValueError: if the best checkpoint is to be chosen by what cannot be measured.
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
        """Acceptance pooled over the rounds of all prompts: the code of `generate`, nothing else.

        Args:
            dataset: Prepared examples. Their prompts are shared out over processes that hold a whole target each.

        Returns:
            `acceptance_length` and `pos_acc_1`, ...; empty without prompts, and where generation fails.
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
        """Why this prompt cannot be continued on some process, `None` if it can on all."""
        copies = [prompt] * (1 if self._together else self.args.world_size)
        return self._everyones(copies, TRIED_TOKENS)[1]

    def _everyones(self, prompts: Sequence[Prompt], at_most: int | None = None) -> tuple[Rounds, str | None]:
        """Rounds of all prompts on all processes, and the first failure."""
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
        """Rounds of these prompts on this process, and why there are no more of them."""
        accepted: list[list[int]] = []
        offered: list[list[int]] = []
        was_training = self.heads.training
        self.heads.eval()
        try:
            for prompt in prompts:
                stats = self._generate(prompt, at_most)
                accepted += stats.num_accepted
                offered += stats.offered
        except Exception as error:  # of any class: whatever it is, the training goes on
            return (accepted, offered), _told(error)
        finally:
            self.heads.train(was_training)
        return (accepted, offered), None

    def _generate(self, prompt: Prompt, at_most: int | None) -> Any:
        """Statistics of a prompt's continuation, of `at_most` tokens or a few more."""
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
    """Arguments of `generate` for token ids."""
    row = torch.tensor([list(ids)])
    return {"input_ids": row, "attention_mask": torch.ones_like(row)}


def _length(prompt: Prompt) -> int:
    return prompt["input_ids"].shape[1]


class _Enough(StoppingCriteria):
    """Stops at a length, whatever length the call was checked for."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.new_full(input_ids.shape[:1], input_ids.shape[1] >= self.length, dtype=torch.bool)


def _told(error: Exception) -> str:
    """What `generate` refuses says it in a sentence; anything else is named by its class."""
    words = " ".join(str(error).split())
    return words if isinstance(error, ValueError) else f"{type(error).__name__}: {words}"
