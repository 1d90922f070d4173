"""Compare tokens per second: plain generation, heads drafting every round, heads as they are, compiled; all in turns.

Prompts as for `specheads eval`. Every side runs every prompt (or batch of prompts) `--repeats` times; a ratio is the
median over repeats. With `--temperature` texts are drawn, with the same seed for all sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ..heads.base import DraftHead
from ..metrics import acceptance_length
from ..tuning.turns import take_turns, timed_generation
from .arguments import add_model_arguments, load_pair
from .display import number, table
from .env import collect
from .evaluate import read_prompts

PLAIN, EVERY_ROUND, ADAPTIVE, COMPILED = "plain", "heads, every round", "heads", "heads, compiled"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Models, prompts, what is compared, and where the numbers go."""
    add_model_arguments(parser)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help=".jsonl or .txt files")
    parser.add_argument("--limit", type=int, help="use only the first N prompts")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=1, help="prompts generated together")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for greedy decoding")
    parser.add_argument("--compile", action="store_true", help="also with compiled rounds")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")


def sides_of(heads: DraftHead, compiled: bool) -> dict[str, DraftHead | None]:
    """What takes turns, by name."""
    every_round, adaptive = heads.with_tree(), heads.with_tree()
    every_round.adaptive, adaptive.adaptive = False, True
    sides = {PLAIN: None, EVERY_ROUND: every_round, ADAPTIVE: adaptive}
    if compiled:
        sides[COMPILED] = heads.with_tree()
        sides[COMPILED].compiled = True
    return sides


def batches_of(tokenizer: PreTrainedTokenizerBase, prompts: list[Any], batch_size: int) -> list[dict[str, Any]]:
    """Left-padded batches, in the order of the prompts; the last one may be smaller."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    texts = [
        prompt
        if isinstance(prompt, str)
        else tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        for prompt in prompts
    ]
    options = {"return_tensors": "pt", "padding": True, "return_token_type_ids": False}
    return [dict(tokenizer(texts[i : i + batch_size], **options)) for i in range(0, len(texts), batch_size)]


def run(args: argparse.Namespace) -> int:
    """Prints the comparison; 1 if a greedy text differs from the plain one."""
    import torch

    prompts = read_prompts(args.prompts)[: args.limit]
    target, tokenizer, heads = load_pair(args)
    batches, sides = batches_of(tokenizer, prompts, args.batch_size), sides_of(heads, args.compile)
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
    options["pad_token_id"] = tokenizer.pad_token_id
    if args.temperature > 0:
        options["temperature"] = args.temperature

    def generate(name: str, batch: dict[str, Any], turn: int) -> Timed:
        torch.manual_seed(0)
        token_ids, seconds = timed_generation(target, batch, assistant_model=sides[name], **options)
        return Timed(token_ids, seconds, sides[name].last_stats.num_accepted if sides[name] else [])

    runs = take_turns(sides, batches, generate, args.repeats)
    facts = {name: facts_of(runs[name], runs[PLAIN]) for name in sides}
    report(facts)
    if args.json:
        where = {"target": args.target, "heads": args.heads, "tree_config": heads.tree_config.to_dict(),
                 "batch_size": args.batch_size, "dtype": str(target.dtype).removeprefix("torch.")}  # fmt: skip
        written = {"sides": facts, **where, **options, "environment": collect()}
        args.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return int(args.temperature == 0 and not all(side["identical"] for side in facts.values()))


class Timed(NamedTuple):
    """One side on one batch: new tokens, wall seconds, and accepted draft tokens per round, of every sequence."""

    token_ids: list[list[int]]
    seconds: float
    num_accepted: list[list[int]]


def facts_of(runs: list[list[Timed]], plain: list[list[Timed]]) -> dict[str, Any]:
    """What one side's runs `[repeat][batch]` say next to the plain ones; medians over repeats."""
    seconds, plain_seconds = ([sum(run.seconds for run in repeat) for repeat in each] for each in (runs, plain))
    tokens = sum(len(new_ids) for run in plain[0] for new_ids in run.token_ids)
    return {
        "tokens_per_second": tokens / statistics.median(seconds),
        "speed_up": statistics.median(a / b for a, b in zip(plain_seconds, seconds, strict=True)),
        "acceptance_length": acceptance_length([row for run in runs[0] for row in run.num_accepted]) or None,
        "identical": all(ours.token_ids == theirs.token_ids for ours, theirs in zip(runs[0], plain[0], strict=True)),
    }


def report(facts: dict[str, dict[str, Any]]) -> None:
    """One line a side."""
    rows = [
        (name, number(side["tokens_per_second"], 1), number(side["speed_up"], suffix="x"),
         number(side["acceptance_length"]), "yes" if side["identical"] else "NO")
        for name, side in facts.items()
    ]  # fmt: skip
    print(table(("side", "tokens/s", "speed-up", "tau", "same text"), rows))
