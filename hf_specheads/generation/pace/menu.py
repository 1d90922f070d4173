"""The menu: trees a round may draft where the user has not chosen one.

It has the tree in force, chains and, where the tree in force is dynamic, other dynamic trees. Where the host decides
link by link, the chains have a variable length: they end where another link would not pay.
"""

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
COPIES = 8  # nodes to copy from the text, in chains offered beside a tree in force that copies none
# Most levels of a variable-length chain, and the same where the draft head drafts all levels in one forward.
FARTHEST, FARTHEST_AT_ONCE = 16, 8
# Depth, width and nodes of dynamic trees, from those that pay on a CPU to those of the papers.
DYNAMIC_TREES = ((1, 5, 6), (2, 2, 6), (4, 6, 12), (5, 6, 24), (6, 10, 60))
# Draft heads that draft all levels in one forward get trees of at least DEEP_FROM nodes as deep as they can be, and
# at least WIDE nodes wide, because further levels cost such a draft head little or nothing.
DEEP_FROM, WIDE = 12, 6
DEEP_AT_WILL = 6  # levels of these deep trees if the draft head has no limit: each level is one more row to draft

Way = tuple[str, bool]  # how children are chosen, and whether nodes are copied from the text


def trees_to_choose(
    tree: DraftTreeConfig,
    deepest: int | None,
    problem: Callable[[DraftTreeConfig], str | None],
    drawn: bool = False,
    farthest: int = 0,
    at_once: bool = False,
    copies: int = 0,
) -> tuple[DraftTreeConfig, ...]:
    """The menu of a call: the tree in force first, then chains by depth, then trees by size. Where chains have a
    variable length, such a chain replaces a chain that is in force.

    Branching trees are offered only beside a dynamic tree: a chain in force does not show that the target can verify
    more, and fixed trees were chosen deliberately. Chains that copy from the text are also offered without copies,
    because copies are nodes to verify in every sequence of a batch, and the other way round, because many texts repeat
    parts of their prompts.

    Args:
        tree: The tree in force.
        deepest: Draft positions of the draft head, `None` without limit.
        problem: Says why the draft head cannot draft a tree, `None` if it can.
        drawn: Tokens are sampled and need not follow a seed exactly. Chains drawn from the draft are then offered
            beside chains of the most probable children. (The target accepts a draft x ~ q with probability
            sum min(p, q), and the most probable x with p(x). Which is higher depends on how sure the two are.)
        farthest: Levels of a variable-length chain, which replaces chains of several depths; 0 for chains of fixed
            depths.
        at_once: The draft head drafts all levels in one forward.
        copies: Nodes that chains copy from the text if the tree in force copies none; 0 for no such chains.
    """
    ways: list[dict[str, Any]] = [{}, {"lookup": 0 if tree.lookup else copies}]
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
    """Depth, width and nodes of the dynamic trees that a draft head with `deepest` draft positions can draft."""
    deep = min(deepest, FARTHEST_AT_ONCE) if deepest else DEEP_AT_WILL
    trees = [
        (deep, max(top_k, WIDE), nodes) if at_once and nodes >= DEEP_FROM else (depth, top_k, nodes)
        for depth, top_k, nodes in DYNAMIC_TREES
    ]
    return [one for one in trees if one[0] <= (deepest or one[0])]


def menu_of(
    heads: DraftingContract, target: PreTrainedModel, options: DraftingOptions, drawn: bool = False
) -> tuple[tuple[DraftTreeConfig, ...], int]:
    """The menu of a call, the tree in force first, and the levels of its variable-length chains; 0 without any.

    The menu of compiled rounds has the tree in force, and chains if one graph drafts every link
    ([`CompiledRounds.grow`]). Any other tree would need a graph of its own.

    Args:
        heads: Draft head of the call.
        target: Its target.
        options: Options of the call.
        drawn: As in [`trees_to_choose`].
    """
    farthest = farthest_chain(heads, target) if options.free_tree else 0
    if options.compiled and heads.link_layers is None:
        farthest = 0
    if not options.free_tree or (options.compiled and not farthest):
        return (options.tree,), 0
    drawn, at_once = drawn and not options.compiled, heads.drafts_in_one_forward
    copies = COPIES if options.takes_trees else 0
    limits = (heads.max_draft_positions, heads.tree_problem)
    menu = trees_to_choose(options.tree, *limits, drawn, farthest, at_once, copies)
    if options.compiled:
        menu = tuple(tree for tree in menu if tree.kind == "chain" or tree == options.tree)
    return menu, farthest


def way_of(tree: DraftTreeConfig) -> Way:
    """How the nodes of a tree are chosen."""
    return tree.children, tree.lookup > 0


def farthest_chain(heads: DraftingContract, target: PreTrainedModel) -> int:
    """Levels of variable-length chains; 0 where there are none. Their end is decided link by link on the host, which
    an accelerator would wait for, and from measured times, which differ between the processes of a parallel target."""
    on_host = {heads.device.type, target.device.type} == {"cpu"}
    if not on_host or parallel_group(target) is not None or heads.copied_ngrams is not None:
        return 0
    return FARTHEST_AT_ONCE if heads.drafts_in_one_forward and heads.max_draft_positions is None else FARTHEST


def trees_of_call(
    heads: DraftingContract, target: PreTrainedModel, options: DraftingOptions
) -> tuple[DraftTreeConfig, ...]:
    """Trees that rounds of a call may draft, whether the call chooses among them or not."""
    if not (options.adaptive or options.in_stream or options.compiled):
        return (options.tree,)
    return menu_of(heads, target, options)[0]


def largest(trees: Iterable[DraftTreeConfig]) -> DraftTreeConfig:
    """The tree with most nodes; the graphs of compiled rounds are made for its size."""
    return max(trees, key=attrgetter("most_nodes"))
