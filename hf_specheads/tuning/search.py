"""Searching for the fastest draft tree with Sequoia's dynamic program (arXiv 2402.12374, section 3.1).

Child b of a node at depth i is the accepted one with probability p[i][b]. The expected number of tokens that a tree
emits per round, bonus token included, is then

    1 + sum over drafted nodes of the product of p along the node's path

For every number of nodes and every depth limit, the program finds the tree that maximises this. Of these trees, the
search takes the one with the least time per token, given the measured costs of drafting and verifying a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..contract import DraftingContract
from ..texts import all_token_ids
from ..tree.config import DraftTreeConfig
from .measure import MeasuredAcceptance, Path, RoundCosts, interpolate, measure_acceptance, measure_costs
from .turns import Prompts


@dataclass(frozen=True)
class OptimalTree:
    """The outcome of a search.

    Attributes:
        tree: The tree found, of kind `"optimal"`.
        acceptance_length: Expected tokens per round, bonus token included.
        seconds_per_round: Expected wall-clock seconds of a round.
        costs: Costs of rounds that the search used.
        acceptance: Measured acceptance of the heads; `None` if the search was given probabilities.
    """

    tree: DraftTreeConfig
    acceptance_length: float
    seconds_per_round: float
    costs: RoundCosts
    acceptance: MeasuredAcceptance | None = None

    @property
    def seconds_per_token(self) -> float:
        """Expected seconds per token, which the search minimises."""
        return self.seconds_per_round / self.acceptance_length

    @property
    def speed_up(self) -> float:
        """Expected tokens per second, divided by those of bare target forwards over one token each."""
        return interpolate(self.costs.target, 1) / self.seconds_per_token


class BestTrees:
    """The best trees of every number of nodes up to `max_nodes` that are no deeper than `depth`.

    T(i, m, b) is the expected length of the best tree of m nodes whose root lies at depth i and has exactly b
    children. F(i, m) is its maximum over all numbers of children:

        T(i, 1, 0) = 1,    T(i, m, b) = max over 1 <= y < m of  T(i, y, b - 1) + p[i][b - 1] * F(i + 1, m - y)

    Args:
        acceptance: p[i][b] by draft position; the last row is used for all later positions.
        max_nodes: Largest number of nodes M, root included.
        depth: Largest number of levels below the root, at least 1.
    """

    def __init__(self, acceptance: Sequence[Sequence[float]], max_nodes: int, depth: int):
        self.max_nodes, self.depth = max_nodes, depth
        self.rows = [acceptance[min(level, len(acceptance) - 1)] for level in range(depth)]
        nodes = torch.arange(max_nodes + 1)
        self._rest = (nodes[:, None] - nodes).clamp_min(0)  # [m, y] -> m - y
        self._possible = (nodes >= 1) & (nodes < nodes[:, None])
        leaf = torch.full((max_nodes + 1,), -torch.inf, dtype=torch.float64)
        leaf[1] = 1.0
        self.best = [leaf] * (depth + 1)  # F(i, .), by the depth i of the root
        self._children = [torch.zeros(max_nodes + 1, dtype=torch.long)] * (depth + 1)
        self._nodes_before: list[list[torch.Tensor]] = [[]] * depth  # the best y by depth, child and m
        for level in reversed(range(depth)):
            self._fill(level, leaf)

    def _fill(self, level: int, leaf: torch.Tensor) -> None:
        below = self.best[level + 1]
        values, nodes_before = [leaf], []
        for probability in self.rows[level]:
            # 0 * -inf would be NaN, and a child that is never accepted may still be part of the tree.
            child = torch.where(below.isinf(), below, probability * below)
            options = torch.where(self._possible, values[-1] + child[self._rest], -torch.inf)
            value, before = options.max(dim=1)
            values.append(value)
            nodes_before.append(before)
        self.best[level], self._children[level] = torch.stack(values).max(dim=0)
        self._nodes_before[level] = nodes_before

    def expected_length(self, num_nodes: int) -> float:
        """Returns the tokens per round of the best tree of exactly `num_nodes` nodes; -inf if there is none."""
        return float(self.best[0][num_nodes])

    def choices(self, num_nodes: int) -> tuple[Path, ...]:
        """Returns the paths of the best tree of exactly `num_nodes` nodes, root included, without gaps in ranks."""
        found: list[Path] = []
        pending: list[tuple[Path, int]] = [((), num_nodes)]
        while pending:
            path, nodes = pending.pop()
            for rank in reversed(range(int(self._children[len(path)][nodes]))):
                before = int(self._nodes_before[len(path)][rank][nodes])
                pending.append(((*path, rank), nodes - before))
                found.append((*path, rank))
                nodes = before
        return tuple(sorted(found, key=lambda path: (len(path), path)))


def expected_length(choices: Sequence[Path], acceptance: Sequence[Sequence[float]]) -> float:
    """Returns the expected tokens per round of a tree given by its paths, bonus token included.

    Args:
        choices: Paths of child ranks. Ranks past the end of a row of `acceptance` count as never accepted.
        acceptance: p[i][b] by draft position; the last row is used for all later positions.
    """
    total = 1.0
    for path in choices:
        reached = 1.0
        for level, rank in enumerate(path):
            row = acceptance[min(level, len(acceptance) - 1)]
            reached *= row[rank] if rank < len(row) else 0.0
        total += reached
    return total


def optimal_tree(
    acceptance: Sequence[float] | Sequence[Sequence[float]],
    costs: RoundCosts,
    max_nodes: int = 64,
    max_depth: int = 8,
    **tree: Any,
) -> OptimalTree:
    """Returns the tree with the least expected seconds per token.

    Of all trees of equal size and depth limit only the one with the greatest expected length is considered. If the
    cost of draft forwards grows strongly with their rows, a tree that trades some length for cheaper draft forwards
    may therefore be missed.

    Args:
        acceptance: p[b], or p[i][b] by draft position.
        costs: Costs of rounds.
        max_nodes: Largest number of nodes to verify, root included, at least 2.
        max_depth: Largest number of draft positions.
        **tree: Further fields of the tree config, such as `children` and `draft_temperature`.

    Raises:
        ValueError: if a probability is outside [0, 1], those of one position sum to more than 1, or a limit is too
            small for any tree.
    """
    table = [acceptance] if acceptance and not isinstance(acceptance[0], Sequence) else acceptance
    if not table or not all(table):
        raise ValueError(f"`acceptance` must hold the acceptance of at least one child, got {acceptance!r}.")
    if any(min(row) < 0 or sum(row) > 1 + 1e-6 for row in table):
        raise ValueError(f"`acceptance` must hold probabilities that sum to at most 1 per position, got {table!r}.")
    if max_nodes < 2 or max_depth < 1:
        raise ValueError(f"a tree needs max_nodes >= 2 and max_depth >= 1, got {max_nodes} and {max_depth}.")
    found: OptimalTree | None = None
    for depth in range(1, max_depth + 1):
        best = BestTrees(table, max_nodes, depth)
        for nodes in range(2, max_nodes + 1):
            length = best.expected_length(nodes)
            if length == -torch.inf:
                break
            choices = best.choices(nodes)
            seconds = costs.of(choices)
            if found is None or seconds / length < found.seconds_per_token:
                config = DraftTreeConfig(kind="optimal", choices=choices, **tree)
                found = OptimalTree(config, length, seconds, costs)
    assert found is not None
    return found


def search_tree(
    target: PreTrainedModel,
    heads: DraftingContract,
    prompts: Prompts,
    max_nodes: int = 64,
    max_depth: int = 8,
    num_children: int = 8,
    max_new_tokens: int = 64,
    by_position: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **generate_options: Any,
) -> OptimalTree:
    """Measures acceptance and costs of heads on the current machine, and finds their fastest tree:

        heads.tree_config = search_tree(target, heads, prompts).tree

    Args:
        target: The target.
        heads: The target's heads.
        prompts: Prompts like those the tree is meant for: token ids, [1, T] or plain lists, or strings and chats.
        max_nodes: Largest number of nodes to verify, root included.
        max_depth: Largest number of draft positions, capped at what the heads can draft.
        num_children: Largest number of children of a node.
        max_new_tokens: Tokens to generate per prompt while measuring.
        by_position: Let the acceptance of a child depend on its draft position, which Sequoia does not. Needs more
            prompts.
        tokenizer: The target's tokenizer, for prompts that are strings or chats.
        **generate_options: Options of `generate`, e.g. `do_sample=True, temperature=0.6`; greedy by default.

    Raises:
        ValueError: if there are no prompts, or strings are given without a tokenizer.
    """
    prompts = all_token_ids(prompts, tokenizer)
    sizes = {"depth": max_depth, "num_children": num_children, "max_new_tokens": max_new_tokens}
    acceptance = measure_acceptance(target, heads, prompts, **sizes, **generate_options)
    length = statistics.mean(prompt.numel() for prompt in prompts) + max_new_tokens / 2
    nodes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size < max_nodes] + [max_nodes]
    costs = measure_costs(target, heads, int(length), nodes)
    # The part of a round outside its forwards: choosing children and nodes, accepting a path, moving cache rows.
    overhead = max(acceptance.seconds_per_round - costs.of(acceptance.tree.paths), 0.0)
    costs = replace(costs, overhead=overhead)
    children = {name: getattr(heads.tree_config, name) for name in ("children", "draft_temperature", "lookup")}
    table = acceptance.by_position if by_position else acceptance.pooled
    found = optimal_tree(table, costs, max_nodes, len(acceptance.trials), **children)
    return replace(found, acceptance=acceptance)
