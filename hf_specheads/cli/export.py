"""Write heads in the layout of a serving engine (vLLM, SGLang, speculators) or of the method's authors."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..checkpoints.write import ALL_DESTINATIONS, export_heads, needs_target
from .arguments import DTYPES, add_heads_arguments, load_heads_from, torch_dtype


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Heads, destination, and the target where it is needed."""
    parser.add_argument("heads", help="folder or Hub id of the heads")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--to", choices=ALL_DESTINATIONS, required=True, help="who is to read them")
    parser.add_argument("--target", help="target: folder or Hub id; loaded only where its embedding is needed")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="type of the weights (default: as stored)")
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")
    add_heads_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Loads, refuses or writes, and says what is lost and how to serve the export."""
    heads = load_heads_from(args, args.heads, dtype=torch_dtype(args.dtype))
    target = args.target
    if target and needs_target(heads, args.to):
        from transformers import AutoModelForCausalLM

        target = AutoModelForCausalLM.from_pretrained(target, dtype="auto", local_files_only=args.local_files_only)
        target.eval()
    exported = export_heads(heads, args.output, to=args.to, target=target, overwrite=args.overwrite)
    print(f"wrote {heads.config.method} heads for {args.to} to {args.output}: {', '.join(exported.files)}")
    for note in exported.notes:
        print(f"- {note}")
    if exported.command:
        print(f"serve with\n  {exported.command}")
    return 0
