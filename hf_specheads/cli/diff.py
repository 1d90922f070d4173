"""Explain where a text with draft heads differs from the plain one: a tie that rounding decides, or a bug.

Prints the first differing token, its logits on both sides, and the rounding measured on this target. Exit code 0: the
same text, or a tie; 1: a bug; 2: wrong input.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import add_model_arguments, load_pair
from .display import emit, note
from .generate import add_prompt_argument, encode, read_prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for models, prompt, and the script to write."""
    add_model_arguments(parser)
    add_prompt_argument(parser)
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="maximum number of new tokens")
    parser.add_argument("--reproducer", type=Path, metavar="FILE", help="write a script that repeats this comparison")


def run(args: argparse.Namespace) -> int:
    """Prints the verdict; returns 1 for a bug."""
    text = read_prompt(args)
    target, tokenizer, heads = load_pair(args)
    from ..diagnosis.difference import explain_difference

    inputs = encode(tokenizer, target, [{"role": "user", "content": text}] if args.chat else text)
    note(args, "Generating with heads and plainly, and measuring the rounding ...")
    options = {"max_new_tokens": args.max_new_tokens, "tokenizer": tokenizer, "reproducer": args.reproducer}
    found = explain_difference(target, inputs, heads, **options)
    emit(args, found.to_dict(), str(found))
    return int(found.verdict == "bug")
