"""Command line: `specheads ...` or `python -m hf_specheads ...`.

The modules of the commands import torch, transformers and the heads only when a command runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ..version import __version__
from . import (
    app,
    bench,
    convert,
    demo,
    diff,
    doctor,
    env,
    evaluate,
    export,
    figures,
    generate,
    inspect,
    push,
    tune,
)
from .arguments import Parser, add_debug_argument, add_output_arguments
from .display import hide_progress, print_in_any_encoding, reader_has_gone
from .handed_over import HANDED_OVER

INTERRUPTED, NOBODY_READS = 130, 141  # as in shells: 128 plus the number of the signal (SIGINT, SIGPIPE)
COMMANDS: dict[str, Any] = {
    "demo": demo,
    "app": app,
    "generate": generate,
    "eval": evaluate,
    "bench": bench,
    "diff": diff,
    "doctor": doctor,
    "figures": figures,
    **{name: HANDED_OVER[name] for name in ("regenerate", "features", "train")},
    "inspect": inspect,
    "convert": convert,
    "export": export,
    "push": push,
    "tune": tune,
    "env": env,
}


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser with all subcommands; each module provides `add_arguments` and `run(args) -> exit code`."""
    parser = Parser(prog="specheads", description="Draft heads that speed up generation without changing its output.")
    parser.add_argument("--version", action="version", version=f"hf-specheads {__version__}")
    add_debug_argument(parser)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, module in COMMANDS.items():
        description = (module.__doc__ or "").strip()
        command = commands.add_parser(name, help=description.splitlines()[0], description=description)
        module.add_arguments(command)
        add_output_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Returns:
        The exit code: 0 for success, 1 for a failed check, 2 for wrong input. As in a shell, 130 if the command was
        interrupted, and 141 if stdout is a pipe that nobody reads any more.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    print_in_any_encoding()
    try:
        return run(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError as error:
        return NOBODY_READS if reader_has_gone() else failed(error)


def run(argv: list[str]) -> int:
    """Runs one subcommand like [`main`], but lets interrupts and closed pipes propagate."""
    if argv and argv[0] in HANDED_OVER:
        return HANDED_OVER[argv[0]].hand_over(argv[1:])
    args = build_parser().parse_args(argv)
    try:
        if args.quiet or not sys.stderr.isatty():
            hide_progress()
        return args.run(args)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if args.debug or isinstance(error, BrokenPipeError):
            raise
        return failed(error)


def failed(error: Exception) -> int:
    """Prints the error on one line to stderr, and returns the exit code 2."""
    said = " ".join(str(error).split())
    if isinstance(error, IsADirectoryError):
        said = f"{str(error.filename)!r} is a folder, but a file was expected; name a file in it."
    print(f"specheads: error: {said}", file=sys.stderr)
    return 2
