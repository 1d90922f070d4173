"""The engine's choice of trees, replayed many times on recorded drafts and round times, with a simulated noisy clock.

    python -m benchmarks replay --heads model_cards/poss3-longer model_cards/eagle model_cards/dspark

The benchmark `default` runs the engine's choice only once, so luck in the choice and in the machine's speed affects
the result. Here the heads draft once at every place of every text, and rounds of a few trees are timed once. From
these records follows what a round over any tree would have cost and accepted, wherever it started. The engine's choice
can therefore be replayed on the same texts in many orders, with clocks that drift, fluctuate and sometimes stall. It
is compared with drafting a single tree in every round: the best among the trees it chooses from and chains of the
depths that it does not have.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel

from hf_specheads import DraftHead, DraftTreeConfig
from hf_specheads.generation.drafting.foresight import Reach
from hf_specheads.generation.pace.favourites import Favourites
from hf_specheads.generation.pace.menu import CHAIN_DEPTHS, DYNAMIC_TREES, farthest_chain, trees_to_choose
from hf_specheads.generation.pace.pace import PLAIN, Pace
from hf_specheads.generation.pace.tallies import TextTally, candidates_of
from hf_specheads.tree.default import default_tree
from hf_specheads.tuning.measure import interpolate
from hf_specheads.tuning.replay import RecordedDrafts, record_drafts, replay_dynamic
from hf_specheads.tuning.rounds import TimedRounds, time_rounds
from hf_specheads.tuning.turns import timed_generation

from .. import setup
from ..results import Result, column_table, draft_tree, footnote
from ..setup import Inputs
from ..sides import TO_THE_END

SEEDS, PASSES = 16, 3  # simulated courses of events, and passes over the texts in each
KEEPS = 0.98  # share of the machine's deviation in speed that carries over to the next round
FIRST_TAKES = 1.3  # factor on the time of the first round over each number of nodes
STALLED = (1.5, 6.0)  # range of the factor on the time of a stalled round
ENDING, SEVERAL = "chains that end where they like", "chains of several depths"
WIDEST = max(top_k for _, top_k, _ in DYNAMIC_TREES)


@dataclass(frozen=True)
class Machine:
    """Reliability of a simulated machine's clock.

    Attributes:
        noise: Standard deviation of the logarithm of a round's time.
        drift: Standard deviation of the logarithm of the machine's slowly varying speed.
        stalls: Share of rounds that stall.
    """

    noise: float
    drift: float
    stalls: float


MACHINES = {"calm": Machine(0.04, 0.08, 0.01), "shared with others": Machine(0.12, 0.12, 0.03)}


@dataclass(frozen=True)
class Recording:
    """Costs and accepted drafts of rounds that start at any place of some texts.

    Attributes:
        drafts: Drafts of the heads at every place.
        rounds: Seconds of rounds.
        plain_seconds: Seconds of a plain step.
        begins: Place at which every text begins, followed by the end of the last text.
        one_forward: Whether the heads draft all positions in one forward.
    """

    drafts: RecordedDrafts
    rounds: TimedRounds
    plain_seconds: float
    begins: list[int]
    one_forward: bool

    @cached_property
    def favourites(self) -> list[int]:
        """Number of the heads' favourites that are right in a row, by place."""
        return (self.drafts.true_ranks == 0).long().cumprod(dim=1).sum(dim=1).tolist()

    @cached_property
    def sureness(self) -> list[list[float]]:
        """Log-probabilities of the links of the chain of favourites, by place. The list ends early where the chain
        leaves the recorded frontier."""
        drafts, found = self.drafts, []
        for place in range(len(drafts.true_ranks)):
            slot, before, links = 0, 0.0, []
            for level, scores in enumerate(drafts.scores):
                links.append(float(scores[place, slot, 0]) - before)
                before += links[-1]
                if level == len(drafts.frontiers):
                    break
                chosen = drafts.frontiers[level][place].tolist()
                if slot * drafts.top_k not in chosen:
                    break
                slot = chosen.index(slot * drafts.top_k)
            found.append(links)
        return found

    def told(self, place: int, tree: DraftTreeConfig, depth: int, accepted: int) -> Favourites:
        """Returns what a round over a tree reveals about the heads' favourites.

        Args:
            place: Where the round starts.
            tree: The tree.
            depth: Links of the chain of favourites.
            accepted: Number of drafts that the round accepts.
        """
        right = self.favourites[place]
        if right >= depth:
            return Favourites(depth, depth)
        rank = int(self.drafts.true_ranks[place, right])
        if tree.kind == "chain" or accepted > right:
            return Favourites(right, depth, rank)
        return Favourites(
            right, depth, min(rank, max(round(candidates_of(tree, [1.0] * tree.depth)[0]), 1)), at_least=True
        )

    def accepted(self, tree: DraftTreeConfig) -> list[int]:
        """Returns the number of accepted drafts of a tree, by place."""
        if tree.kind == "chain":
            return [min(number, tree.depth) for number in self.favourites]
        return replay_dynamic(self.drafts, tree.depth, tree.top_k).accepted(tree.total_tokens).tolist()

    def seconds(self, tree: DraftTreeConfig) -> float:
        """Returns the seconds of a round over a tree."""
        if tree.kind == "chain":
            return self.rounds.of_chain(tree.depth)
        return self.rounds.of_dynamic(tree.depth, tree.top_k, tree.total_tokens)

    def seconds_of_links(self, drafted: int, kept: int) -> float:
        """Returns the seconds of a round over a chain that drafted `drafted` links and verifies `kept` of them."""
        drafting = interpolate(self.rounds.chain_draft, drafted)
        return drafting + interpolate(self.rounds.chain_target, kept + 1) + self.rounds.other

    def always(self, tree: DraftTreeConfig | None) -> float:
        """Returns the seconds for all texts if every round drafts this tree; with `None`, if all steps are plain."""
        if tree is None:
            return self.plain_seconds * self.begins[-1]
        accepted, rounds = self.accepted(tree), 0
        for begin, end in zip(self.begins, self.begins[1:], strict=False):
            while begin < end:
                begin, rounds = begin + accepted[begin] + 1, rounds + 1
        return rounds * self.seconds(tree)


def record(target: PreTrainedModel, heads: DraftHead, prompts: list[Inputs], new_tokens: int) -> Recording:
    """Records the drafts and times of a pair."""
    ids = [inputs["input_ids"] for inputs in prompts]
    deepest = max(farthest_chain(heads, target), *CHAIN_DEPTHS)
    drafts = record_drafts(target, heads, ids, deepest, WIDEST, new_tokens, **TO_THE_END)
    rounds = time_rounds(target, heads, ids[:3], 2, max_new_tokens=new_tokens, **TO_THE_END)
    steps = []
    for one in ids[:3]:
        whole, first = (timed_generation(target, one, max_new_tokens=n, **TO_THE_END)[1] for n in (new_tokens, 1))
        steps.append((whole - first) / (new_tokens - 1))
    begins = [sum(drafts.lengths[:text]) for text in range(len(drafts.lengths) + 1)]
    return Recording(drafts, rounds, statistics.median(steps), begins, heads.drafts_in_one_forward)


class Clock:
    """Turns true seconds into simulated measured ones."""

    def __init__(self, rng: random.Random, machine: Machine):
        self.rng, self.machine, self.speed = rng, machine, 0.0
        self.seen: set[int] = set()

    def measures(self, seconds: float, nodes: int = 1) -> float:
        """Returns a simulated measurement of `seconds`: the machine's speed drifts, and rounds are noisy and sometimes
        stall. The first round over each number of nodes takes longer, as it prepares what later rounds reuse."""
        seconds *= 1.0 if nodes in self.seen else FIRST_TAKES
        self.seen.add(nodes)
        self.speed = KEEPS * self.speed + self.machine.drift * math.sqrt(1 - KEEPS**2) * self.rng.gauss(0, 1)
        stalled = self.rng.uniform(*STALLED) if self.rng.random() < self.machine.stalls else 1.0
        return seconds * math.exp(self.speed + self.machine.noise * self.rng.gauss(0, 1)) * stalled


def passes(
    recording: Recording, menu: tuple[DraftTreeConfig, ...], ending: bool, machine: Machine, seed: int
) -> Iterator[float]:
    """Yields the true seconds of every pass over the texts, in one simulated course of events."""
    rng = random.Random(seed)
    clock, pace = Clock(rng, machine), Pace(menu, ending=ending)
    accepted = [recording.accepted(tree) for tree in menu]
    texts = list(zip(recording.begins, recording.begins[1:], strict=False))
    rng.shuffle(texts)  # the order of easy and hard texts is random, too
    for _ in range(PASSES):
        spent = 0.0
        for begin, end in texts:
            pace.begin_call((text := Text()).tally)
            while begin < end:
                seconds, number = _round(recording, pace, clock, text, accepted, begin)
                begin, spent = begin + number + 1, spent + seconds
        yield spent


@dataclass
class Text:
    """What the engine knows about the current text."""

    tally: TextTally = field(default_factory=TextTally)
    moods: list[float | None] = field(default_factory=lambda: [None])
    drafted: bool = False  # the first draft also takes in the prompt, so its time is no measure of a round


def _round(
    recording: Recording, pace: Pace, clock: Clock, text: Text, accepted: list[list[int]], place: int
) -> tuple[float, int]:
    """Simulates one round. Returns its true seconds and its number of accepted drafts."""
    choice = pace.choose(place, text.tally)
    if choice == PLAIN:
        pace.record_plain(clock.measures(recording.plain_seconds))
        return recording.plain_seconds, 0
    reach = pace.reach(choice, text.moods, recording.one_forward)
    if reach is None:
        seconds, number = recording.seconds(pace.menu[choice]), accepted[choice][place]
        nodes = pace.menu[choice].num_nodes
    else:
        seconds, number = _link_by_link(recording, reach, place)
        nodes = reach.levels + 1
    measured = clock.measures(seconds, nodes)
    if text.drafted:
        tree = pace.menu[choice]
        asked = reach is None or reach.offered is not None
        told = [recording.told(place, tree, tree.depth if reach is None else reach.levels, number)] if asked else None
        pace.record_round(choice, measured, [number], reach, text.tally, told)
    else:
        pace.record_intake(choice, measured, [number], text.tally)
    text.drafted = True
    return seconds, number


def _link_by_link(recording: Recording, reach: Reach, place: int) -> tuple[float, int]:
    """Simulates a chain whose length the engine decides link by link. Returns seconds and number of accepted
    drafts."""
    for sureness in recording.sureness[place]:
        if not reach.keeps([sureness]) or not reach.goes_on():
            break
    number = min(recording.favourites[place], reach.levels)
    reach.learn([number])
    return recording.seconds_of_links(reach.drafted, reach.levels), number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair and the prompts."""
    setup.add_generation_arguments(parser, heads=["poss3", "eagle"], prompts=["chats"])
    parser.set_defaults(limit=8, max_new_tokens=96)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures every head."""
    target, loaded, prompts = setup.load_pair(args, every_round=True)
    return {
        "heads": {
            name: measure_heads(target, heads, record(target, heads, prompts, args.max_new_tokens))
            for name, heads in loaded.items()
        }
    }


def measure_heads(target: PreTrainedModel, heads: DraftHead, recording: Recording) -> dict[str, Any]:
    """Compares the engine's choice, in many courses of events, with the best fixed tree."""
    deepest, farthest = heads.max_draft_positions, farthest_chain(heads, target)
    begins = default_tree(heads.device, heads.published_tree, deepest)
    at_once = heads.drafts_in_one_forward
    several = trees_to_choose(begins, deepest, heads.tree_problem, at_once=at_once)
    fixed = {tree: recording.always(tree) for tree in (None, *several)}
    best = min(fixed, key=lambda tree: fixed[tree])
    one = trees_to_choose(begins, deepest, heads.tree_problem, farthest=farthest, at_once=at_once)
    menus = {ENDING: (one, True), SEVERAL: (several, False)}
    return {
        "best": None if best is None else best.to_dict(),
        "speed_up": fixed[None] / fixed[best],
        "choices": {
            how: {
                name: _shares(fixed[best], [list(passes(recording, *menu, machine, seed)) for seed in range(SEEDS)])
                for name, machine in MACHINES.items()
            }
            for how, menu in menus.items()
        },
    }


def _shares(best: float, courses: list[list[float]]) -> dict[str, float]:
    """Returns the speeds that the engine's choice reached, as shares of the best tree's tokens per second."""
    later = [best * (PASSES - 1) / sum(course[1:]) for course in courses]
    first = statistics.mean(best / course[0] for course in courses)
    return {"first": first, "later": statistics.mean(later), "least": min(later)}


def table(result: Result) -> str:
    """One row per head, way to choose and simulated machine."""
    rows = [
        {"heads": name, "how": how, "machine": machine, **found, **shares}
        for name, found in result["heads"].items()
        for how, machines in found["choices"].items()
        for machine, shares in machines.items()
    ]
    columns = {
        "heads": lambda row: row["heads"], "best fixed tree": _best, "its speed-up": ("speed_up", 2, "x"),
        "chosen from": lambda row: row["how"], "machine": lambda row: row["machine"],
        "first pass / best": ("first", 3), "later passes / best": ("later", 3),
        "slowest simulation / best": ("least", 3),
    }  # fmt: skip
    return column_table(columns, rows) + footnote(
        result, f"{SEEDS} simulations of {PASSES} passes over {{num_prompts}} texts each",
        "slowest simulation: its later passes; only rounds are timed, without prefills; {dtype}",
    )  # fmt: skip


def _best(row: dict[str, Any]) -> str:
    return "none: plain steps" if row["best"] is None else draft_tree(row["best"])
