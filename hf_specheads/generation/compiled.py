"""Compiled rounds: one graph drafts a tree, one verifies it, both of fixed shapes.

Every round of a pair has the same shapes if its caches show all their slots and every round takes in as many rows,
real or not; `torch.compile` then sees each step once. Rounds that are smaller (the last token of a budget, a draft
near the end of the target's context) and draws of sampled children run uncompiled.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput, logging

from ..cache.draft import DraftCache
from ..cache.rooms import Rooms
from ..cache.target import TreeCache
from ..contract import DraftingContract
from ..errors import UnsupportedGenerationError
from ..tree.config import DraftTreeConfig
from ..tree.draft_tree import DraftTree
from ..tree.shape import TreeShape, fixed_shape
from .drafting import grow_dynamic, grow_fixed
from .probe import difference
from .regions import with_regions

logger = logging.get_logger(__name__)

# Graphs of one step of one pair that may live side by side: one per batch size, capacity and draft tree.
MOST_GRAPHS = 64
TOO_MANY = (
    f"`heads.compiled` has met {MOST_GRAPHS} different shapes of rounds; further ones run uncompiled. Calls of "
    "similar batch size, length and draft tree share their graphs."
)
OF_THEIR_OWN = (
    "the layers of %s seem alike and are not to torch.compile (%s): each is compiled for itself, and the first "
    "compiled call takes longer."
)
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


def _own_copy(step: Callable) -> Callable:
    """The same function with a code object of its own: the compiler limits graphs per code object."""
    return types.FunctionType(step.__code__.replace(), step.__globals__, step.__name__)


class CompiledRounds:
    """The two steps of a round of one pair, compiled.

    Args:
        options: Of `torch.compile`.

    Attributes:
        compiles: Whether a step since this was last set to `False` met shapes it had not met before, and so had to be
            compiled.
        rooms: Where caches leave their buffers from call to call, `None` where nothing depends on their addresses.
        layers_once: Whether layers that are alike are compiled once ([`regions.with_regions`]), until they turn out
            not to be.
    """

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self.compiles = False
        self.layers_once = True
        self.rooms = Rooms() if self.replays else None
        self._steps = {step: torch.compile(_own_copy(step), **options) for step in (_grow, _verify)}
        self._shapes: dict[Callable, set[tuple]] = {_grow: set(), _verify: set()}

    @property
    def replays(self) -> bool:
        """Whether steps are captured as CUDA graphs, whose outputs the next replay writes over."""
        return self.options.get("mode") in ("reduce-overhead", "max-autotune")

    def begin_round(self) -> None:
        """From here on outputs of earlier rounds may be written over."""
        self.compiles = False
        if self.replays:
            torch.compiler.cudagraph_mark_step_begin()

    def _call(self, step: Callable, shape: tuple, *args: Any) -> Any:
        known = self._shapes[step]
        if shape not in known:
            if len(known) >= MOST_GRAPHS:
                logger.warning_once(TOO_MANY)
                return step(*args)
            known.add(shape)
            self.compiles = True
        try:
            with torch._dynamo.config.patch(
                recompile_limit=2 * MOST_GRAPHS, accumulated_recompile_limit=4 * MOST_GRAPHS
            ):
                return self._steps[step](*args)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise UnsupportedGenerationError(
                f"`heads.compiled` compiles rounds whole, which torch.compile cannot do for this pair ({reason}); set "
                "`heads.compiled = False`."
            ) from error

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
        shapes = (tuple(token_ids.shape), cache.capacity, tree, depth)
        token_ids = token_ids.reshape(-1).view(token_ids.shape)  # strides of one kind, whatever it was cut from
        drafted = self._call(_grow, shapes, head, cache, tree, token_ids, features, depth, shape)
        if self.replays:
            cache.outlive_step()
        return drafted

    def verify(
        self, target: PreTrainedModel, cache: TreeCache, tree: DraftTree, hidden_states: dict[str, Any]
    ) -> ModelOutput:
        """The target's forward over a tree; `hidden_states` are its arguments that ask for some."""
        shapes = (tuple(tree.token_ids.shape), cache.capacity, tree.max_depth, repr(hidden_states))
        tree = tree.packed()  # views of other strides would be compiled anew
        if self.layers_once and cache.regions is None:
            cache.regions = (with_regions(target, cache),)
        if self.layers_once and cache.regions and (marked := cache.regions[0]) is not None:
            outputs = self._verify_alike(target, marked, shapes, cache, tree, hidden_states)
            if outputs is not None:
                return outputs
        return self._call(_verify, shapes, target, cache, tree, hidden_states)

    def _verify_alike(
        self, target: PreTrainedModel, marked: PreTrainedModel, shapes: tuple, *call: Any
    ) -> ModelOutput | None:
        """The same with layers that are alike compiled once; `None` if that cannot be, from now on."""
        shapes = ("layers once", *shapes)
        if shapes in self._shapes[_verify]:
            return self._call(_verify, shapes, marked, *call)
        try:
            outputs = self._call(_verify, shapes, marked, *call)
            problem = difference(_verify(target, *call).logits, outputs.logits, target.dtype)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a compiler at its limits: without regions it may do, or say why not
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        if problem is None:
            return outputs
        logger.warning_once(OF_THEIR_OWN % (type(target).__name__, problem))
        self.layers_once = False
        self._shapes[_verify].discard(shapes)
        return None


def compiled_rounds(heads: DraftingContract, target: PreTrainedModel, config: GenerationConfig) -> CompiledRounds:
    """The compiled steps of a pair; kept with the heads, so that later calls find them ready.

    Args:
        heads: Draft heads.
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
    key = (CompiledRounds, repr(sorted(options.items())))
    known = heads.memory.setdefault(target, {})
    if key not in known:
        known[key] = CompiledRounds(options)
    return known[key]
