"""Which tree heads draft: the assigned one, the one tuned on this machine, the saved one, or the device's default."""

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
    """The part of [`DraftHead`] that knows which draft tree is in force."""

    _chosen_tree: DraftTreeConfig | None
    _found_tree: DraftTreeConfig | None

    @property
    def tree_config(self) -> DraftTreeConfig:
        """The tree in force: the assigned one, else the one tuned on this machine, the saved one, or the device's."""
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
        """Whether a user has assigned the tree in force."""
        return self._chosen_tree is not None

    @property
    def published_tree(self) -> DraftTreeConfig:
        """The tree the authors of the method use, made for large targets on accelerators."""
        return DraftTreeConfig()

    def forget_tree(self) -> None:
        """Leaves the tree alone again, as after loading."""
        self._chosen_tree = self._found_tree = None

    @property
    def learnt_tree(self) -> DraftTreeConfig | None:
        """The tree that has paid most in the calls of this process so far, one sequence each; `None` while there were
        too few of them, where a tree was assigned, or where drafts did not pay. `save_pretrained(folder,
        learnt_tree=True)` saves it as the one tuned on this machine."""
        lesson = None if self.tree_is_assigned else lesson_of(self.memory)
        return None if lesson is None else lesson.tree

    def write_trees(self, learnt: bool = False) -> None:
        """Puts an assigned tree into the config, in the place of one tuned on this machine; if none was assigned and
        the [`learnt_tree`] is asked for, that one as the one tuned on this machine."""
        key = machine_key(self.device, self.dtype)
        if self._chosen_tree is not None:
            self.config.tree_config = self._chosen_tree.to_dict()
            self.config.tuned = without_machine(self.config.tuned, key) or None
        elif learnt and (lesson := lesson_of(self.memory)) is not None:
            entry = tuned_entry(key, lesson.tree, lesson.tokens_per_second, lesson.plain_tokens_per_second)
            self.config.tuned = [*without_machine(self.config.tuned, key), entry]

    def tune(self, target: PreTrainedModel, prompts: Prompts, **options: Any) -> TuningResult:
        """Measures which draft tree is fastest with this target on this machine, and uses it from now on:

            print(heads.tune(target, prompts, tokenizer=tokenizer))
            heads.save_pretrained(folder)  # remembers it, for this machine

        Arguments and errors as in [`hf_specheads.tuning.tune`].
        """
        return tune(target, self, prompts, **options)

    def warmup(
        self, target: PreTrainedModel, *, batch_sizes: Sequence[int] = (1,), max_length: int | None = None
    ) -> float:
        """Compiles the steps of rounds before the first request comes, under a progress bar:

            heads = load_heads(folder, compile=True)
            heads.warmup(target, batch_sizes=(1, 4), max_length=1024)

        Arguments, result and errors as in [`hf_specheads.tuning.warmup.warmup`].
        """
        return warmup(target, self, batch_sizes=batch_sizes, max_length=max_length)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._found_tree = None  # heads that move or change their type may have another
        return super()._apply(*args, **kwargs)
