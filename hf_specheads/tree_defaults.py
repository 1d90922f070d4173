"""Which draft tree heads use when nobody says: the one tuned on this machine, the saved one, or the device's default.

The choice depends on where the heads lie, never on a measurement in passing: the same call grows the same trees.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from .configuration import DraftHeadConfig, DraftTreeConfig

if TYPE_CHECKING:
    from .tuning import TuningResult

# On a CPU every verified node past the first few costs time (docs/tuning.md). The fastest trees measured for the
# shipped heads were chains of 4 to 8 where drafts are good, and 8 nodes of depth 1 to 3 where they are not; this lies
# between.
CPU_TREE = DraftTreeConfig(depth=4, top_k=3, total_tokens=8)


def default_tree(device: torch.device, published: DraftTreeConfig, deepest: int | None = None) -> DraftTreeConfig:
    """The tree of heads for which none was ever chosen.

    Args:
        device: Where the heads are.
        published: What the method's authors use, on accelerators, where verifying many nodes costs hardly more than
            one.
        deepest: Draft positions the heads have, `None` without limit.
    """
    tree = CPU_TREE if device.type == "cpu" else published
    if deepest is None or tree.depth <= deepest:
        return tree
    return tree.replace(depth=deepest)


def machine_name(device: torch.device) -> str:
    """What tells machines apart that need trees of their own: the accelerator, or processor and number of cores."""
    if device.type != "cpu":
        backend = getattr(torch, device.type)
        return str(backend.get_device_name(device)) if hasattr(backend, "get_device_name") else device.type
    return _processor()


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} logical cores"


def machine_key(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What a tuned tree is for: `machine`, `dtype`, and on a CPU the `threads`."""
    threads = torch.get_num_threads() if device.type == "cpu" else None
    return {"machine": machine_name(device), "dtype": str(dtype).removeprefix("torch."), "threads": threads}


def tuned_tree(tuned: list[dict[str, Any]] | None, key: dict[str, Any]) -> DraftTreeConfig | None:
    """The tree tuned for a machine, `None` if there is none."""
    for entry in reversed(tuned or []):
        if all(entry.get(name) == value for name, value in key.items()):
            return DraftTreeConfig().replace(**entry["tree_config"])
    return None


def without_machine(tuned: list[dict[str, Any]] | None, key: dict[str, Any]) -> list[dict[str, Any]]:
    """The tuned trees of other machines."""
    return [entry for entry in tuned or [] if any(entry.get(name) != value for name, value in key.items())]


class DefaultTrees:
    """The part of [`DraftHead`] that knows which draft tree is in force."""

    config: DraftHeadConfig
    device: torch.device
    dtype: torch.dtype
    max_draft_positions: int | None
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
    def published_tree(self) -> DraftTreeConfig:
        """The tree the authors of the method use, made for large targets on accelerators."""
        return DraftTreeConfig()

    def forget_tree(self) -> None:
        """Leaves the tree alone again, as after loading."""
        self._chosen_tree = self._found_tree = None

    def write_trees(self) -> None:
        """Puts an assigned tree into the config, in the place of one tuned on this machine."""
        if self._chosen_tree is not None:
            self.config.tree_config = self._chosen_tree.to_dict()
            self.config.tuned = without_machine(self.config.tuned, machine_key(self.device, self.dtype)) or None

    def tune(self, target: PreTrainedModel, prompts: Any, **options: Any) -> TuningResult:
        """Measures which draft tree is fastest with this target on this machine, and uses it from now on:

            print(heads.tune(target, prompts))
            heads.save_pretrained(folder)  # remembers it, for this machine

        Arguments and errors as in [`hf_specheads.tuning.tune`].
        """
        from .tuning import tune

        return tune(target, self, prompts, **options)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._found_tree = None  # heads that move or change their type may have another
        return super()._apply(*args, **kwargs)
