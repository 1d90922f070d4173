"""Compiled rounds: one graph drafts a tree, and another one verifies it.

On a CPU, two graphs draft a chain: one drafts its first link, and the other one is called for each further link (a
third graph is used where another specialist starts). A single graph verifies trees of all sizes.

Every round of a pair has the same shapes if its caches show all their slots and every round takes in the same number
of rows, real or not. `torch.compile` then sees each step once. Smaller rounds (the last token of a budget, a draft
near the end of the target's context) and draws of sampled children run uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput, logging

from ...cache.chain import ChainCache
from ...cache.draft import DraftCache, Links
from ...cache.rooms import Rooms
from ...cache.target import TreeCache
from ...contract import DraftingContract
from ...tree.config import DraftTreeConfig
from ...tree.draft_tree import DraftTree
from ...tree.shape import TreeShape, shape_of
from ..drafting.chains import Link, favourites, grow_links
from ..drafting.foresight import Reach
from ..drafting.grow import grow_dynamic, grow_fixed
from ..probe import difference, drafts_problem
from .regions import links_apart, links_of, with_regions
from .steps import CompiledSteps
from .toolchain import warm_up_toolchain

logger = logging.get_logger(__name__)

OF_THEIR_OWN = (
    "the layers of %s seem alike, but torch.compile treats them as different (%s): each is compiled separately, and "
    "the first compiled call takes longer."
)
LINKS_OF_THEIR_OWN = (
    "the links of a chain seem alike, but torch.compile treats them as different (%s): each is compiled separately, "
    "and the first compiled call takes longer."
)
ROWS_OF_THEIR_OWN = (
    "torch.compile cannot compile %s for any number of rows at once (%s): each size of tree is compiled separately."
)
SMALLEST_BUCKET = 256
LINK_TENSORS = 6  # tensors that every link gets; where a specialist starts, the rows it has not seen yet are added


def bucket(slots: int) -> int:
    """Capacity of a cache that needs `slots` slots: a power of two, so that calls of similar length share a graph."""
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


def _start(
    head: DraftingContract, cache: DraftCache, token_ids: torch.Tensor, features: torch.Tensor, temperature: float
) -> Link:
    states, logits = head.start_draft(cache, token_ids, features)
    return states, *favourites(logits[:, 0], temperature, head.draft_vocabulary)


def _link(head: Any, layer: nn.Module, temperature: float, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    fused, states, logits = head.link(layer, *tensors)
    return fused, states, *favourites(logits[:, 0], temperature, head.draft_vocabulary)


def verify_tree(
    target: PreTrainedModel, cache: TreeCache | ChainCache, tree: DraftTree, hidden_states: dict[str, Any]
) -> Any:
    """Runs the target's forward over a tree; `hidden_states` are arguments of it that ask for hidden states."""
    return target(tree.token_ids, use_cache=True, return_dict=True, **cache.forward_inputs(tree), **hidden_states)


STEPS: tuple[Callable, ...] = (_grow, _start, _link, verify_tree)


class CompiledRounds(CompiledSteps):
    """The compiled steps of a round, drafting and verifying, of one pair of target and draft head.

    Args:
        options: Options of `torch.compile`.
        device: Device of the pair.

    Attributes:
        rooms: Keeps the buffers of caches from call to call; `None` where nothing depends on their addresses.
        layers_once: Whether layers that are alike are compiled once ([`regions.with_regions`]). Turns `False` when
            they prove to differ.
        links_once: Whether links of a chain that are alike are compiled once ([`regions.links_of`]). Turns `False`
            when they prove to differ.
        rows_once: Whether trees of all sizes share a graph on a CPU. Turns `False` when that cannot be compiled.
        link_by_link: Whether links of a chain are called one by one on a CPU. Their shared graph compiles faster than
            one of the whole chain, and the chain may then have a variable length.
    """

    link_by_link = True

    def __init__(self, options: dict[str, Any], device: torch.device | None = None):
        super().__init__(options, STEPS, device)
        self.layers_once = self.links_once = self.rows_once = True
        self.rooms = Rooms() if self.replays else None

    @property
    def replays(self) -> bool:
        """Whether steps are captured as CUDA graphs, whose outputs the next replay overwrites."""
        return self.options.get("mode") in ("reduce-overhead", "max-autotune")

    def begin_step(self) -> None:
        """Begins a step: from here on, outputs of earlier rounds may be overwritten."""
        if self.replays:
            torch.compiler.cudagraph_mark_step_begin()

    def grow(
        self,
        head: DraftingContract,
        cache: DraftCache,
        tree: DraftTreeConfig,
        token_ids: torch.Tensor,
        features: torch.Tensor | None,
        depth: int,
        in_shape: bool = True,
        reach: Reach | None = None,
    ) -> DraftTree:
        """Drafts a tree as [`drafting.grow_tree`] does. A `reach`, and another number of rows than rounds usually take
        in (`in_shape=False`), are allowed only where links are drafted one by one ([`drafts_links`])."""
        token_ids, features = _packed(token_ids), None if features is None else _packed(features)
        if self.drafts_links(head, tree):
            return self._grow_apart(head, cache, tree, token_ids, features, depth, in_shape, reach)
        shape = None if tree.kind == "dynamic" else shape_of(tree, depth, token_ids.device)
        shapes = (tuple(token_ids.shape), cache.capacity, tree, depth)
        call = (head, cache, tree, token_ids, features, depth, shape)
        drafted, links = None, links_of(head, cache, shape) if self.links_once else None
        if links is not None:
            drafted = self._grow_alike(cache, links, shapes, *call)
        drafted = self._call(_grow, shapes, *call) if drafted is None else drafted
        if self.replays:
            cache.outlive_step()
        return drafted

    def drafts_links(self, head: DraftingContract, tree: DraftTreeConfig) -> bool:
        """Whether a tree is a chain that is drafted link by link, on a CPU."""
        return (
            self.link_by_link and tree.kind == "chain" and head.link_layers is not None and head.device.type == "cpu"
        )

    def _grow_apart(
        self,
        head: DraftingContract,
        cache: DraftCache,
        tree: DraftTreeConfig,
        token_ids: torch.Tensor,
        features: torch.Tensor | None,
        depth: int,
        in_shape: bool,
        reach: Reach | None,
    ) -> DraftTree:
        """Drafts a chain link by link. Links with which a specialist starts are compiled from a pair's second call on:
        a round has so few of them that compiling pays off only over many rounds."""
        shape, temperature = shape_of(tree, depth, token_ids.device), tree.draft_temperature
        alike = (len(token_ids), cache.capacity, temperature)

        def run(number: int, head: DraftingContract, layer: nn.Module, *tensors: torch.Tensor) -> tuple:
            lacked = tuple(rows.shape[1] for rows in tensors[LINK_TENSORS:])
            if lacked and self.calls < 2:
                fused, states, *favourite = _link(head, layer, temperature, *tensors)
                return fused, states, favourite
            shape = (*alike, *lacked)
            fused, states, *favourite = self._call(_link, shape, head, layer, temperature, *tensors, of=number)
            return fused, states, favourite

        def follow(position: int, token: torch.Tensor, states: torch.Tensor) -> Link:
            states, favourite = head.extend_draft(cache, position, token, states, None)
            return states, *favourite

        rows = (head, cache, token_ids, cast(torch.Tensor, features), temperature)
        started = (*alike, token_ids.shape[1], cache.deepest)
        first = self._call(_start, started, *rows) if in_shape and self.calls > 1 else _start(*rows)
        with cache.drafting(links_apart(head, depth, run)):
            return grow_links(tree, token_ids[:, -1:], first, follow, shape, reach)

    def _grow_alike(self, cache: DraftCache, links: Links, shapes: tuple, *call: Any) -> DraftTree | None:
        """Drafts a chain whole, with links that are alike compiled once. Returns `None` if that fails, and it is not
        tried again."""
        shapes = ("links once", *shapes)
        if shapes in self._shapes[_grow]:
            with cache.drafting(links):
                return self._call(_grow, shapes, *call)
        before = cache.state()
        try:
            expected = _grow(*call)
            cache.go_back(before)
            with cache.drafting(links):
                drafted = self._call(_grow, shapes, *call)
            problem = drafts_problem(expected, drafted, links.dtype)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            problem = _in_words(error)
        if problem is None:
            return drafted
        logger.warning_once(LINKS_OF_THEIR_OWN % problem)
        cache.go_back(before)
        self.links_once = False
        self._shapes[_grow].discard(shapes)
        return None

    def takes(self, tree: DraftTree, sizes: Collection[int]) -> bool:
        """Whether the graph that verifies a tree also verifies other trees.

        Args:
            tree: The tree.
            sizes: Numbers of nodes of the trees that rounds usually verify.
        """
        return tree.num_nodes in sizes or self._takes_all(tree)

    def _takes_all(self, tree: DraftTree) -> bool:
        """Whether trees of all sizes share a graph. That is so on CPUs only: elsewhere shapes are captured as well, or
        kernels are chosen by them."""
        return self.rows_once and tree.token_ids.device.type == "cpu"

    def verify(
        self, target: PreTrainedModel, cache: TreeCache, tree: DraftTree, hidden_states: dict[str, Any]
    ) -> ModelOutput:
        """Verifies a tree as [`verify_tree`] does, compiled."""
        any_rows = self._takes_all(tree)
        if any_rows and tree.num_nodes == 1:
            return _of_root(self.verify(target, cache, _root_twice(tree), hidden_states))
        rows = tree.rows_alone()
        batch, nodes = rows.token_ids.shape
        shapes = (batch, "any" if any_rows else nodes, cache.capacity, repr(hidden_states))
        if self.layers_once and cache.regions is None:
            cache.regions = (with_regions(target, cache),)
        marked = cache.regions[0] if self.layers_once and cache.regions else None
        if marked is None and not any_rows:
            return self._call(verify_tree, shapes, target, cache, rows, hidden_states)
        outputs = self._verify_alike(target, marked, any_rows, shapes, cache, rows, hidden_states)
        return self.verify(target, cache, tree, hidden_states) if outputs is None else outputs

    def _verify_alike(
        self, target: PreTrainedModel, marked: PreTrainedModel | None, any_rows: bool, shapes: tuple, *call: Any
    ) -> ModelOutput | None:
        """Verifies a tree with layers that are alike compiled once (`marked`), with one graph for any number of nodes
        (`any_rows`), or with both. Returns `None` if that fails; one of the two is then not tried again."""
        shapes, through = (marked is not None, *shapes), target if marked is None else marked
        if any_rows:
            _mark_rows(call[1])
        if shapes in self._shapes[verify_tree]:
            return self._call(verify_tree, shapes, through, *call)
        blame_rows = any_rows  # a failed compilation is blamed on the rows first, wrong logits on the layers first
        try:
            outputs = self._call(verify_tree, shapes, through, *call)
            problem = difference(verify_tree(target, *call).logits, outputs.logits, target.dtype)
            blame_rows = marked is None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # with less asked of it, the compiler may succeed, or explain why it cannot
            problem = _in_words(error)
        if problem is None:
            return outputs
        logger.warning_once((ROWS_OF_THEIR_OWN if blame_rows else OF_THEIR_OWN) % (type(target).__name__, problem))
        if blame_rows:
            self.rows_once = False
        else:
            self.layers_once = False
        self._shapes[verify_tree].discard(shapes)
        return None


def _root_twice(tree: DraftTree) -> DraftTree:
    """A tree with its only node, the root, doubled: compilers specialise on one row, so the shared graph needs two."""
    tokens, parents, depths, scores = (torch.cat([each, each], dim=1) for each in
                                       (tree.token_ids, tree.parents, tree.depths, tree.scores))  # fmt: skip
    return DraftTree(tokens, parents, depths, scores, 0)


def _of_root(outputs: ModelOutput) -> ModelOutput:
    outputs.logits = outputs.logits[:, :1]
    return outputs


def _mark_rows(tree: DraftTree) -> None:
    """Tells the compiler to make code for trees of any number of nodes."""
    torch._dynamo.mark_dynamic(tree.token_ids, 1)
    torch._dynamo.mark_dynamic(tree.depths, 1)
    if tree.shape is not None:
        torch._dynamo.mark_dynamic(tree.shape.ancestor_mask, [1, 2])


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with contiguous strides, whatever it is a view of: other strides would be compiled anew."""
    return tensor.reshape(-1).view(tensor.shape)


def _in_words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def compiled_rounds(heads: DraftingContract, target: PreTrainedModel, config: GenerationConfig) -> CompiledRounds:
    """The compiled steps of a pair for a call that begins; kept with the draft head, so that later calls find them.

    Args:
        heads: Draft head.
        target: Its target.
        config: Its `compile_config` (transformers' `CompileConfig`) says how to compile. By default the backend is
            inductor, with CUDA graphs (`mode="reduce-overhead"`) on CUDA. Steps are always compiled with
            `fullgraph=True` and `dynamic=False`.
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
        if options.get("backend", "inductor") == "inductor" and target.device.type == "cpu":
            warm_up_toolchain()
        known[key] = CompiledRounds(options, target.device)
    known[key].begin_call()
    return known[key]
