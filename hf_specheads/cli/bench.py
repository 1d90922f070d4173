"""Compare tokens per second: plain generation, heads drafting every round, heads as they are, compiled; all in turns.

Prompts as for `specheads eval`. Every side runs every prompt (or batch of prompts) `--repeats` times; a ratio is the
median over repeats. With `--temperature` texts are drawn, with the same seed for all sides.
"""

from __future__ import annotations

import argparse
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from .arguments import add_model_arguments, load_pair
from .display import emit, note, number, plain_steps_text, table
from .env import collect
from .evaluate import add_prompt_arguments, read_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..heads.base import DraftHead
    from ..metrics import GenerationStats

PLAIN, EVERY_ROUND, ADAPTIVE, COMPILED = "plain", "heads, every round", "heads", "heads, compiled"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Models, prompts, and what is compared."""
    add_model_arguments(parser)
    add_prompt_arguments(parser)
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="prompts generated together")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for greedy decoding")
    parser.add_argument("--compile", action="store_true", help="also with compiled rounds")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="times everything is run")


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
    prompts = read_prompts(args.prompts)[: args.limit]
    target, tokenizer, heads = load_pair(args)
    import torch

    from ..tuning.turns import take_turns, timed_generation

    batches, sides = batches_of(tokenizer, prompts, args.batch_size), sides_of(heads, args.compile)
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
    options["pad_token_id"] = tokenizer.pad_token_id
    if args.temperature > 0:
        options["temperature"] = args.temperature

    def generate(name: str, batch: dict[str, Any], turn: int) -> Timed:
        torch.manual_seed(0)
        token_ids, seconds = timed_generation(target, batch, assistant_model=sides[name], **options)
        return Timed(token_ids, seconds, sides[name].last_stats if sides[name] else None)

    note(args, f"Generating {args.max_new_tokens} tokens from each of {len(prompts)} prompts, {args.repeats} times on "
               f"each of {len(sides)} sides ...")  # fmt: skip
    runs = take_turns(sides, batches, generate, args.repeats, what="sides in turns")
    facts = {name: facts_of(runs[name], runs[PLAIN]) for name in sides}
    where = {"target": args.target, "heads": args.heads, "tree_config": heads.tree_config.to_dict(),
             "batch_size": args.batch_size, "dtype": str(target.dtype).removeprefix("torch.")}  # fmt: skip
    emit(args, {"sides": facts, **where, **options, "environment": collect()}, report(facts))
    return int(args.temperature == 0 and not all(side["identical"] for side in facts.values()))


class Timed(NamedTuple):
    """One side on one batch: new tokens, wall seconds, and statistics; `None` of plain generation."""

    token_ids: list[list[int]]
    seconds: float
    stats: GenerationStats | None


def facts_of(runs: list[list[Timed]], plain: list[list[Timed]]) -> dict[str, Any]:
    """What one side's runs `[repeat][batch]` say next to the plain ones; medians over repeats, texts of the first."""
    from ..metrics import acceptance_length

    seconds, plain_seconds = ([sum(run.seconds for run in repeat) for repeat in each] for each in (runs, plain))
    tokens = sum(len(new_ids) for run in plain[0] for new_ids in run.token_ids)
    stats = [run.stats for run in runs[0] if run.stats is not None]
    forwards = sum(one.target_forwards for one in stats)
    return {
        "tokens_per_second": tokens / statistics.median(seconds),
        "speed_up": statistics.median(a / b for a, b in zip(plain_seconds, seconds, strict=True)),
        "acceptance_length": acceptance_length([row for one in stats for row in one.num_accepted]) or None,
        "tokens_per_forward": sum(one.new_tokens for one in stats) / forwards if forwards else None,
        "plain_steps": sum(one.plain_steps for one in stats),
        "plain_because": list(dict.fromkeys(one.plain_because for one in stats if one.plain_because)),
        "identical": all(ours.token_ids == theirs.token_ids for ours, theirs in zip(runs[0], plain[0], strict=True)),
    }


def report(facts: dict[str, dict[str, Any]]) -> str:
    """One line a side, and one for every side that took plain steps."""
    rows = [
        (name, number(side["tokens_per_second"], 1), number(side["speed_up"], suffix="x"),
         number(side["acceptance_length"]), number(side["tokens_per_forward"]), "yes" if side["identical"] else "NO")
        for name, side in facts.items()
    ]  # fmt: skip
    lines = [table(("side", "tokens/s", "speed-up", "tau", "tokens/forward", "same text"), rows)]
    lines += [
        f"plain steps of {name}  {plain_steps_text(side['plain_steps'], side['plain_because'])}"
        for name, side in facts.items()
        if side["plain_steps"]
    ]
    return "\n".join(lines)
