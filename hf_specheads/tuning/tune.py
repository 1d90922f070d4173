"""`heads.tune`: finding the draft tree that gives the most tokens per second with given heads, target and machine.

Tuning has three steps. First, drafts are recorded once at every place of some texts, from which follows how many
tokens any tree would have accepted (`replay`). Second, rounds of a number of trees are timed in real generations, from
which follows what any tree costs (`rounds`). Third, the trees with the highest predicted speed are timed against each
other and against plain generation, and the fastest is chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..contract import DraftingContract
from ..texts import all_token_ids
from ..tree.config import DraftTreeConfig
from ..tree.default import machine_key, tuned_entry, without_machine
from .replay import RecordedDrafts, accepted_by_ranks, favourite_paths, record_drafts, replay_dynamic, walk
from .rounds import TimedRounds, time_rounds
from .search import search_tree
from .turns import Prompts, every_round_drafts, take_turns, timed_generation

TOP_KS = (1, 2, 3, 4, 5, 6, 8)
STOPS = (0.1, 0.2, 0.3, 0.4, 0.5)  # values of `stop_below`
CONFIDENCES = (0.3, 0.5, 0.7)  # values of `stop_below` for heads that predict acceptance
DEPTH = 8  # default depth of the deepest trees, for heads that need a forward per level
AS_FAST = 0.98  # trees above this share of the fastest tree's tokens per second count as equally fast (timing noise)
SIZES = (3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)  # numbers of nodes, root included


@dataclass(frozen=True)
class TunedTree:
    """One tree with its predicted speed and, for the most promising trees, its measured speed.

    Attributes:
        tree: The tree.
        acceptance_length: Predicted tokens per round; `None` if there is no prediction.
        predicted: Predicted tokens per second, without the prefill.
        measured: Tokens per second of timed generations, including the prefill.
        spread: Measured tokens per second from every prompt's slowest repeat and from its fastest repeat; the latter
            is `measured`.
    """

    tree: DraftTreeConfig
    acceptance_length: float | None = None
    predicted: float | None = None
    measured: float | None = None
    spread: tuple[float, float] | None = None


@dataclass(frozen=True)
class TuningResult:
    """The outcome of `heads.tune`.

    Attributes:
        trees: The timed trees, best first; `trees[0]` is chosen. Trees whose speed cannot be told apart from the
            fastest come first, ordered by number of nodes. All others follow by speed.
        plain: Tokens per second of plain generation, from the same runs.
        before: The tree that the heads used before, with its measurement from the same runs.
        key: What the result is valid for: `machine`, `dtype`, `threads`.
        candidates: Number of trees considered.
        seconds: Wall-clock seconds that tuning took.
    """

    trees: tuple[TunedTree, ...]
    plain: float
    before: TunedTree
    key: dict[str, Any]
    candidates: int
    seconds: float

    @property
    def tree(self) -> DraftTreeConfig:
        """The chosen tree."""
        return self.trees[0].tree

    @property
    def speed_up(self) -> float:
        """Speed-up of the chosen tree over plain generation."""
        return (self.trees[0].measured or 0.0) / self.plain

    def entry(self) -> dict[str, Any]:
        """Returns the entry that is saved with the heads in `config.tuned`."""
        return tuned_entry(self.key, self.tree, self.trees[0].measured or 0.0, self.plain)

    def table(self) -> str:
        """Returns all timed trees as text, one per line."""
        lines = [f"{'tree':<34} {'tau':>5} {'predicted':>10} {'measured':>9}  tokens/s"]
        for one in (*self.trees, *(() if self.before in self.trees else (self.before,))):
            tau = "" if one.acceptance_length is None else f"{one.acceptance_length:.2f}"
            predicted = "" if one.predicted is None else f"{one.predicted:.1f}"
            note = " (before)" if one.tree == self.before.tree else ""
            lines.append(f"{describe(one.tree) + note:<34} {tau:>5} {predicted:>10} {one.measured or 0.0:>9.1f}")
        lines.append(f"{'plain generate':<34} {'1.00':>5} {'':>10} {self.plain:>9.1f}")
        if self.speed_up < 1:
            lines.append("No tree is faster than plain generation here.")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def describe(tree: DraftTreeConfig) -> str:
    """Describes a tree in a few words."""
    stop = f", stop {tree.stop_below:g}" if tree.stop_below else ""
    stop += f", lookup {tree.lookup}" if tree.lookup else ""
    if tree.kind == "chain":
        return f"chain, depth {tree.depth}{stop}"
    width = f", top_k {tree.top_k}" if tree.kind == "dynamic" else ""
    return f"{tree.kind}, depth {tree.depth}{width}, {tree.total_tokens} nodes{stop}"


# ---------------------------------------------------------------------- predictions
def predict(record: RecordedDrafts, rounds: TimedRounds, **tree: Any) -> list[TunedTree]:
    """Returns all candidate trees with their predicted speed, the fastest first.

    Args:
        record: Recorded drafts to replay.
        rounds: Costs of rounds.
        **tree: Further fields of the tree configs.
    """
    found = [_predicted(record, c, accepted_by_ranks(record, c.paths), rounds.of_chain(c.depth))
             for c in _chains(record.depth, tree)]  # fmt: skip
    found += _stopping_chains(record, rounds, tree)
    if rounds.tree_target:
        found += _dynamic_trees(record, rounds, tree)
        found += _fixed_trees(record, rounds, tree)
    return sorted(found, key=lambda one: -(one.predicted or 0.0))


def _chains(depth: int, tree: dict[str, Any]) -> list[DraftTreeConfig]:
    return [DraftTreeConfig(kind="chain", depth=d, top_k=1, total_tokens=d + 1, **tree) for d in range(1, depth + 1)]


def _stopping_chains(record: RecordedDrafts, rounds: TimedRounds, tree: dict[str, Any]) -> Iterable[TunedTree]:
    """Chains as deep as the recorded drafts, which stop where the draft probability falls below `stop_below`."""
    depth, whole = record.depth, _chains(record.depth, tree)[-1]
    accepted, replayed = accepted_by_ranks(record, whole.paths), replay_dynamic(record, depth, 1)
    seconds = torch.tensor([0.0, *(rounds.of_chain(levels) for levels in range(1, depth + 1))], dtype=torch.float64)
    for stop in STOPS if depth > 1 else ():
        levels = replayed.levels(stop)
        yield _predicted(record, whole.replace(stop_below=stop), torch.minimum(accepted, levels), seconds[levels])


def _predicted(
    record: RecordedDrafts, config: DraftTreeConfig, accepted: torch.Tensor, seconds: torch.Tensor | float
) -> TunedTree:
    length, cost = walk(record, accepted, seconds)
    return TunedTree(config, length, length / cost)


def _dynamic_trees(record: RecordedDrafts, rounds: TimedRounds, tree: dict[str, Any]) -> Iterable[TunedTree]:
    for depth in range(1, record.depth + 1):
        for top_k in TOP_KS[1:]:
            if top_k > record.top_k:
                break
            replayed, most = replay_dynamic(record, depth, top_k), 1 + top_k + (depth - 1) * top_k * top_k
            for nodes in (size for size in SIZES if depth < size <= most):
                config = DraftTreeConfig(depth=depth, top_k=top_k, total_tokens=nodes, **tree)
                yield _predicted(record, config, replayed.accepted(nodes), rounds.of_dynamic(depth, top_k, nodes))


def _fixed_trees(record: RecordedDrafts, rounds: TimedRounds, tree: dict[str, Any]) -> Iterable[TunedTree]:
    for depth in range(1, record.depth + 1):
        paths = favourite_paths(record, max(SIZES), depth)
        for nodes in (size for size in SIZES if size <= len(paths) + 1):
            chosen = paths[: nodes - 1]
            config = DraftTreeConfig(kind="static", choices=chosen, **tree)
            if config.depth == depth:  # shallower trees were predicted in an earlier iteration
                yield _predicted(record, config, accepted_by_ranks(record, chosen), rounds.of_fixed(chosen))


def shortlist(candidates: Sequence[TunedTree], size: int) -> list[TunedTree]:
    """Returns the most promising trees: the best of each kind, then the best that differ from all taken before.

    Trees of equal kind, `stop_below`, depth and width perform alike, so only the best of them is taken. (For chains
    and static trees the number of nodes counts instead of the width.)
    """
    chosen: list[TunedTree] = []
    seen: set[tuple] = set()
    firsts = [next((c for c in candidates if c.tree.kind == kind), None) for kind in ("chain", "static", "dynamic")]
    for one in (*(first for first in firsts if first is not None), *candidates):
        tree = one.tree
        shape = (tree.kind, tree.stop_below, tree.depth, tree.top_k if tree.kind == "dynamic" else tree.total_tokens)
        if shape not in seen and len(chosen) < size:
            seen.add(shape)
            chosen.append(one)
    return chosen


# ---------------------------------------------------------------------- tuning
def tune(
    target: PreTrainedModel,
    heads: DraftingContract,
    prompts: Prompts,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 64,
    depth: int | None = None,
    top_k: int = 8,
    confirm: int = 6,
    repeats: int = 3,
    **generate_options: Any,
) -> TuningResult:
    """Finds the fastest draft tree of heads on the current machine. The heads use it from then on and save it.

    Args:
        target: The target as it will be used: its dtype, device and quantisation matter, and so does the number of
            threads.
        heads: The target's heads.
        prompts: Prompts like those of later calls: token ids, [1, T] or plain lists, or strings and chats. A dozen is
            enough. With four or more, trees are predicted on one half and timed on the other, since a tree is fitted
            to the texts it was predicted on.
        tokenizer: The target's tokenizer, for prompts that are strings or chats.
        max_new_tokens: Tokens per prompt in every run.
        depth: Depth of the deepest trees to consider, capped at what the heads can draft. The default is 8, or all
            positions for heads that draft them in one forward.
        top_k: Width of the widest dynamic trees to consider.
        confirm: Number of most promising trees to time against each other.
        repeats: Number of times everything is timed.
        **generate_options: Options of `generate`, e.g. `do_sample=True, temperature=0.6`; greedy by default.

    Raises:
        ValueError: if there are no prompts, nothing can be drafted on them, or strings are given without a tokenizer.
    """
    started = time.perf_counter()
    prompts = all_token_ids(prompts, tokenizer)
    heads.bind(target)
    options = {**generate_options, "max_new_tokens": max_new_tokens}
    made_for, judged_on = (prompts[::2], prompts[1::2]) if len(prompts) >= 4 else (prompts, prompts)
    deepest = depth if depth is not None else (heads.drafts_in_one_forward and heads.max_draft_positions) or DEPTH
    candidates = _candidates(target, heads, made_for, deepest, top_k, repeats, options)
    before = next((one for one in candidates if one.tree == heads.tree_config), TunedTree(heads.tree_config))
    chosen = shortlist(candidates, confirm) + (_cut_by_confidence(candidates) if heads.predicts_acceptance else [])
    chosen += [] if before in chosen else [before]
    plain, measured = confirm_trees(target, heads, judged_on, chosen, repeats, **options)
    result = TuningResult(
        trees=tuple(ranked(measured)),
        plain=plain,
        before=next(one for one in measured if one.tree == before.tree),
        key=machine_key(heads.device, heads.dtype),
        candidates=len(candidates),
        seconds=time.perf_counter() - started,
    )
    heads.config.tuned = [*without_machine(heads.config.tuned, result.key), result.entry()]
    heads.forget_tree()
    return result


def _cut_by_confidence(candidates: list[TunedTree]) -> list[TunedTree]:
    """Returns the deepest chain with several thresholds of predicted acceptance.

    The recorded drafts do not contain the predicted acceptance, so these chains are timed without a prediction.
    """
    chains = [one.tree for one in candidates if one.tree.kind == "chain"]
    if not chains:
        return []
    deepest = max(chains, key=lambda tree: tree.depth)
    return [TunedTree(deepest.replace(stop_below=stop)) for stop in CONFIDENCES]


def _candidates(
    target: PreTrainedModel,
    heads: DraftingContract,
    prompts: Prompts,
    depth: int,
    top_k: int,
    repeats: int,
    options: dict[str, Any],
) -> list[TunedTree]:
    """Returns all candidate trees with their predicted speed on the prompts, the fastest first."""
    tree = {name: getattr(heads.tree_config, name) for name in ("children", "draft_temperature", "lookup")}
    if tree["children"] == "sampled" and options.get("do_sample"):
        return _trees_of_drawn_children(target, heads, prompts, depth, tree, options)
    record = record_drafts(target, heads, prompts, depth, top_k, **options)
    rounds = time_rounds(target, heads, prompts, repeats, **options)
    found = predict(record, rounds, **{**tree, "children": "top_k"})
    # For heads that predict acceptance, `stop_below` is compared with their prediction, which was not recorded.
    return [one for one in found if one.tree.stop_below == 0] if heads.predicts_acceptance else found


def ranked(trees: Sequence[TunedTree]) -> list[TunedTree]:
    """Sorts timed trees: first those about as fast as the fastest, by number of nodes, then the others by speed."""
    fastest = max(one.measured or 0.0 for one in trees)

    def place(one: TunedTree) -> tuple[bool, float, float]:
        measured = one.measured or 0.0
        as_fast = measured >= AS_FAST * fastest
        return not as_fast, one.tree.num_nodes if as_fast else 0, -measured

    return sorted(trees, key=place)


def _trees_of_drawn_children(
    target: PreTrainedModel,
    heads: DraftingContract,
    prompts: Prompts,
    depth: int,
    tree: dict[str, Any],
    options: dict[str, Any],
) -> list[TunedTree]:
    """Returns candidates for drawn children: Sequoia's tree, and chains.

    Drawn children are verified by another rule, which cannot be replayed.
    """
    found = search_tree(target, heads, prompts, max_depth=depth, **options)
    optimal = TunedTree(found.tree, found.acceptance_length, 1 / found.seconds_per_token)
    return [optimal, *(TunedTree(chain) for chain in _chains(min(depth, heads.max_draft_positions or depth), tree))]


def confirm_trees(
    target: PreTrainedModel,
    heads: DraftingContract,
    prompts: Prompts,
    trees: Sequence[TunedTree],
    repeats: int,
    **options: Any,
) -> tuple[float, list[TunedTree]]:
    """Times plain generation and trees, which take turns, and returns their tokens per second.

    Every prompt counts with its fastest repeat, because other load on the machine can only slow a run down.
    """
    sides: list[DraftTreeConfig | None] = [None, *(one.tree for one in trees)]

    def run(side: int, prompt: Any, turn: int = 0, **changes: Any) -> float:
        """Returns the seconds per token of one generation."""
        tree = sides[side]
        assistant = {} if tree is None else {"assistant_model": heads.with_tree(**tree.to_dict())}
        with every_round_drafts(assistant.get("assistant_model", heads)):
            (new_ids,), seconds = timed_generation(target, prompt, **assistant, **{**options, **changes})
        return seconds / len(new_ids)

    def warm_up(side: int, prompt: Any) -> None:
        run(side, prompt, max_new_tokens=8)

    seconds = take_turns(range(len(sides)), prompts, run, repeats, warm_up, "the best trees in turns")

    def rate(side: int, pick: Callable[[Sequence[float]], float] = min) -> float:
        return len(prompts) / sum(pick(repeats_of_prompt) for repeats_of_prompt in zip(*seconds[side], strict=True))

    measured = [
        replace(one, measured=rate(side), spread=(rate(side, max), rate(side)))
        for side, one in enumerate(trees, start=1)
    ]
    return rate(0), measured
