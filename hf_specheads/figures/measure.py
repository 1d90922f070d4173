"""Measures the data of the figures: chains by depth, trees by nodes, batches, n-alpha, and training curves."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..generation.refusals import tree_problem_of
from ..heads.base import DraftHead
from ..metrics import GenerationStats, acceptance_length, position_acceptance
from ..provenance import device_name, versions
from ..publishing.curves import curve, read_history
from ..texts import Text, left_padded, pad_token_id_of, token_ids_of
from ..tree.config import DraftTreeConfig
from ..tuning.progress import bar
from ..tuning.turns import generate_text, take_turns, timed_generation
from .n_alpha import agreement

PLAIN = "plain"
STAGES = ("draft", "target")  # keys of `GenerationStats.seconds` that are drawn
FACTS = ("training_facts.json", "trainer_state.json")


@dataclass(frozen=True)
class Sweeps:
    """Settings of the measurements.

    Attributes:
        depths: Depths of chains.
        nodes: Numbers of nodes of dynamic trees, the root included.
        batch_sizes: Numbers of sequences that are generated together, with a chain of depth `batch_depth`.
        batch_depth: Depth of the chain for batches.
        tree_depth, top_k: Depth of the dynamic trees, and children per node.
        max_n: Largest number of drafted features for n-alpha.
        max_new_tokens: Number of new tokens per prompt.
        repeats: Number of repetitions of everything that is timed; the median is reported.
        timing: Whether to measure times. Without them, other load on the machine does no harm.
    """

    depths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    nodes: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    batch_depth: int = 5
    tree_depth: int = 6
    top_k: int = 8
    max_n: int = 4
    max_new_tokens: int = 96
    repeats: int = 3
    timing: bool = True

    @classmethod
    def quick(cls, **changes: Any) -> Sweeps:
        """Settings for a first impression: few points, few tokens, no repetitions."""
        few = {"depths": (1, 3, 5), "nodes": (4, 16), "batch_sizes": (1, 2), "max_new_tokens": 32, "repeats": 1}
        return cls(**{**few, **changes})


class Side(NamedTuple):
    """One of the configurations that take turns: name of the heads (or [`PLAIN`]), kind of sweep, and its point."""

    heads: str
    sweep: str
    point: int


class Run(NamedTuple):
    """Result of one side on one prompt or batch: number of new tokens, wall seconds, statistics."""

    tokens: int
    seconds: float
    stats: GenerationStats | None


def measure(
    target: PreTrainedModel,
    heads: Mapping[str, DraftHead],
    prompts: Sequence[Text],
    tokenizer: PreTrainedTokenizerBase,
    sweeps: Sweeps | None = None,
    folders: Mapping[str, str | Path] | None = None,
) -> dict[str, Any]:
    """Measures all data of the figures, as plain values. All decoding is greedy, and every round drafts.

    Args:
        target: The target.
        heads: Draft heads of the target, by name; copies of them are used.
        prompts: Strings (which become chats of one message if the tokenizer has a template), chats, or token ids.
        tokenizer: Tokenizer of the target.
        sweeps: Settings of the measurements; default [`Sweeps`].
        folders: Folders of the heads, by name, for their training curves.

    Raises:
        ValueError: If there are no heads or no prompts.
    """
    if not heads or not prompts:
        raise ValueError(f"figures need heads and prompts, got {len(heads)} heads and {len(prompts)} prompts.")
    sweeps, started, load = sweeps or Sweeps(), time.time(), [busy()]
    rows = [_ids(prompt, tokenizer) for prompt in prompts]
    drafting = {name: one.bind(target).with_tree() for name, one in heads.items()}
    for one in drafting.values():
        one.adaptive = False
    skipped: list[str] = []
    sides = {**_chains(drafting, sweeps), **_trees(target, drafting, sweeps, skipped)}
    runs = _run_all(target, sides, rows, sweeps)
    load.append(busy())
    found: dict[str, Any] = {name: {"method": one.config.method} for name, one in drafting.items()}
    for side in sides:
        found[side.heads].setdefault(side.sweep, {})[str(side.point)] = _facts(runs[side], sweeps.timing)
    results = {"heads": found, "plain": {}, "skipped": skipped}
    if sweeps.timing:
        results["plain"]["tokens_per_second"] = _speed(runs[Side(PLAIN, PLAIN, 0)])
        _add_stages(target, sides, rows, found)
        _add_batches(target, drafting, rows, tokenizer, sweeps, results)
        load.append(busy())
    _add_n_alpha(target, drafting, rows, sweeps, found, skipped)
    for name, folder in (folders or {}).items():
        found[name]["training"] = training_curve(folder)
    name = next((known for one in drafting.values() if (known := (one.config.target or {}).get("name"))), None)
    settings = _settings(target, name, rows, sweeps)
    return {**results, "settings": settings, "machine": _machine(target, started, max(load))}


def busy() -> float:
    """Load per core, averaged over the last minute; times measured above 1 are unreliable."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _ids(prompt: Text, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if isinstance(prompt, str) and tokenizer.chat_template:
        prompt = [{"role": "user", "content": prompt}]
    return token_ids_of(prompt, tokenizer).tolist()


# ---------------------------------------------------------------------- sides in turns
def _chains(drafting: Mapping[str, DraftHead], sweeps: Sweeps) -> dict[Side, DraftHead]:
    """Sides with chains of all depths that the heads can draft."""
    sides = {}
    for name, one in drafting.items():
        for depth in sweeps.depths:
            tree = DraftTreeConfig(kind="chain", depth=depth)
            if one.tree_problem(tree) is None:
                sides[Side(name, "depths", depth)] = _with(one, tree)
    return sides


def _trees(
    target: PreTrainedModel, drafting: Mapping[str, DraftHead], sweeps: Sweeps, skipped: list[str]
) -> dict[Side, DraftHead]:
    """Sides with dynamic trees of all sizes, if target and heads support trees; adds reasons to `skipped` if not."""
    if problem := tree_problem_of(target, DynamicCache(config=target.config)):
        skipped.append(f"no draft trees: {problem}")
        return {}
    sides = {}
    for name, one in drafting.items():
        depth = min(sweeps.tree_depth, one.max_draft_positions or sweeps.tree_depth)
        for nodes in sweeps.nodes:
            tree = DraftTreeConfig(depth=depth, top_k=min(sweeps.top_k, nodes - 1), total_tokens=nodes)
            if problem := one.tree_problem(tree):
                skipped.append(f"{name}: {problem}")
                break
            sides[Side(name, "nodes", nodes)] = _with(one, tree)
    return sides


def _with(heads: DraftHead, tree: DraftTreeConfig) -> DraftHead:
    copied = heads.with_tree()
    copied.tree_config = tree
    return copied


def _run_all(
    target: PreTrainedModel, sides: Mapping[Side, DraftHead], rows: Sequence[list[int]], sweeps: Sweeps
) -> dict[Side, list[list[Run]]]:
    """Runs all sides, and plain decoding if times are measured, on all prompts in turns."""
    everybody: dict[Side, DraftHead | None] = {**sides}
    if sweeps.timing:
        everybody[Side(PLAIN, PLAIN, 0)] = None

    def run(side: Side, row: list[int], turn: int) -> Run:
        return _run(target, everybody[side], row, sweeps.max_new_tokens)

    def warm_up(side: Side, row: list[int]) -> None:
        if sweeps.timing:
            _run(target, everybody[side], row, 8)

    repeats = sweeps.repeats if sweeps.timing else 1
    return take_turns(everybody, rows, run, repeats, warm_up, what="chains and trees in turns")


def _run(target: PreTrainedModel, heads: DraftHead | None, prompt: Any, max_new_tokens: int) -> Run:
    new_ids, seconds = timed_generation(target, prompt, assistant_model=heads, max_new_tokens=max_new_tokens)
    return Run(sum(map(len, new_ids)), seconds, None if heads is None else heads.last_stats)


def _facts(runs: Sequence[Sequence[Run]], timing: bool) -> dict[str, Any]:
    """tau and pos-acc over all prompts, and tokens per second from the median time of the repeats."""
    stats = [run.stats for run in runs[0] if run.stats is not None]
    accepted = [row for one in stats for row in one.num_accepted]
    offered = [row for one in stats for row in one.offered]
    facts: dict[str, Any] = {
        "tau": acceptance_length(accepted),
        "pos_acc": position_acceptance(accepted, offered),
        "reached": _reached(accepted, offered),
        "rounds": sum(map(len, accepted)),
    }
    return {**facts, "tokens_per_second": _speed(runs)} if timing else facts


def _reached(accepted: list[list[int]], offered: list[list[int]]) -> list[int]:
    """Number of rounds from which every value of pos-acc was computed."""
    pairs = [pair for row, depths in zip(accepted, offered, strict=True) for pair in zip(row, depths, strict=True)]
    deepest = max((depth for _, depth in pairs), default=0)
    counts = [sum(d >= place and n >= place - 1 for n, d in pairs) for place in range(1, deepest + 1)]
    return [count for count in counts if count]


def _speed(runs: Sequence[Sequence[Run]]) -> float:
    tokens = sum(run.tokens for run in runs[0])
    return tokens / statistics.median(sum(run.seconds for run in repeat) for repeat in runs)


def _add_stages(
    target: PreTrainedModel, sides: Mapping[Side, DraftHead], rows: Sequence[list[int]], found: dict[str, Any]
) -> None:
    """Adds milliseconds per round for drafting and verifying, on the first prompt only.

    This is a separate run, because timing the stages means waiting for the device after each of them.
    """
    for side in bar(list(sides), "stages of a round"):
        heads = sides[side].with_tree()
        heads.profile = True
        _run(target, heads, rows[0], 48)
        stats = heads.last_stats
        assert stats is not None
        if stats.rounds:
            per_round = {stage: 1000 * stats.seconds[stage] / stats.rounds for stage in STAGES}
            found[side.heads][side.sweep][str(side.point)]["milliseconds"] = per_round


def _add_batches(
    target: PreTrainedModel,
    drafting: Mapping[str, DraftHead],
    rows: Sequence[list[int]],
    tokenizer: PreTrainedTokenizerBase,
    sweeps: Sweeps,
    results: dict[str, Any],
) -> None:
    """Adds tokens per second by batch size, if the target supports batches with heads, which require trees."""
    if problem := tree_problem_of(target, DynamicCache(config=target.config)):
        results["skipped"].append(f"no batches: {problem}")
        return
    sides: dict[str, DraftHead | None] = {PLAIN: None}
    for name, one in drafting.items():
        depth = min(sweeps.batch_depth, one.max_draft_positions or sweeps.batch_depth)
        sides[name] = _with(one, DraftTreeConfig(kind="chain", depth=depth))
    batches = [_batch(rows, size, tokenizer) for size in sweeps.batch_sizes]

    def run(name: str, batch: dict[str, torch.Tensor], turn: int) -> Run:
        return _run(target, sides[name], batch, sweeps.max_new_tokens)

    def warm_up(name: str, batch: dict[str, torch.Tensor]) -> Run:
        return _run(target, sides[name], batch, 8)

    runs = take_turns(sides, batches, run, sweeps.repeats, warm_up, what="batches in turns")
    for name in sides:
        speeds = {
            str(size): _speed([[repeat[index]] for repeat in runs[name]])
            for index, size in enumerate(sweeps.batch_sizes)
        }
        (results["plain"] if name == PLAIN else results["heads"][name])["batches"] = speeds


def _batch(rows: Sequence[list[int]], size: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, torch.Tensor]:
    """Makes a left-padded batch of `size` prompts; if there are fewer, prompts are repeated from the first."""
    chosen = [rows[index % len(rows)] for index in range(size)]
    return left_padded(chosen, pad_token_id_of(tokenizer))


def _add_n_alpha(
    target: PreTrainedModel,
    drafting: Mapping[str, DraftHead],
    rows: Sequence[list[int]],
    sweeps: Sweeps,
    found: dict[str, Any],
    skipped: list[str],
) -> None:
    """Adds n-alpha on the target's own texts, for heads that unroll over rows of a text."""
    texts = []
    for row in bar(rows, "texts for n-alpha"):
        text = generate_text(target, row, max_new_tokens=sweeps.max_new_tokens)
        if text.shape[1] > len(row) + sweeps.max_n + 1:
            texts.append((text, len(row)))
    for name, one in drafting.items():
        if not texts or one.trains_at_anchors or one.copied_ngrams is not None:
            skipped.append(f"{name}: n-alpha is defined for heads that draft from rows of a text")
            continue
        agreed = torch.cat([agreement(target, one, text, length, sweeps.max_n) for text, length in texts], dim=1)
        found[name]["n_alpha"] = agreed.double().mean(dim=1).tolist()


# ---------------------------------------------------------------------- what was there before
def training_curve(folder: str | Path) -> dict[str, list[list[float]]]:
    """Reads the training curves of heads, as lists of `[step, value]`; empty if their folder has no log.

    Args:
        folder: Folder with `training_facts.json`, which is saved with heads, or a checkpoint's `trainer_state.json`.
    """
    history = next((read_history(Path(folder) / name) for name in FACTS if (Path(folder) / name).is_file()), [])
    names = {"loss": "loss", "evaluation_loss": "eval_loss", "tau": "eval_acceptance_length"}
    return {name: points for name, key in names.items() if (points := curve(history, key))}


def _settings(target: PreTrainedModel, name: str | None, rows: Sequence[list[int]], sweeps: Sweeps) -> dict[str, Any]:
    name = name or target.config.name_or_path or type(target).__name__
    dtype = str(target.dtype).removeprefix("torch.")
    return {"target": Path(name).name, "dtype": dtype, "prompts": len(rows), **asdict(sweeps)}


def _machine(target: PreTrainedModel, started: float, load: float) -> dict[str, Any]:
    return {
        "device": device_name(target.device),
        "threads": torch.get_num_threads(),
        "versions": versions(("hf-specheads", "torch", "transformers")),
        "date": time.strftime("%Y-%m-%d", time.gmtime(started)),
        "seconds": round(time.time() - started),
        "load_per_core": round(load, 2),
    }


def sweeps_of(settings: Mapping[str, Any]) -> Sweeps:
    """Returns the settings that results were measured with."""
    known = {field.name for field in fields(Sweeps)}
    return Sweeps(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items() if k in known})
