"""Find out why few drafts are accepted: wrong settings, another target, another kind of text, or too little training.

The target continues the prompts. Its texts and hidden states are captured once, and every setting that the files do
not determine is tried on them. Exit code 0: the heads accept as trained; 1: a cause was found; 2: wrong input.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import add_heads_arguments, add_target_arguments, load_unbound_pair
from .demo import prompts_for
from .display import emit, note
from .prompts import read_prompts, texts_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for models, prompts, and the folder of repaired heads."""
    parser.add_argument("--heads", required=True, help="draft heads: folder or Hub id")
    add_target_arguments(parser)
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        help=".jsonl or .txt files with prompts like those in use (default: the demo's)",
    )
    parser.add_argument("--limit", type=int, default=8, metavar="N", help="use only the first N prompts")
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="length of the target's text per prompt"
    )
    parser.add_argument("--no-speed", action="store_true", help="skip real rounds, i.e. tau in use and speed-up")
    parser.add_argument(
        "--write", type=Path, metavar="FOLDER", help="save the heads with the settings that repair them"
    )
    add_heads_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the diagnosis; returns 1 if a cause was found."""
    # Prompts are read first, so that a wrong file is refused before any model is loaded.
    prompts: list[Any] = read_prompts(args.prompts) if args.prompts else []
    target, tokenizer, heads = load_unbound_pair(args)
    prompts = (texts_of(prompts, tokenizer) or prompts_for(tokenizer))[: args.limit]
    from ..diagnosis.doctor import diagnose

    note(args, f"Looking at {args.max_new_tokens} tokens after each of {len(prompts)} prompts ...")
    options = {"max_new_tokens": args.max_new_tokens, "speed": not args.no_speed}
    found = diagnose(target, heads, prompts, tokenizer=tokenizer, **options)
    written = None
    if args.write is not None and found.changes:
        found.write(args.write)
        written = str(args.write)
    text = f"{found}\n\nSaved with {found.changes} in {written}." if written else str(found)
    emit(args, {**found.to_dict(), "written": written}, text)
    return int(not found.sound)
