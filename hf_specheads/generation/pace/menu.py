"""Trees the engine may take in a round where nobody has chosen one: that in force, chains, trees of its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from transformers import PreTrainedModel

from ...contract import DraftingContract
from ...target.parallel import parallel_group
from ...tree.config import CHILDREN, DraftTreeConfig
from ..options import DraftingOptions

CHAIN_DEPTHS = (1, 2, 3, 4, 6, 8)
FARTHEST, FARTHEST_AT_ONCE = 16, 8  # levels of a chain that ends where it likes; where all are drafted in any case
# Depth, width and nodes of dynamic trees, from those that pay on a CPU to those of the papers.
DYNAMIC_TREES = ((1, 5, 6), (2, 2, 6), (4, 6, 12), (5, 6, 24), (6, 10, 60))
# From so many nodes on, and at least so wide, they are as deep as it goes where all levels are drafted in any case.
DEEP_FROM, WIDE = 12, 6
DEEP_AT_WILL = 6  # levels of these trees where no block of slots says: each level is a row more to draft

Way = tuple[str, bool]  # how children are chosen, and whether nodes are copied from the text


def trees_to_choose(
    tree: DraftTreeConfig,
    deepest: int | None,
    problem: Callable[[DraftTreeConfig], str | None],
    drawn: bool = False,
    farthest: int = 0,
    at_once: bool = False,
) -> tuple[DraftTreeConfig, ...]:
    """The menu of a call: the tree in force first, then chains by depth, then trees by size. Of chains that end where
    they like one is in the place of one in force.

    Trees besides chains are offered only beside a dynamic tree: where a chain is in force, nothing says that the
    target can verify more, and fixed trees were chosen with care. Chains that copy from the text are offered without
    copies too, which are nodes to verify in every sequence of a batch.

    Args:
        tree: The tree in force.
        deepest: Draft positions the heads have, `None` without limit.
        problem: Says why the heads cannot draft a tree, `None` if they can.
        drawn: Tokens are sampled, and which random numbers they take is nobody's business: chains that are drawn from
            the draft are offered beside those of its favourites. (Of a chain's drafts x ~ q the target accepts
            sum min(p, q), of the favourite p(x): which is more depends on how sure the two are.)
        farthest: Chains end where another link would not pay, so there is one with so many levels instead of several
            depths; 0 if they do not.
        at_once: The heads draft all levels in one forward.
    """
    ways: list[dict[str, Any]] = [{}, {"lookup": 0}]
    ways += [{"children": children, "lookup": 0} for children in (CHILDREN if drawn else ())]
    in_force = {tree.depth} if tree.kind == "chain" else set()
    depths = sorted({*CHAIN_DEPTHS, *in_force})
    if farthest:
        farthest = max({farthest} | in_force)
        depths = [min(farthest, deepest or farthest)]
        ways = [{"stop_below": 0.0, **way} for way in ways]
    chains = [
        tree.replace(kind="chain", depth=depth, top_k=1, total_tokens=depth + 1, **way)
        for way in ways
        for depth in depths
        if depth <= (deepest or depth)
    ]
    wider = [
        tree.replace(depth=depth, top_k=top_k, total_tokens=nodes)
        for depth, top_k, nodes in (_dynamic_trees(deepest, at_once) if tree.kind == "dynamic" else ())
    ]
    menu = [one for one in (*chains, *wider) if problem(one) is None]
    if not (farthest and in_force and menu):
        menu = [tree, *menu]
    return tuple(dict.fromkeys(menu))


def _dynamic_trees(deepest: int | None, at_once: bool) -> list[tuple[int, int, int]]:
    """Depth, width and nodes of dynamic trees of heads that have so many draft positions."""
    deep = min(deepest, FARTHEST_AT_ONCE) if deepest else DEEP_AT_WILL
    trees = [
        (deep, max(top_k, WIDE), nodes) if at_once and nodes >= DEEP_FROM else (depth, top_k, nodes)
        for depth, top_k, nodes in DYNAMIC_TREES
    ]
    return [one for one in trees if one[0] <= (deepest or one[0])]


def menu_of(
    heads: DraftingContract, target: PreTrainedModel, options: DraftingOptions, drawn: bool = False
) -> tuple[tuple[DraftTreeConfig, ...], int]:
    """Trees of a call's rounds, that in force first, and levels of chains that end where they like; 0 without any.

    Compiled rounds have the tree in force, and chains where one graph drafts every link ([`CompiledRounds.grow`]):
    any other tree would be a graph of its own.

    Args:
        heads, target, options: Of the call.
        drawn: As in [`trees_to_choose`].
    """
    farthest = farthest_chain(heads, target) if options.free_tree else 0
    if options.compiled and heads.link_layers is None:
        farthest = 0
    if not options.free_tree or (options.compiled and not farthest):
        return (options.tree,), 0
    drawn, at_once = drawn and not options.compiled, heads.drafts_in_one_forward
    menu = trees_to_choose(options.tree, heads.max_draft_positions, heads.tree_problem, drawn, farthest, at_once)
    if options.compiled:
        menu = tuple(tree for tree in menu if tree.kind == "chain" or tree == options.tree)
    return menu, farthest


def way_of(tree: DraftTreeConfig) -> Way:
    """How the nodes of a tree are chosen."""
    return tree.children, tree.lookup > 0


def farthest_chain(heads: DraftingContract, target: PreTrainedModel) -> int:
    """Levels of chains that end where they like; 0 where they may not: it is decided link by link on the host, which
    an accelerator would have to wait for, and by what clocks say, which are not the same in several processes."""
    on_host = {heads.device.type, target.device.type} == {"cpu"}
    if not on_host or parallel_group(target) is not None or heads.copied_ngrams is not None:
        return 0
    return FARTHEST_AT_ONCE if heads.drafts_in_one_forward and heads.max_draft_positions is None else FARTHEST


def trees_of_call(
    heads: DraftingContract, target: PreTrainedModel, options: DraftingOptions
) -> tuple[DraftTreeConfig, ...]:
    """Trees that rounds of a call may draft, whether it chooses among them or not."""
    if not (options.adaptive or options.in_stream or options.compiled):
        return (options.tree,)
    return menu_of(heads, target, options)[0]


def largest(trees: Iterable[DraftTreeConfig]) -> DraftTreeConfig:
    """The tree of most nodes: compiled rounds make their graphs for its sizes."""
    return max(trees, key=attrgetter("most_nodes"))
