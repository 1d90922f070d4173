"""Measure heads on your prompts: acceptance length, pos-acc, speed-up, and whether every text is identical.

Prompts: .jsonl with one object a line (`prompt`, `text`, or chat `messages`), or .txt with one prompt per file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .arguments import add_model_arguments, load_pair
from .display import emit, note, number, plain_steps_text, pos_acc_text, table
from .env import collect
from .generate import encode
from .measure import Summary, run_sample, warm_up

Prompt = str | list[dict[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Models, prompts and lengths."""
    add_model_arguments(parser)
    add_prompt_arguments(parser)
    parser.add_argument("--no-plain", action="store_true", help="skip plain generation: faster, but no speed-up")


def add_prompt_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Prompts, how many, and how far they are continued."""
    parser.add_argument("--prompts", type=Path, nargs="+", required=required, help=".jsonl or .txt files")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt")


def read_prompts(files: list[Path]) -> list[Prompt]:
    """Prompts of several files: texts, or lists of chat messages.

    Raises:
        ValueError: naming file and line of an entry without `prompt`, `text` or `messages`.
    """
    prompts: list[Prompt] = []
    for file in files:
        text = _text_of(file)
        if file.suffix != ".jsonl":
            prompts.append(text)
            continue
        for number_, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                prompts.append(_prompt_of(line, f"{file}, line {number_}"))
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError(f"expected non-empty prompts in {[str(file) for file in files]}, got {len(prompts)} entries.")
    return prompts


def _text_of(file: Path) -> str:
    """What a file of prompts says. Some editors begin it with a mark of its encoding, which is no part of a prompt."""
    if file.suffix == ".json":
        raise ValueError(f"{file} would be one prompt as it is; write its entries into a .jsonl file, one a line.")
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: {error}") from error


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
    from ..tuning.progress import bar

    heads.adaptive = False  # the heads are measured, not the choice of when to use them
    runs = "with heads" if args.no_plain else "with heads and plainly"
    note(args, f"Generating {args.max_new_tokens} tokens from each of {len(prompts)} prompts, {runs} ...")
    warm_up(target, heads, encode(tokenizer, target, prompts[0]))
    summary = Summary()
    for prompt in bar(prompts, "prompts"):
        inputs = encode(tokenizer, target, prompt)
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
    """The numbers, one a line."""
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
