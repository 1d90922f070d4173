"""Ways to generate the same text, taking turns, and what they took and accepted."""

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
Options = dict[str, Any]  # what `generate` gets of one side, on top of the common ones
TO_THE_END: Options = {"eos_token_id": None, "pad_token_id": 0}  # every text gets as many tokens


@dataclass
class Run:
    """One generation of one prompt or batch; `stats` only with heads."""

    token_ids: list[list[int]]
    seconds: float
    target_forwards: int
    stats: GenerationStats | None = None


def plain_and(heads: Mapping[str, DraftHead], **options: Any) -> dict[str, Options]:
    """Plain generation, and heads by name; `options` are for all of them."""
    return {PLAIN: options, **{name: {**options, "assistant_model": one} for name, one in heads.items()}}


def generate_once(
    target: PreTrainedModel, options: Options, inputs: Inputs, max_new_tokens: int, seed: int = 0
) -> Run:
    """One timed generation, counting the target's forwards; greedy unless the options say otherwise."""
    torch.manual_seed(seed)
    heads = options.get("assistant_model")
    if heads is not None and heads.compiled:  # which a hook would have compiled anew
        ids, seconds = timed_generation(target, inputs, max_new_tokens=max_new_tokens, **options)
        return Run(ids, seconds, heads.last_stats.target_forwards, heads.last_stats)
    with CountForwards(target) as forwards:
        ids, seconds = timed_generation(target, inputs, max_new_tokens=max_new_tokens, **options)
    return Run(ids, seconds, forwards.count, None if heads is None else heads.last_stats)


def run_interleaved(
    target: PreTrainedModel, sides: Mapping[str, Options], prompts: list[Inputs], max_new_tokens: int, repeats: int
) -> dict[str, list[list[Run]]]:
    """Every side on every prompt, `repeats` times, in turns; those that sample get a seed per prompt and repeat.

    Returns:
        Runs by name of the side, `[repeat][prompt]`.
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
    """Wall seconds of every call, `repeats` times and in turns, and what each gave last; warm-ups come before all, and
    `before` each, untimed."""
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
    """Wall seconds of every call of a function of a module, class or object, while the context lasts."""
    original: Callable[..., Any] = getattr(owner, name)
    seconds: list[float] = []

    @functools.wraps(original)  # generate looks at the signature of `forward`
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
    """Numbers about every side, by name; the first side is what the others are compared with."""
    return summaries(target, sides, prompts, run_interleaved(target, sides, prompts, max_new_tokens, repeats))


def summaries(
    target: PreTrainedModel, sides: Mapping[str, Options], prompts: list[Inputs], runs: Mapping[str, list[list[Run]]]
) -> dict[str, Any]:
    """Numbers about runs of every side, as [`compare`] gives them. Sampled texts are not compared: both are drawn. Of
    texts that differ from the plain ones it is told how many do where logits tie."""
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
    """Speed of one side over that of another, over texts that are equally long: time over time, all runs together.
    The interval is over the runs, those of a prompt in a turn being drawn together."""
    seconds = [[run.seconds for repeat in runs for run in repeat] for runs in (theirs, mine)]
    return careful(ratio_interval(*seconds), len(seconds[0]))


def max_nodes(side: Options) -> int:
    """Tokens of a forward of the target with the heads of a side, at the most; 1 of plain generation."""
    heads = side.get("assistant_model")
    return 1 if heads is None else heads.tree_config.most_nodes


def num_tokens(runs: list[Run]) -> int:
    """New tokens of several prompts."""
    return sum(len(row) for run in runs for row in run.token_ids)


def rate(runs: list[Run]) -> float:
    """Tokens per second over several prompts, prefill included."""
    return num_tokens(runs) / sum(run.seconds for run in runs)


def summarise(runs: list[list[Run]], plain: list[list[Run]]) -> dict[str, Any]:
    """Plain numbers about one side.

    The speed-up is the median over repeats of the ratio of tokens per second within a repeat; `speed_up_range` are
    the lowest and the highest. `forwards_saved` is next to a forward per token of a batch's longest text.

    Args:
        runs: Of the side, `[repeat][prompt]`.
        plain: Of plain `generate`, from the same call of [`run_interleaved`].
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
    """The median of ratios within repeats, and their range."""
    return {"speed_up": statistics.median(ratios), "speed_up_range": [min(ratios), max(ratios)]}


def acceptance(runs: Sequence[Run]) -> dict[str, Any]:
    """What drafts brought, pooled over runs; empty without heads.

    Acceptance length and pos-acc are of rounds, tokens per forward of all forwards: plain steps and prefills too. Of
    heads that profile, the time of drafting in a round as well.
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
