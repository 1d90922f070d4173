"""Measure heads on your prompts: acceptance length, pos-acc, speed-up, and whether every text is identical.

Prompts: .jsonl with one object per line, or .txt with one prompt per file. Chats (`messages`) are rendered by the
target's chat template with their `tools` and `chat_template_kwargs`, without the answer that they end with; texts
(`prompt`, `text`) are used as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import add_model_arguments, load_pair
from .display import emit, note, number, plain_steps_text, pos_acc_text, table
from .env import collect
from .generate import encode
from .measure import Summary, run_sample, warm_up
from .prompts import read_prompts, texts_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for models, prompts and lengths."""
    add_model_arguments(parser)
    add_prompt_arguments(parser)
    parser.add_argument("--no-plain", action="store_true", help="skip plain generation: faster, but no speed-up")


def add_prompt_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Adds options for the prompts, their number, and the number of new tokens."""
    parser.add_argument("--prompts", type=Path, nargs="+", required=required, help=".jsonl or .txt files with prompts")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="new tokens per prompt")


def run(args: argparse.Namespace) -> int:
    """Prints a summary; returns 1 if a text differs from the plain one."""
    prompts = read_prompts(args.prompts)[: args.limit]
    target, tokenizer, heads = load_pair(args)
    texts = texts_of(prompts, tokenizer)
    from ..tuning.progress import bar

    heads.adaptive = False  # measures the heads themselves, not the adaptive choice of when to draft
    runs = "with heads" if args.no_plain else "with heads and plainly"
    note(args, f"Generating {args.max_new_tokens} tokens from each of {len(prompts)} prompts, {runs} ...")
    warm_up(target, heads, encode(tokenizer, target, texts[0]))
    summary = Summary()
    for text in bar(texts, "prompts"):
        inputs = encode(tokenizer, target, text)
        options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
        summary.samples.append(run_sample(target, heads, inputs, compare=not args.no_plain, **options))
    facts = {
        **summary.to_dict(),
        "target": args.target,
        "heads": args.heads,
        "tree_config": heads.tree_config.to_dict(),
        "max_new_tokens": args.max_new_tokens,
        "dtype": str(target.dtype).removeprefix("torch."),
        "environment": collect(),
    }
    emit(args, facts, report(summary))
    return int(summary.all_identical is False)


def report(summary: Summary) -> str:
    """Renders one number per line."""
    same = {True: "yes", False: "NO", None: "-"}[summary.all_identical]
    rows = [
        ("prompts", str(len(summary.samples))),
        ("new tokens", str(summary.num_tokens)),
        ("acceptance_length", number(summary.acceptance_length)),
        ("tokens_per_forward", number(summary.tokens_per_forward)),
        ("tokens/s with heads", number(summary.tokens_per_second, 1)),
        ("tokens/s plain", number(summary.plain_tokens_per_second, 1)),
        ("speed-up", number(summary.speed_up, suffix="x")),
        ("texts identical", same),
    ]
    return "\n".join(
        [
            table(("measured", "value"), rows),
            f"pos_acc  {pos_acc_text(summary.pos_acc)}",
            f"plain steps  {plain_steps_text(summary.plain_steps, summary.plain_because)}",
        ]
    )
