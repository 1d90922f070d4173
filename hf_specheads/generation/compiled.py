"""Compiled rounds: one graph drafts a tree, one verifies it, both of fixed shapes.

Every round of a pair has the same shapes if its caches show all their slots and every round takes in as many rows,
real or not; `torch.compile` then sees each step once. Rounds that are smaller (the last token of a budget, a draft
near the end of the target's context) and draws of sampled children run uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..cache.draft import DraftCache
from ..cache.target import TreeCache
from ..contract import DraftingContract
from ..tree.config import DraftTreeConfig
from ..tree.draft_tree import DraftTree
from ..tree.shape import TreeShape, fixed_shape
from .drafting import grow_dynamic, grow_fixed

# Graphs of one step that may live side by side: one per batch size, capacity and draft tree.
MOST_GRAPHS = 64
SMALLEST_BUCKET = 256


def bucket(slots: int) -> int:
    """Capacity of a cache that needs so many slots: a power of two, so that calls of similar length share a graph."""
    return max(SMALLEST_BUCKET, 1 << (slots - 1).bit_length())


def _grow(
    head: DraftingContract,
    cache: DraftCache,
    tree: DraftTreeConfig,
    token_ids: torch.Tensor,
    features: torch.Tensor | None,
    depth: int,
    shape: TreeShape | None,
) -> DraftTree:
    if shape is None:
        return grow_dynamic(head, cache, tree, token_ids, features, depth)
    return grow_fixed(head, cache, tree, token_ids, features, depth, None, shape)


def _verify(target: PreTrainedModel, cache: TreeCache, tree: DraftTree, hidden_states: dict[str, Any]) -> Any:
    return target(tree.token_ids, use_cache=True, return_dict=True, **cache.forward_inputs(tree), **hidden_states)


class CompiledRounds:
    """The two steps of a round, compiled.

    Args:
        options: Of `torch.compile`.
    """

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self._grow = self._compile(_grow)
        self._verify = self._compile(_verify)

    def _compile(self, step: Callable) -> Callable:
        compiled = torch.compile(step, **self.options)

        def call(*args: Any) -> Any:
            with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS, accumulated_recompile_limit=8 * MOST_GRAPHS):
                return compiled(*args)

        return call

    def grow(
        self,
        head: DraftingContract,
        cache: DraftCache,
        tree: DraftTreeConfig,
        token_ids: torch.Tensor,
        features: torch.Tensor | None,
        depth: int,
    ) -> DraftTree:
        """As [`drafting.grow_tree`]."""
        shape = None if tree.kind == "dynamic" else fixed_shape(tree.paths, depth, token_ids.device)
        return self._grow(head, cache, tree, token_ids, features, depth, shape)

    def verify(self, target: PreTrainedModel, cache: TreeCache, tree: DraftTree, hidden_states: dict[str, Any]) -> Any:
        """The target's forward over a tree; `hidden_states` are its arguments that ask for some."""
        return self._verify(
            target, cache, tree.packed(), hidden_states
        )  # views of other strides would be compiled anew


# Compiled steps by target and options, so that later calls find them ready.
_ROUNDS: WeakKeyDictionary[PreTrainedModel, dict[str, CompiledRounds]] = WeakKeyDictionary()


def compiled_rounds(target: PreTrainedModel, config: GenerationConfig) -> CompiledRounds:
    """The compiled steps of a target.

    Args:
        target: The target.
        config: Its `compile_config` (transformers' `CompileConfig`) says how to compile; by default the backend is
            inductor, with CUDA graphs (`mode="reduce-overhead"`) on CUDA. Graphs are whole and shapes fixed always.
    """
    options: dict[str, Any] = {"backend": "inductor"}
    if target.device.type == "cuda":
        options["mode"] = "reduce-overhead"
    if (chosen := getattr(config, "compile_config", None)) is not None:
        options = {name: value for name, value in vars(chosen).items() if value is not None and name[0] != "_"}
    options |= {"fullgraph": True, "dynamic": False}
    known, key = _ROUNDS.setdefault(target, {}), repr(sorted(options.items()))
    if key not in known:
        known[key] = CompiledRounds(options)
    return known[key]
