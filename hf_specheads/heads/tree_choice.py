"""The choice of the draft tree: the assigned one, the one tuned on this machine, the saved one, or the default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..contract import DraftingContract
from ..generation.pace.lessons import lesson_of
from ..tree.config import DraftTreeConfig
from ..tree.default import default_tree, machine_key, tuned_entry, tuned_tree, without_machine
from ..tuning.tune import TuningResult, tune
from ..tuning.turns import Prompts
from ..tuning.warmup import warmup


class TreeChoice(DraftingContract, nn.Module):
    """The part of [`DraftHead`] that decides which draft tree to use, and can tune it."""

    _chosen_tree: DraftTreeConfig | None
    _found_tree: DraftTreeConfig | None

    @property
    def tree_config(self) -> DraftTreeConfig:
        """The draft tree: the assigned one, else the one tuned on this machine, the saved one, or the default."""
        if self._chosen_tree is not None:
            return self._chosen_tree
        if self._found_tree is None:
            tree = tuned_tree(self.config.tuned, machine_key(self.device, self.dtype))
            if tree is None and self.config.tree_config is not None:
                tree = DraftTreeConfig().replace(**self.config.tree_config)
            self._found_tree = tree or default_tree(self.device, self.published_tree, self.max_draft_positions)
        return self._found_tree

    @tree_config.setter
    def tree_config(self, tree: DraftTreeConfig) -> None:
        self._chosen_tree = tree

    @property
    def tree_is_assigned(self) -> bool:
        """Whether a user has assigned the draft tree."""
        return self._chosen_tree is not None

    @property
    def published_tree(self) -> DraftTreeConfig:
        """The tree that the method's authors use, which suits large targets on accelerators."""
        return DraftTreeConfig()

    def forget_tree(self) -> None:
        """Withdraws an assigned tree, so that the tree is chosen automatically, as after loading."""
        self._chosen_tree = self._found_tree = None

    @property
    def learnt_tree(self) -> DraftTreeConfig | None:
        """The tree that has paid most so far in this process's calls with a single sequence; `None` if a tree was
        assigned, if there were too few rounds, or if drafting did not pay. `save_pretrained(folder, learnt_tree=True)`
        saves it as the tree tuned on this machine."""
        lesson = None if self.tree_is_assigned else lesson_of(self.memory)
        return None if lesson is None else lesson.tree

    def write_trees(self, learnt: bool = False) -> None:
        """Writes trees to the config. An assigned tree becomes the saved tree and removes one tuned on this machine.
        If none was assigned, `learnt=True` writes the [`learnt_tree`] as the one tuned on this machine."""
        key = machine_key(self.device, self.dtype)
        if self._chosen_tree is not None:
            self.config.tree_config = self._chosen_tree.to_dict()
            self.config.tuned = without_machine(self.config.tuned, key) or None
        elif learnt and (lesson := lesson_of(self.memory)) is not None:
            entry = tuned_entry(key, lesson.tree, lesson.tokens_per_second, lesson.plain_tokens_per_second)
            self.config.tuned = [*without_machine(self.config.tuned, key), entry]

    def tune(self, target: PreTrainedModel, prompts: Prompts, **options: Any) -> TuningResult:
        """Measures which draft tree is fastest with this target on this machine, and uses that tree from now on:

            print(heads.tune(target, prompts, tokenizer=tokenizer))
            heads.save_pretrained(folder)  # saves the tree, for this machine

        Arguments and errors are those of [`hf_specheads.tuning.tune`].
        """
        return tune(target, self, prompts, **options)

    def warmup(
        self, target: PreTrainedModel, *, batch_sizes: Sequence[int] = (1,), max_length: int | None = None
    ) -> float:
        """Compiles the steps of rounds ahead of the first request, and shows a progress bar:

            heads = load_heads(folder, compile=True)
            heads.warmup(target, batch_sizes=(1, 4), max_length=1024)

        Arguments, result and errors are those of [`hf_specheads.tuning.warmup.warmup`].
        """
        return warmup(target, self, batch_sizes=batch_sizes, max_length=max_length)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._found_tree = None  # a move or a new dtype may change the tuned or default tree
        return super()._apply(*args, **kwargs)
