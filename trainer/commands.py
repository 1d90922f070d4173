"""What the trainer's commands share: output options, errors in one line, and the way to go on of those that write."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

Counts = dict[str, int]


def add_output_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, printed: str = "counts", hidden: str = "no progress"
) -> None:
    """`--json`, `--quiet` and `--debug`, to a parser or a group of one."""
    parser.add_argument(
        "--json", action="store_true", help=f"print the {printed} as JSON, and nothing else, to stdout"
    )
    parser.add_argument("--quiet", action="store_true", help=hidden)
    parser.add_argument("--debug", action="store_true", help="show where an error came from")


def add_folder_options(parser: argparse.ArgumentParser, data: str) -> None:
    """The data a command reads, described by `data`, and the folder it writes."""
    parser.add_argument("--data", required=True, help=data)
    parser.add_argument("--name", help="configuration of a Hub data set")
    parser.add_argument("--split", default="train", help="split to read, e.g. train[:10%%]")
    parser.add_argument("--template-kwargs", type=json.loads, default={}, help="for the chat template, as JSON")
    parser.add_argument("--out", required=True, type=Path, help="folder to write shards into")


def one_line(error: Exception) -> str:
    """An error's message on one line; its class where that says more than the message."""
    message = " ".join(str(error).split())
    if isinstance(error, ValueError | OSError | ImportError) and message:
        return message
    return f"{type(error).__name__}: {message} (--debug shows where)"


def failed(command: str, args: argparse.Namespace, error: Exception) -> int:
    """Says on stderr what went wrong, and returns the exit code 2; under `--debug` the error is raised again."""
    if args.debug:
        raise error
    print(f"specheads {command}: error: {one_line(error)}", file=sys.stderr)
    return 2


def write_folder(
    command: str, args: argparse.Namespace, write: Callable[[argparse.Namespace], Counts]
) -> Counts | int:
    """Writes the folder `args.out`, and prints the counts if JSON was asked for.

    Args:
        command: Name in front of errors.
        args: With `out` and the [`add_output_options`].
        write: Does the work and returns its counts.

    Returns:
        The counts; or an exit code, after a line on stderr: 130 when it was interrupted, 2 for errors, which are
        raised under `--debug`.
    """
    try:
        counts = write(args)
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on in {args.out}", file=sys.stderr)
        return 130
    except Exception as error:  # of any class: libraries that load models and data have many
        return failed(command, args, error)
    if args.json:
        print(json.dumps({"out": str(args.out), **counts}))
    return counts
