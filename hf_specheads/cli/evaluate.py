"""Measure heads on your prompts: acceptance length, pos-acc, speed-up, and whether every text is identical.

Prompts: .jsonl with one object a line (`prompt`, `text`, or chat `messages`), or .txt with one prompt per file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .arguments import add_model_arguments, load_pair
from .display import number, pos_acc_text, table
from .env import collect
from .generate import encode
from .measure import Summary, run_sample, warm_up

Prompt = str | list[dict[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Models, prompts, lengths, and where the numbers go."""
    add_model_arguments(parser)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, help=".jsonl or .txt files")
    parser.add_argument("--limit", type=int, help="use only the first N prompts")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--no_plain", action="store_true", help="skip plain generation: faster, but no speed-up")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")


def read_prompts(files: list[Path]) -> list[Prompt]:
    """Prompts of several files: texts, or lists of chat messages.

    Raises:
        ValueError: naming file and line of an entry without `prompt`, `text` or `messages`.
    """
    prompts: list[Prompt] = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        if file.suffix != ".jsonl":
            prompts.append(text)
            continue
        for number_, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                prompts.append(_prompt_of(line, f"{file}, line {number_}"))
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError(f"expected non-empty prompts in {[str(file) for file in files]}, got {len(prompts)} entries.")
    return prompts


def _prompt_of(line: str, where: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    for name in ("messages", "prompt", "text"):
        if isinstance(entry, dict) and isinstance(entry.get(name), list if name == "messages" else str):
            return entry[name]
    raise ValueError(f"{where} needs a string `prompt` or `text`, or a list `messages`; got {line[:80]!r}.")


def run(args: argparse.Namespace) -> int:
    """Prints a summary; 1 if a text differs from the plain one."""
    prompts = read_prompts(args.prompts)[: args.limit]
    target, tokenizer, heads = load_pair(args)
    heads.adaptive = False  # the heads are measured, not the choice of when to use them
    warm_up(target, heads, encode(tokenizer, target, prompts[0]))
    summary = Summary()
    for index, prompt in enumerate(prompts, start=1):
        inputs = encode(tokenizer, target, prompt)
        options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
        summary.samples.append(run_sample(target, heads, inputs, compare=not args.no_plain, **options))
        print(f"\r{index}/{len(prompts)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    report(summary)
    if args.json:
        facts = {
            **summary.to_dict(),
            "target": args.target,
            "heads": args.heads,
            "tree_config": heads.tree_config.to_dict(),
            "max_new_tokens": args.max_new_tokens,
            "dtype": str(target.dtype).removeprefix("torch."),
            "environment": collect(),
        }
        args.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return 1 if summary.all_identical is False else 0


def report(summary: Summary) -> None:
    """The numbers, one a line."""
    same = {True: "yes", False: "NO", None: "-"}[summary.all_identical]
    rows = [
        ("prompts", str(len(summary.samples))),
        ("new tokens", str(summary.num_tokens)),
        ("acceptance_length", number(summary.acceptance_length)),
        ("tokens/s with heads", number(summary.tokens_per_second, 1)),
        ("tokens/s plain", number(summary.plain_tokens_per_second, 1)),
        ("speed-up", number(summary.speed_up, suffix="x")),
        ("target forwards per token", number(summary.target_forwards / max(summary.num_tokens, 1))),
        ("texts identical", same),
    ]
    print(table(("measured", "value"), rows))
    print(f"pos_acc  {pos_acc_text(summary.pos_acc)}")
