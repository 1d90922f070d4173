"""Compare tokens per second of plain generation, heads that draft every round, adaptive heads, and compiled heads.

The sides take turns. Prompts are those of `specheads eval`, or published suites: `--suite ours` needs no network, the
others are read from the Hub with `datasets`. Every side runs every prompt (or batch of prompts) `--repeats` times; a
ratio is the median over repeats. With `--temperature`, texts are sampled, with the same seed for all sides. The JSON
uses vLLM's metric names. Exit code 0: all greedy texts equal the plain ones, or differ only where rounding decides
between two tokens; 1: a text differs for another reason (`specheads diff` says where); 2: wrong input.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .arguments import add_model_arguments, load_heads_from, load_pair
from .display import emit, note, number, plain_steps_text, table
from .env import collect
from .evaluate import add_prompt_arguments
from .prompts import read_prompts, texts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..evaluation.dialect import PromptRounds
    from ..evaluation.suites import SuitePrompt
    from ..heads.base import DraftHead
    from ..metrics import GenerationStats

PLAIN, EVERY_ROUND, ADAPTIVE, COMPILED = "plain", "heads, every round", "heads", "heads, compiled"
AGAINST = "other heads, every round"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for models, prompts, and what is compared."""
    add_model_arguments(parser)
    add_prompt_arguments(parser, required=False)
    parser.add_argument("--suite", help="ours, mt_bench, humaneval, gsm8k, math500, mbpp, alpaca, spec_bench, or a "
                        ".jsonl file with `turns`; separate several by commas. --limit applies to each")  # fmt: skip
    parser.add_argument(
        "--mirror", type=Path, metavar="DIR", help="read data sets from DIR, which holds them under their Hub ids"
    )
    parser.add_argument("--thinking", choices=("on", "off"), help="`enable_thinking` of the chat template, for suites")
    parser.add_argument("--against", metavar="HEADS", help="other heads for the target, compared prompt by prompt")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="number of prompts generated together")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for greedy decoding")
    parser.add_argument("--compile", action="store_true", help="measure compiled rounds too")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="number of runs of everything")


def sides_of(heads: DraftHead, compiled: bool, against: DraftHead | None = None) -> dict[str, DraftHead | None]:
    """Returns the sides that are compared, by name; `None` stands for plain generation."""
    every_round, adaptive = heads.with_tree(), heads.with_tree()
    every_round.adaptive, adaptive.adaptive = False, True
    sides = {PLAIN: None, EVERY_ROUND: every_round, ADAPTIVE: adaptive}
    if against is not None:
        sides[AGAINST] = against
        against.adaptive = False
    if compiled:
        sides[COMPILED] = heads.with_tree()
        sides[COMPILED].compiled = True
    return sides


def suite_prompts(args: argparse.Namespace) -> list[SuitePrompt]:
    """Loads the prompts of the chosen suites; empty if `--prompts` is given instead.

    Raises:
        ValueError: Unless exactly one of `--suite` and `--prompts` is given.
    """
    if (args.prompts is None) == (args.suite is None):
        raise ValueError("give either --prompts FILE ... or --suite NAME,...; `--suite ours` needs no network.")
    if args.suite is None:
        return []
    from ..evaluation.suites import load_suite

    return [one for name in args.suite.split(",") for one in load_suite(name.strip(), args.limit, args.mirror)]


def batches_of(tokenizer: PreTrainedTokenizerBase, prompts: list[Any], batch_size: int) -> list[dict[str, Any]]:
    """Makes left-padded batches, in the order of the prompts; the last batch may be smaller."""
    from ..texts import all_token_ids, left_padded, pad_token_id_of

    rows = [ids[0].tolist() for ids in all_token_ids(prompts, tokenizer)]
    pad = pad_token_id_of(tokenizer)
    return [left_padded(rows[first : first + batch_size], pad) for first in range(0, len(rows), batch_size)]


def run(args: argparse.Namespace) -> int:
    """Prints the comparison; returns 1 if a greedy text differs from the plain one by more than rounding."""
    chosen = suite_prompts(args)
    prompts: list[Any] = [] if chosen else read_prompts(args.prompts)[: args.limit]
    target, tokenizer, heads = load_pair(args)
    prompts = texts_of(prompts, tokenizer)
    import torch

    from ..evaluation.first_token import timed_text
    from ..evaluation.suites import prompts_for
    from ..texts import pad_token_id_of
    from ..tuning.turns import take_turns

    if chosen:
        prompts = prompts_for(chosen, tokenizer, {"on": True, "off": False, None: None}[args.thinking])
    against = None
    if args.against is not None:
        against = load_heads_from(args, args.against, dtype=target.dtype).bind(target)
    batches, sides = batches_of(tokenizer, prompts, args.batch_size), sides_of(heads, args.compile, against)
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
    options["pad_token_id"] = pad_token_id_of(tokenizer)
    if args.temperature > 0:
        options["temperature"] = args.temperature

    def generate(name: str, batch: dict[str, Any], turn: int) -> Timed:
        torch.manual_seed(0)
        side = sides[name]
        text = timed_text(target, batch, assistant_model=side, **options)
        return Timed(text.token_ids, text.seconds, side.last_stats if side is not None else None, text.first)

    note(args, f"Generating {args.max_new_tokens} tokens from each of {len(prompts)} prompts, {args.repeats} times on "
               f"each of {len(sides)} sides ...")  # fmt: skip
    runs = take_turns(sides, batches, generate, args.repeats, what="sides in turns")
    facts = {name: facts_of(runs[name], runs[PLAIN]) for name in sides}
    judged = {**options, "nodes": heads.tree_config.most_nodes}
    for name, side in facts.items():
        side |= differences(target, batches, runs[name], runs[PLAIN], judged) if args.temperature == 0 else {}
    where = {"target": args.target, "heads": args.heads, "tree_config": heads.tree_config.to_dict(),
             "batch_size": args.batch_size, "dtype": str(target.dtype).removeprefix("torch."),
             "suite": args.suite, "thinking": args.thinking, "prompts": len(prompts),
             "chat_template": bool(chosen and tokenizer.chat_template)}  # fmt: skip
    found = {"sides": facts, "groups": by_group(chosen, runs[EVERY_ROUND]), **where, **options}
    if against is not None:
        found["tau_difference"] = difference(runs[EVERY_ROUND], runs[AGAINST])
    emit(args, {**found, "environment": collect()}, report(found))
    return int(any(side.get("differing", 0) > side.get("ties", 0) for side in facts.values()))


class Timed(NamedTuple):
    """Result of one side on one batch.

    Attributes:
        token_ids: New tokens of every sequence.
        seconds: Wall seconds.
        stats: Statistics of the generation; `None` for plain generation.
        first: Seconds until the first token; `None` for batches of several prompts.
    """

    token_ids: list[list[int]]
    seconds: float
    stats: GenerationStats | None
    first: float | None = None


Runs = list[list[Timed]]  # `[repeat][batch]`


def rounds_of(runs: Runs) -> list[PromptRounds]:
    """Returns the rounds of every prompt in the first repeat."""
    from ..evaluation.dialect import PromptRounds

    return [rounds for run in runs[0] if run.stats is not None for rounds in PromptRounds.of(run.stats)]


def facts_of(runs: Runs, plain: Runs) -> dict[str, Any]:
    """Metrics of one side, compared to plain generation: medians over repeats, and texts of the first repeat."""
    from ..evaluation.dialect import field_metrics

    seconds, plain_seconds = ([sum(run.seconds for run in repeat) for repeat in each] for each in (runs, plain))
    tokens = sum(len(new_ids) for run in plain[0] for new_ids in run.token_ids)
    stats = [run.stats for run in runs[0] if run.stats is not None]
    forwards = sum(one.target_forwards for one in stats)
    metrics = field_metrics(rounds_of(runs))
    return {
        "tokens_per_second": tokens / statistics.median(seconds),
        "speed_up": statistics.median(a / b for a, b in zip(plain_seconds, seconds, strict=True)),
        **latency(runs),
        "acceptance_length": None,
        **metrics,
        "tokens_per_forward": sum(one.new_tokens for one in stats) / forwards if forwards else None,
        "plain_steps": sum(one.plain_steps for one in stats),
        "plain_because": list(dict.fromkeys(one.plain_because for one in stats if one.plain_because)),
        "identical": all(ours.token_ids == theirs.token_ids for ours, theirs in zip(runs[0], plain[0], strict=True)),
    }


def differences(
    target: PreTrainedModel, batches: list[dict[str, Any]], runs: Runs, plain: Runs, judged: dict[str, Any]
) -> dict[str, int]:
    """Counts the texts of the first repeat that differ from the plain ones, and those that differ at a tie."""
    from ..diagnosis.difference import part_at_a_tie

    ties = []
    for batch, ours, theirs in zip(batches, runs[0], plain[0], strict=True):
        rows = zip(batch["input_ids"], batch["attention_mask"], ours.token_ids, theirs.token_ids, strict=True)
        ties += [part_at_a_tie(target, ids[mask.bool()][None], token_ids, plain_ids, **judged)
                 for ids, mask, token_ids, plain_ids in rows if token_ids != plain_ids]  # fmt: skip
    return {"differing": len(ties), "ties": sum(ties)}


def latency(runs: Runs) -> dict[str, float | None]:
    """Median seconds to the first token, and tokens per second after it; `None` for batches of several prompts."""
    timed = [run for repeat in runs for run in repeat if run.first is not None]
    decoding = sum(run.seconds - run.first for run in timed if run.first is not None)
    tokens = sum(len(run.token_ids[0]) - 1 for run in timed)
    return {
        "ttft": statistics.median(run.first for run in timed if run.first is not None) if timed else None,
        "decode_tokens_per_second": tokens / decoding if timed and decoding > 0 else None,
    }


def by_group(chosen: list[SuitePrompt], runs: Runs) -> dict[str, Any]:
    """Metrics of every suite and of each of its categories; empty unless there are rounds for every prompt."""
    from ..evaluation.dialect import field_metrics

    rounds = rounds_of(runs)
    if not chosen or len(rounds) != len(chosen):
        return {}
    groups: dict[str, list[PromptRounds]] = {}
    for one, its in zip(chosen, rounds, strict=True):
        groups.setdefault(one.suite, []).append(its)
        groups.setdefault(f"{one.suite}/{one.category}", []).append(its)
    return {name: field_metrics(some) for name, some in groups.items()}


def difference(ours: Runs, theirs: Runs) -> dict[str, float]:
    """Difference of tau, the heads' minus that of the other heads, paired by prompt."""
    from ..evaluation.dialect import tau_difference

    found = tau_difference(rounds_of(ours), rounds_of(theirs))
    return {"mean": found.mean, "low": found.low, "high": found.high}


def report(found: dict[str, Any]) -> str:
    """Renders a line per side, a line per side with plain steps, and acceptance by draft position."""
    facts = found["sides"]
    rows = [
        (name, number(side["tokens_per_second"], 1), number(side["speed_up"], suffix="x"),
         number(side["acceptance_length"]), number(side["tokens_per_forward"]),
         number(None if side["ttft"] is None else 1000 * side["ttft"], 1),
         number(side["decode_tokens_per_second"], 1), same_text(side))
        for name, side in facts.items()
    ]  # fmt: skip
    header = ("side", "tokens/s", "speed-up", "tau", "tokens/forward", "TTFT ms", "decode tokens/s", "same text")
    lines = [table(header, rows)]
    lines += [
        f"plain steps of {name}  {plain_steps_text(side['plain_steps'], side['plain_because'])}"
        for name, side in facts.items()
        if side["plain_steps"]
    ]
    lines += acceptance_lines(facts[EVERY_ROUND])
    lines += [
        f"  {name}  tau {one['acceptance_length']:.2f} ({one['acceptance_length_interval'][0]:.2f} to "
        f"{one['acceptance_length_interval'][1]:.2f}), {one['num_drafts']} drafts"
        for name, one in found["groups"].items()
        if one
    ]
    if "tau_difference" in found:
        gap = found["tau_difference"]
        lines.append(f"tau minus tau of the other heads  {gap['mean']:+.2f} ({gap['low']:+.2f} to {gap['high']:+.2f})")
    return "\n".join(lines)


def same_text(side: dict[str, Any]) -> str:
    """Says whether the texts of a side equal the plain ones."""
    if side["identical"]:
        return "yes"
    return "up to ties" if side.get("differing") == side.get("ties", -1) else "NO"


def acceptance_lines(side: dict[str, Any]) -> list[str]:
    """Lines on acceptance, for the side that drafts in every round."""
    if "num_drafts" not in side:
        return []
    depth = len(side["num_accepted_tokens_per_pos"])
    survival = "  ".join(f"{i}: {side[f'acceptance_at_pos_{i}']:.2f}" for i in range(1, depth + 1))
    names = [f"conditional_acceptance_at_pos_{i}" for i in range(1, depth + 1)]
    given = "  ".join(f"{i}: {side[name]:.2f}" for i, name in enumerate(names, start=1) if name in side)
    low, high = side["acceptance_length_interval"]
    return [
        f"tau of every round  {side['acceptance_length']:.2f} ({low:.2f} to {high:.2f}) over rounds, "
        f"{side['acceptance_length_macro']:.2f} over prompts; {side['draft_acceptance_rate']:.0%} of "
        f"{side['num_draft_tokens']} drafted tokens in {side['num_drafts']} drafts",
        f"accepted up to position     {survival}",
        f"if all before are accepted  {given}",
        "rounds by number of tokens  " + "  ".join(f"{n}: {count}" for n, count in side["histogram"].items()),
    ]
