"""What the commands that write folders of shards share: output options, errors in one line, and the way to go on."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

Counts = dict[str, int]


def add_output_options(parser: Any) -> None:
    """`--json`, `--quiet` and `--debug`, to a parser or a group of one."""
    parser.add_argument("--json", action="store_true", help="print the counts as JSON, and nothing else, to stdout")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--debug", action="store_true", help="show where an error came from")


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
        if args.debug:
            raise
        print(f"specheads {command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"out": str(args.out), **counts}))
    return counts
