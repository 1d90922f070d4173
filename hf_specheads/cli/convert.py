"""Convert heads in another layout (their authors', a serving engine's, speculators') to this package's own layout."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import DTYPES, add_heads_arguments, load_heads_from, load_target, torch_dtype
from .display import emit, note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for source and destination, and for facts that the source does not contain."""
    parser.add_argument("heads", help="folder or Hub id of the heads to read")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--target", help="target they were made for: its identity is stored with the heads")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="type of the weights (default: as stored)")
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")
    add_heads_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Loads and checks the heads, stores the target's identity if a target is given, and writes the heads."""
    if args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())) and not args.overwrite:
        raise FileExistsError(f"{args.output} exists and is not empty; choose another folder or pass --overwrite.")
    heads = load_heads_from(args, args.heads, dtype=torch_dtype(args.dtype))
    if args.target:
        target = load_target(args, args.target)
        heads.check_target(target)
        heads.remember_target(target)
    note(args, f"Writing {args.output} ...")
    heads.save_pretrained(args.output)
    facts = {"class": type(heads).__name__, "method": heads.config.method, "output": str(args.output)}
    emit(args, facts, f"wrote {facts['class']} ({facts['method']}) to {args.output}")
    return 0
