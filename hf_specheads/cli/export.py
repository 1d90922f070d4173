"""Write heads in the layout of a serving engine (vLLM, SGLang, speculators) or of the method's authors."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from .arguments import DTYPES, add_heads_arguments, load_heads_from, load_target, torch_dtype
from .display import emit, note

# Copy of `checkpoints.write.ALL_DESTINATIONS`, because importing that module would load torch.
DESTINATIONS = ("dflash", "eagle", "hydra", "medusa", "mtp", "sglang", "speculators", "vllm", "vllm-medusa")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for the heads, the destination, and the target, which some exports need."""
    parser.add_argument("heads", help="folder or Hub id of the heads")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--to", choices=DESTINATIONS, required=True, help="program or layout to write for")
    parser.add_argument("--target", help="target: folder or Hub id; loaded only where its embedding is needed")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="type of the weights (default: as stored)")
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")
    add_heads_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Loads the heads, writes the export or refuses, and prints what is lost and how to serve the export."""
    heads = load_heads_from(args, args.heads, dtype=torch_dtype(args.dtype))
    from ..checkpoints.write import export_heads, needs_target

    needs = args.target and needs_target(heads, args.to)
    target = load_target(args, args.target) if needs else args.target
    note(args, f"Writing {args.output} for {args.to} ...")
    exported = export_heads(heads, args.output, to=args.to, target=target, overwrite=args.overwrite)
    lines = [f"wrote {heads.config.method} heads for {args.to} to {args.output}: {', '.join(exported.files)}"]
    lines += [f"- {said}" for said in exported.notes]
    lines += [f"serve with\n  {exported.command}"] if exported.command else []
    emit(args, dataclasses.asdict(exported), "\n".join(lines))
    return 0
