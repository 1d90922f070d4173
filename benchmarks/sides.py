"""Generates the same prompts in several ways (sides) that take turns, and summarises their times and acceptance."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
from transformers import PreTrainedModel

from hf_specheads import DraftHead
from hf_specheads.bootstrap import Interval, careful, ratio_interval
from hf_specheads.cli.bench import differences
from hf_specheads.metrics import GenerationStats, acceptance_length, position_acceptance
from hf_specheads.tuning.turns import take_turns, timed_generation
from tests.support.stubs import CountForwards

from .setup import Inputs

PLAIN = "plain generate"
Outcome = TypeVar("Outcome")
Options = dict[str, Any]  # arguments of `generate` for one side, in addition to the common ones
# without an end token, all texts have the same number of tokens
TO_THE_END: Options = {"eos_token_id": None, "pad_token_id": 0}


@dataclass
class Run:
    """One generation of one prompt or batch. `stats` is set only if draft heads were used."""

    token_ids: list[list[int]]
    seconds: float
    target_forwards: int
    stats: GenerationStats | None = None


def plain_and(heads: Mapping[str, DraftHead], **options: Any) -> dict[str, Options]:
    """Returns one side for plain generation and one per draft head, by name. All sides share `options`."""
    return {PLAIN: options, **{name: {**options, "assistant_model": one} for name, one in heads.items()}}


def generate_once(
    target: PreTrainedModel, options: Options, inputs: Inputs, max_new_tokens: int, seed: int = 0
) -> Run:
    """Runs and times one generation and counts the target's forwards. Greedy unless the options say otherwise."""
    torch.manual_seed(seed)
    heads = options.get("assistant_model")
    if heads is not None and heads.compiled:  # the hook of CountForwards would trigger recompilation
        ids, seconds = timed_generation(target, inputs, max_new_tokens=max_new_tokens, **options)
        return Run(ids, seconds, heads.last_stats.target_forwards, heads.last_stats)
    with CountForwards(target) as forwards:
        ids, seconds = timed_generation(target, inputs, max_new_tokens=max_new_tokens, **options)
    return Run(ids, seconds, forwards.count, None if heads is None else heads.last_stats)


def run_interleaved(
    target: PreTrainedModel, sides: Mapping[str, Options], prompts: list[Inputs], max_new_tokens: int, repeats: int
) -> dict[str, list[list[Run]]]:
    """Runs every side on every prompt `repeats` times, taking turns. Sampling is seeded per prompt and repeat.

    Returns:
        Runs by name of the side, indexed `[repeat][prompt]`.
    """

    def run(name: str, inputs: Inputs, turn: int) -> Run:
        return generate_once(target, sides[name], inputs, max_new_tokens, turn)

    def warm_up(name: str, inputs: Inputs) -> None:
        generate_once(target, sides[name], inputs, min(max_new_tokens, 16))

    return take_turns(sides, prompts, run, repeats, warm_up)


def timed_in_turns(
    calls: Mapping[str, Callable[[], Outcome]],
    repeats: int,
    warm_ups: int = 0,
    before: Callable[[], Any] = lambda: None,
) -> tuple[dict[str, list[float]], dict[str, Outcome]]:
    """Measures the wall seconds of every call, `repeats` times and in turns.

    All warm-ups run first. `before` runs ahead of every timed call and is not timed itself.

    Returns:
        The seconds of each call, and the value that its last run returned.
    """
    outcomes: dict[str, Outcome] = {}

    def run(name: str, _item: None, _turn: int) -> float:
        before()
        started = time.perf_counter()
        outcomes[name] = calls[name]()
        return time.perf_counter() - started

    def warm_up(name: str, _item: None) -> None:
        for _ in range(warm_ups):
            calls[name]()

    turns = take_turns(calls, [None], run, repeats, warm_up)
    return {name: [spent for (spent,) in found] for name, found in turns.items()}, outcomes


@contextmanager
def timed_calls(owner: Any, name: str) -> Iterator[list[float]]:
    """Records the wall seconds of every call of `owner.name` (`owner`: module, class or object) within the context."""
    original: Callable[..., Any] = getattr(owner, name)
    seconds: list[float] = []

    @functools.wraps(original)  # `generate` inspects the signature of `forward`
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - started)

    with mock.patch.object(owner, name, timed):
        yield seconds


def compare(
    target: PreTrainedModel, sides: Mapping[str, Options], prompts: list[Inputs], max_new_tokens: int, repeats: int
) -> dict[str, Any]:
    """Runs and summarises every side, by name. All sides are compared with the first one."""
    return summaries(target, sides, prompts, run_interleaved(target, sides, prompts, max_new_tokens, repeats))


def summaries(
    target: PreTrainedModel, sides: Mapping[str, Options], prompts: list[Inputs], runs: Mapping[str, list[list[Run]]]
) -> dict[str, Any]:
    """Summarises the runs of every side in the format of [`compare`].

    Sampled texts are not compared, because both are random draws. Where greedy texts differ from the plain ones, the
    summary also counts how many of them differ at a tie of logits.
    """
    plain = runs[next(iter(sides))]
    found = {name: summarise(mine, plain) for name, mine in runs.items()}
    for name, one in found.items():
        if sides[name].get("do_sample"):
            del one["identical"], one["differing_prompts"]
        elif not one["identical"]:
            nodes = max_nodes(sides[name])
            masked = [{"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs} for inputs in prompts]
            one |= differences(target, masked, runs[name], plain, {"nodes": nodes})
    return found


def speed_ratio(mine: list[list[Run]], theirs: list[list[Run]]) -> Interval:
    """Returns the speed of one side over that of another, as a ratio of the total times of all runs.

    Texts must be equally long. The confidence interval resamples pairs of runs: those with the same prompt and turn
    are drawn together.
    """
    seconds = [[run.seconds for repeat in runs for run in repeat] for runs in (theirs, mine)]
    return careful(ratio_interval(*seconds), len(seconds[0]))


def max_nodes(side: Options) -> int:
    """Returns the largest number of tokens in one target forward of a side; 1 for plain generation."""
    heads = side.get("assistant_model")
    return 1 if heads is None else heads.tree_config.most_nodes


def num_tokens(runs: list[Run]) -> int:
    """Counts the new tokens of several runs."""
    return sum(len(row) for run in runs for row in run.token_ids)


def rate(runs: list[Run]) -> float:
    """Returns tokens per second over several runs, prefill included."""
    return num_tokens(runs) / sum(run.seconds for run in runs)


def summarise(runs: list[list[Run]], plain: list[list[Run]]) -> dict[str, Any]:
    """Summarises one side in plain numbers.

    The speed-up is the median over repeats of the ratio of tokens per second within a repeat; `speed_up_range` holds
    the lowest and the highest ratio. `forwards_saved` compares with one forward per token of the longest text of each
    batch.

    Args:
        runs: Runs of the side, `[repeat][prompt]`.
        plain: Runs of plain `generate`, from the same call of [`run_interleaved`].
    """
    ratios = [rate(mine) / rate(theirs) for mine, theirs in zip(runs, plain, strict=True)]
    first = runs[0]
    forwards = sum(run.target_forwards for run in first)
    same = [mine.token_ids == theirs.token_ids for mine, theirs in zip(first, plain[0], strict=True)]
    return {
        "tokens_per_second": statistics.median(rate(repeat) for repeat in runs),
        **speed_up_of(ratios),
        "new_tokens": num_tokens(first),
        "target_forwards": forwards,
        "forwards_saved": 1 - forwards / sum(max(map(len, run.token_ids)) for run in first),
        "identical": all(same),
        "differing_prompts": [index for index, equal in enumerate(same) if not equal],
        **acceptance(first),
    }


def speed_up_of(ratios: list[float]) -> dict[str, Any]:
    """Returns the median and the range of ratios that were each taken within one repeat."""
    return {"speed_up": statistics.median(ratios), "speed_up_range": [min(ratios), max(ratios)]}


def acceptance(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns what the drafts achieved, pooled over runs; empty without draft heads.

    Acceptance length and pos-acc count rounds only. Tokens per forward count all forwards, including plain steps and
    prefills. For draft heads that profile, the drafting time per round is included.
    """
    stats = [run.stats for run in runs if run.stats is not None]
    if not stats:
        return {}
    accepted = [row for one in stats for row in one.num_accepted]
    offered = [row for one in stats for row in one.offered]
    timed = [one for one in stats if one.profile]
    drafting = sum(one.seconds["draft"] for one in timed) / max(sum(one.rounds for one in timed), 1)
    return {
        "plain_steps": sum(one.plain_steps for one in stats),
        "plain_share": sum(one.plain_steps for one in stats) / sum(one.target_forwards for one in stats),
        "tokens_per_forward": sum(one.new_tokens for one in stats) / sum(one.target_forwards for one in stats),
        "acceptance_length": acceptance_length(accepted),
        "pos_acc": position_acceptance(accepted, offered),
        "draft_forwards": sum(one.draft_forwards for one in stats),
        **({"draft_milliseconds": 1000 * drafting} if timed else {}),
    }
