"""Shared parts of the trainer's commands: output options, one-line errors, and running commands that can resume."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

Counts = dict[str, int]


def add_output_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    printed: str = "counts",
    hidden: str = "show no progress bars",
) -> None:
    """Adds `--json`, `--quiet` and `--debug` to a parser or an argument group."""
    parser.add_argument(
        "--json", action="store_true", help=f"print the {printed} as JSON, and nothing else, to stdout"
    )
    parser.add_argument("--quiet", action="store_true", help=hidden)
    parser.add_argument("--debug", action="store_true", help="show where an error came from")


def add_folder_options(parser: argparse.ArgumentParser, data: str) -> None:
    """Adds the options for the data a command reads (`data` is the help of `--data`) and the folder it writes."""
    parser.add_argument("--data", required=True, help=data)
    parser.add_argument("--name", help="configuration of a Hub data set")
    parser.add_argument("--split", default="train", help="split to read, e.g. train[:10%%]")
    parser.add_argument(
        "--template-kwargs", type=json.loads, default={}, help="arguments for the chat template, as JSON"
    )
    parser.add_argument("--out", required=True, type=Path, help="folder to write shards into")


def one_line(error: Exception) -> str:
    """Returns an error's message on one line, preceded by its class unless the message is meant for users."""
    message = " ".join(str(error).split())
    if isinstance(error, ValueError | OSError | ImportError) and message:
        return message
    return f"{type(error).__name__}: {message} (--debug shows where)"


def failed(command: str, args: argparse.Namespace, error: Exception) -> int:
    """Prints the error to stderr and returns exit code 2; raises the error instead under `--debug`."""
    if args.debug:
        raise error
    print(f"specheads {command}: error: {one_line(error)}", file=sys.stderr)
    return 2


def write_folder(
    command: str, args: argparse.Namespace, write: Callable[[argparse.Namespace], Counts]
) -> Counts | int:
    """Runs a command that writes the folder `args.out`, and prints its counts if `--json` is set.

    Args:
        command: Name of the command, shown in front of errors.
        args: Parsed options, with `out` and those of [`add_output_options`].
        write: Does the work and returns its counts.

    Returns:
        The counts; or, after a line on stderr, an exit code: 130 if interrupted, 2 for errors. Errors are raised
        under `--debug`.
    """
    try:
        counts = write(args)
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on in {args.out}", file=sys.stderr)
        return 130
    except Exception as error:  # libraries that load models and data raise errors of many classes
        return failed(command, args, error)
    if args.json:
        print(json.dumps({"out": str(args.out), **counts}))
    return counts
