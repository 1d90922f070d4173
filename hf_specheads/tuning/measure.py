"""Measurements for the search of the fastest draft tree: how often each child is accepted, and what forwards cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ..cache.names import CACHE_NAME
from ..cache.target import TreeCache
from ..contract import DraftingContract
from ..generation.kernels.any_length import any_length
from ..generation.kernels.few_rows import FewRows
from ..generation.kernels.few_rows_native import WORKSHOP
from ..generation.kernels.unrecorded import guard_for
from ..metrics import GenerationStats, devices_of, wait_for
from ..target.features import asked_hidden_states, select_hidden_states
from ..tree.config import DraftTreeConfig
from ..tree.draft_tree import DraftTree
from .progress import bar
from .turns import Prompts, generate_text

Path = tuple[int, ...]
FEWEST_TRIALS = 50  # draft positions with fewer trials use the acceptance pooled over all positions


@dataclass(frozen=True)
class MeasuredAcceptance:
    """How often each child was accepted.

    Attributes:
        accepted: [D][B], number of times that child b at draft position i + 1 was the accepted one.
        trials: [D], number of times that the B children at draft position i + 1 were verified.
        tree: The tree used for the measurement.
        seconds_per_round: Wall-clock seconds of a round, the median over prompts.
    """

    accepted: tuple[tuple[int, ...], ...]
    trials: tuple[int, ...]
    tree: DraftTreeConfig
    seconds_per_round: float

    @property
    def pooled(self) -> list[float]:
        """Acceptance p[b] pooled over all draft positions, as in Sequoia."""
        total = max(sum(self.trials), 1)
        return [sum(column) / total for column in zip(*self.accepted, strict=True)]

    @property
    def by_position(self) -> list[list[float]]:
        """Acceptance p[i][b] by draft position; rarely reached positions use the pooled acceptance."""
        pooled = self.pooled
        return [
            [count / trials for count in row] if trials >= FEWEST_TRIALS else pooled
            for row, trials in zip(self.accepted, self.trials, strict=True)
        ]


@dataclass(frozen=True)
class RoundCosts:
    """Seconds that the parts of a round take.

    Attributes:
        target: Seconds of a target forward, by number of verified nodes, root included.
        draft: Seconds of a draft forward after the first one, by number of rows.
        start: Seconds of the first draft forward, which takes in the committed rows.
        overhead: Seconds of everything else in a round.
    """

    target: dict[int, float]
    draft: dict[int, float]
    start: float = 0.0
    overhead: float = 0.0

    def of(self, choices: Sequence[Path]) -> float:
        """Returns the seconds of a round with a tree given by its paths, interpolated between measurements."""
        inner = {path[:-1] for path in choices}
        drafting = self.start
        for length in range(1, max(map(len, choices), default=0)):
            drafting += interpolate(self.draft, sum(len(path) == length for path in inner))
        return drafting + interpolate(self.target, len(choices) + 1) + self.overhead


def interpolate(points: dict[int, float], at: int) -> float:
    """Interpolates linearly between measured points, or extrapolates from the two nearest; never below 0."""
    if not points:
        return 0.0
    if at in points or len(points) == 1:
        return points.get(at, next(iter(points.values())))
    known = sorted(points)
    right = min(max(sum(size < at for size in known), 1), len(known) - 1)
    low, high = known[right - 1], known[right]
    return max(points[low] + (points[high] - points[low]) * (at - low) / (high - low), 0.0)


def favourite_path(depth: int, num_children: int) -> tuple[Path, ...]:
    """Returns the paths of the tree in which every node of the favourite path has `num_children` children.

    The root is one of these nodes; those of the last level, at depth `depth`, have no children.
    """
    return tuple((0,) * level + (rank,) for level in range(depth) for rank in range(num_children))


def measure_acceptance(
    target: PreTrainedModel,
    heads: DraftingContract,
    prompts: Prompts,
    depth: int = 8,
    num_children: int = 8,
    max_new_tokens: int = 64,
    **generate_options: Any,
) -> MeasuredAcceptance:
    """Measures by generating how often each of B children is the accepted one, at every draft position.

    The tree gives every node of the favourite path B children. So whether a node has children depends only on its
    ancestors, never on which child will be accepted, and every node reached is an unbiased trial of all its children
    at once.

    Args:
        target: The target.
        heads: The target's heads. The way children are chosen (`children`, `draft_temperature`) is not changed.
        prompts: Token ids of prompts, [1, T] or plain lists.
        depth: Number of draft positions D, capped at what the heads can draft.
        num_children: Number of children B.
        max_new_tokens: Tokens to generate per prompt.
        **generate_options: Options of `generate`, e.g. `do_sample=True`; greedy by default.

    Raises:
        ValueError: if there are no prompts, or no round drafted anything.
    """
    depth = min(depth, heads.max_draft_positions or depth)
    measured = heads.with_tree(kind="static", choices=favourite_path(depth, num_children), lookup=0)
    measured.trace = measured.profile = True
    accepted = [[0] * num_children for _ in range(depth)]
    trials, seconds = [0] * depth, []
    for prompt in bar(prompts, "which child is accepted"):
        ids = torch.as_tensor(prompt, device=target.device).reshape(1, -1)
        text = generate_text(
            target, ids, assistant_model=measured, **{"max_new_tokens": max_new_tokens, **generate_options}
        )
        stats = measured.last_stats
        assert stats is not None
        if stats.rounds:
            _count(stats, text[0, ids.shape[1] :].tolist(), accepted, trials)
            seconds.append((stats.seconds["total"] - stats.seconds["prefill"]) / stats.rounds)
    if not sum(trials):
        raise ValueError("nothing was drafted: give at least one prompt, and leave room for more than one new token.")
    rows = tuple(tuple(row) for row in accepted)
    return MeasuredAcceptance(rows, tuple(trials), measured.tree_config, statistics.median(seconds))


def _count(stats: GenerationStats, new_ids: list[int], accepted: list[list[int]], trials: list[int]) -> None:
    """Follows the tokens of every round down its tree, until a token is not a child of the previous node.

    The last token of a round is included because it is an accepted one if the end of the text cut the round short.
    """
    start = 1  # the first token comes from the prefill
    for tree, taken in zip(stats.trees, stats.num_accepted[0], strict=True):
        tokens, parents = tree.token_ids[0].tolist(), tree.parents[0].tolist()
        node = 0
        for position, token in enumerate(new_ids[start : start + taken + 1]):
            children = [child for child, parent in enumerate(parents) if parent == node]
            if not children:
                break
            trials[position] += 1
            ranks = [rank for rank, child in enumerate(children) if tokens[child] == token]
            if not ranks:
                break
            accepted[position][ranks[0]] += 1
            node = children[ranks[0]]
        start += taken + 1


@torch.no_grad()
@any_length
def measure_costs(
    target: PreTrainedModel,
    heads: DraftingContract,
    context_length: int = 128,
    nodes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    rows: Sequence[int] = (1, 2, 4, 8, 16),
    repeats: int = 9,
) -> RoundCosts:
    """Measures the median seconds of bare forwards after a random context, on the devices of the models.

    Args:
        target: The target.
        heads: The target's heads.
        context_length: Tokens in the caches.
        nodes: Numbers of nodes for which the target's tree forward is timed.
        rows: Numbers of rows for which the draft forward of the second draft position is timed.
        repeats: Number of times each size is run. All sizes take turns, so that other load on the machine affects them
            alike.
    """
    heads.bind(target)
    generator = torch.Generator().manual_seed(0)
    vocab_size = min(heads.config.vocab_size, target.config.get_text_config(decoder=True).vocab_size)
    ids = torch.randint(vocab_size, (1, context_length + 1), generator=generator)
    verify, features = _target_forward(target, heads, ids.to(target.device))
    draft = _draft_forward(heads, ids, features, max(rows))
    verified: dict[int, list[float]] = {size: [] for size in nodes}
    drafted: dict[int, list[float]] = {size: [] for size in rows}
    started: list[float] = []
    unrecorded, few_rows = guard_for(target, heads), FewRows(target, heads)
    WORKSHOP.wait()
    for repeat in bar(range(repeats + 1), "bare forwards"):
        with unrecorded():
            for size in nodes:
                with few_rows.at_work(size, fewest=2):
                    verified[size].append(verify(size))
            for size in rows:
                with few_rows.at_work(size, fewest=1):
                    first, further = draft(size)
                started.append(first)
                drafted[size].append(further)
        if repeat == 0:  # the first calls include one-off costs
            for seconds in (started, *verified.values(), *drafted.values()):
                seconds.clear()
    middle = statistics.median
    return RoundCosts(
        target={size: middle(seconds) for size, seconds in verified.items()},
        draft={size: middle(seconds) for size, seconds in drafted.items()},
        start=middle(started),
    )


def _seconds(devices: Sequence[torch.device], call: Callable[[], Any]) -> float:
    """Returns the wall-clock seconds of a call, until the devices are done."""
    wait_for(devices)
    started = time.perf_counter()
    call()
    wait_for(devices)
    return time.perf_counter() - started


def _target_forward(
    target: PreTrainedModel, heads: DraftingContract, ids: torch.Tensor
) -> tuple[Callable[[int], float], torch.Tensor | None]:
    """Prepares a timed target forward after the tokens [1, T + 1].

    Returns:
        A function from a number of nodes to the seconds of a forward over them, and the features [1, T, F] of the
        first T tokens, `None` for heads that read no features.
    """
    cache, length = DynamicCache(config=target.config), ids.shape[1] - 1
    asked = {"output_hidden_states": asked_hidden_states(heads.feature_layers), "use_cache": True}
    states = target(input_ids=ids[:, :-1], **{CACHE_NAME: cache}, **asked).hidden_states
    features = select_hidden_states(states, heads.feature_layers) if heads.feature_layers else None
    slots = TreeCache(cache, target, 1, None, torch.tensor([[length]], device=ids.device), target.dtype)

    devices = devices_of(target)

    def verify(size: int) -> float:
        depths = torch.arange(size, device=ids.device).clamp_max(1)[None]
        tree = DraftTree(ids[:, -1:].expand(1, size), depths - 1, depths, depths.float(), 1)
        return _seconds(devices, lambda: target(tree.token_ids, **slots.forward_inputs(tree), **asked))

    return verify, features


def _draft_forward(
    heads: DraftingContract, ids: torch.Tensor, features: torch.Tensor | None, most_rows: int
) -> Callable[[int], tuple[float, float]]:
    """Prepares timed draft forwards of a round in which one row was committed.

    Returns:
        A function from a number of rows to the seconds of the first draft forward and of the second one, over that
        many rows (0 if the heads draft only one position).
    """
    ids, cache = ids.to(heads.device), heads.new_draft_cache()
    if features is not None:
        features = features.to(heads.device)
    heads.start_draft(cache, ids, features)
    newest = None if features is None else features[:, -1:]
    devices = (heads.device,)
    room = torch.eye(most_rows, dtype=torch.bool, device=heads.device)[None]

    def draft(size: int) -> tuple[float, float]:
        states: list[torch.Tensor] = []
        first = _seconds(devices, lambda: states.append(heads.start_draft(cache, ids[:, -2:], newest)[0]))
        if heads.max_draft_positions == 1:
            return first, 0.0
        parents = states[0].expand(-1, size, *states[0].shape[2:])
        tokens, visible = ids[:, :1].expand(-1, size), room[:, :size, :size]
        return first, _seconds(devices, lambda: heads.extend_draft(cache, 1, tokens, parents, visible))

    return draft
