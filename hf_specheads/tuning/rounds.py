"""Estimating the cost of rounds with any draft tree, from timed rounds of a few trees in real generations."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import DynamicCache, PreTrainedModel

from ..contract import DraftingContract
from ..generation.refusals import tree_problem_of
from ..tree.config import DraftTreeConfig
from .measure import interpolate
from .progress import bar
from .turns import Prompts, generate_text

# Trees whose rounds are timed: chains by depth, and dynamic trees by depth, top_k and number of nodes. Every depth of
# chains is timed because kernels are tuned for certain numbers of rows, so one more row may cost nothing or a lot.
TIMED_CHAINS = tuple(range(1, 9))
TIMED_TREES = (
    (2, 2, 3), (2, 2, 4), (2, 8, 16), (2, 8, 48), (2, 4, 10), (8, 2, 12), (8, 4, 6), (8, 4, 24), (8, 8, 8), (8, 8, 32),
    (8, 8, 64),
)  # fmt: skip


@dataclass
class TimedRounds:
    """Seconds that the stages of a round take.

    Attributes:
        chain_target, tree_target: Seconds of the target's forward over a chain or a tree, by number of nodes.
        chain_draft: Seconds of drafting a chain, by depth.
        dynamic_draft: Seconds of drafting a dynamic tree, by top_k, then by depth.
        other: Seconds of everything else in a round.
    """

    chain_target: dict[int, float] = field(default_factory=dict)
    tree_target: dict[int, float] = field(default_factory=dict)
    chain_draft: dict[int, float] = field(default_factory=dict)
    dynamic_draft: dict[int, dict[int, float]] = field(default_factory=dict)
    other: float = 0.0

    def of_chain(self, depth: int) -> float:
        """Returns the seconds of a round with a chain."""
        return interpolate(self.chain_draft, depth) + interpolate(self.chain_target, depth + 1) + self.other

    def of_dynamic(self, depth: int, top_k: int, nodes: int) -> float:
        """Returns the seconds of a round with a dynamic tree."""
        widths = {width: interpolate(depths, depth) for width, depths in self.dynamic_draft.items()}
        return interpolate(widths, top_k) + interpolate(self.tree_target, nodes) + self.other

    def of_fixed(self, paths: Sequence[tuple[int, ...]]) -> float:
        """Returns the seconds of a round with a tree of fixed shape.

        A level with n expanded nodes is taken to cost as much as a level of a dynamic tree that expands n nodes.
        """
        inner = {path[:-1] for path in paths}
        drafting = interpolate(self.chain_draft, 1)
        for length in range(1, max(map(len, paths))):
            rows = sum(len(path) == length for path in inner)
            drafting += interpolate(self._level_costs(), max(rows, 1))
        return drafting + interpolate(self.tree_target, len(paths) + 1) + self.other

    def _level_costs(self) -> dict[int, float]:
        """Seconds of drafting one more level, by number of rows."""
        widths = {1: self.chain_draft, **self.dynamic_draft}
        costs = {}
        for width, depths in widths.items():
            low, high = min(depths), max(depths)
            if high > low:
                costs[width] = max((depths[high] - depths[low]) / (high - low), 0.0)
        return costs


def time_rounds(
    target: PreTrainedModel, heads: DraftingContract, prompts: Prompts, repeats: int, **options: Any
) -> TimedRounds:
    """Times rounds of a few trees, which take turns: the median over repeats of the mean over each tree's rounds.

    Raises:
        ValueError: if no round drafted anything on these prompts.
    """
    deepest = heads.max_draft_positions or max(TIMED_CHAINS)
    drawn = {"draft_temperature": heads.tree_config.draft_temperature}
    depths = [depth for depth in TIMED_CHAINS if depth <= deepest]
    trees = {("chain", depth, 1, depth + 1): DraftTreeConfig(kind="chain", depth=depth, **drawn) for depth in depths}
    for depth, top_k, nodes in TIMED_TREES:
        depth = min(depth, deepest)
        tree = DraftTreeConfig(depth=depth, top_k=top_k, total_tokens=nodes, **drawn)
        trees["dynamic", depth, top_k, nodes] = tree
    if tree_problem_of(target, DynamicCache(config=target.config)) is not None:
        trees = {key: tree for key, tree in trees.items() if tree.kind == "chain"}
    seconds: dict[tuple, list[tuple[float, float, float]]] = {key: [] for key in trees}
    for repeat in bar(range(repeats + 1), f"rounds of {len(trees)} trees"):
        for key, tree in trees.items():
            timed = heads.with_tree(**tree.to_dict())
            timed.profile, timed.adaptive = True, False
            generate_text(target, prompts[repeat % len(prompts)], assistant_model=timed, **options)
            stats = timed.last_stats
            if repeat and stats is not None and stats.rounds:  # the first run of a tree includes first-call costs
                rest = stats.seconds["total"] - sum(stats.seconds.get(s, 0.0) for s in ("prefill", "draft", "target"))
                stages = (stats.seconds["draft"], stats.seconds["target"], rest)
                seconds[key].append(tuple(stage / stats.rounds for stage in stages))
    return _collected(seconds)


def _collected(seconds: dict[tuple, list[tuple[float, float, float]]]) -> TimedRounds:
    found, others = TimedRounds(), []
    targets: dict[tuple[bool, int], list[float]] = {}
    drafts: dict[tuple[int, int], list[float]] = {}
    for (kind, depth, top_k, nodes), measured in seconds.items():
        if not measured:
            continue
        draft, verify, other = (statistics.median(stage) for stage in zip(*measured, strict=True))
        others.append(other)
        targets.setdefault((kind == "chain", nodes), []).append(verify)
        if kind == "chain":
            found.chain_draft[depth] = draft
        else:
            drafts.setdefault((top_k, depth), []).append(draft)
    if not others:
        raise ValueError(
            "no round drafted anything on these prompts, so nothing can be timed; give prompts like those that the "
            "heads will be used on."
        )
    for (chain, nodes), values in targets.items():
        (found.chain_target if chain else found.tree_target)[nodes] = statistics.median(values)
    for (top_k, depth), values in drafts.items():
        found.dynamic_draft.setdefault(top_k, {})[depth] = statistics.median(values)
    found.other = statistics.median(others)
    return found
