"""Output of commands: JSON or text on stdout, progress on stderr, marked accepted tokens, and tables."""

from __future__ import annotations

import argparse
import io
import json
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def emit(args: argparse.Namespace, facts: dict[str, Any], text: str) -> None:
    """Prints a command's result to stdout: with `--json` only the facts, otherwise the text."""
    print(json.dumps(facts, indent=2, default=str) if args.json else text, flush=True)


def note(args: argparse.Namespace, text: str) -> None:
    """Prints progress to stderr, if stderr is a terminal and `--quiet` is not given."""
    if not args.quiet and sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def hide_progress() -> None:
    """Disables progress bars of transformers, huggingface_hub and this package, without importing any of them."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # the libraries read this when they are imported
    if "transformers" in sys.modules:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()


def print_in_any_encoding() -> None:
    """Makes stdout escape characters that its encoding lacks (`LC_ALL=C`, pipes on Windows), as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def reader_has_gone() -> bool:
    """Whether stdout is a pipe that nobody reads any more (`| head`); if so, later output is silently discarded."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # an empty mask reports only errors
    except (AttributeError, io.UnsupportedOperation):  # Windows has no `poll`; stdout of notebooks has no file number
        return False
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit
    return True


def brackets(stream: TextIO | None = None) -> tuple[str, str]:
    """Brackets that mark accepted tokens without colour, in characters that the stream's encoding has."""
    try:
        "⟦⟧".encode(getattr(stream or sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return "[[", "]]"
    return "⟦", "⟧"


def use_colour(stream: TextIO | None = None) -> bool:
    """Whether to use colours: the stream is a terminal that is not `dumb`, and `NO_COLOR` is not set."""
    stream = stream or sys.stdout
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def spans(steps: Sequence[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    """Splits the tokens into runs of accepted drafts and other tokens.

    Args:
        steps: For every target forward, the number of tokens that it gained, and how many of these were drafted; the
            drafted tokens come first.

    Returns:
        (start, end, accepted) of every run; the runs cover all tokens.
    """
    result, position = [], 0
    for gained, drafted in steps:
        for end, accepted in ((position + drafted, True), (position + gained, False)):
            if end > position:
                result.append((position, end, accepted))
            position = end
    return result


def marked_text(
    token_ids: Sequence[int],
    steps: Sequence[tuple[int, int]],
    decode: Callable[[list[int]], str],
    colour: bool,
) -> str:
    """Decodes the text with every accepted run in green, or in [`brackets`] without colour; `steps` as in [`spans`].

    Growing prefixes are decoded, and each run is the difference of two of them. This keeps characters whole that are
    spread over several tokens.
    """
    start, end = (GREEN, RESET) if colour else brackets()
    ids, done, pieces = list(token_ids), "", []
    for _, last, accepted in spans(steps):
        text = decode(ids[:last])
        stable = text.rstrip("\ufffd") if last < len(ids) else text
        piece, done = stable[len(done) :], stable if len(stable) > len(done) else done
        pieces.append(f"{start}{piece}{end}" if accepted and piece else piece)
    return "".join(pieces)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Renders a table whose first column is left-aligned and whose others are right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    text.insert(1, "-" * len(text[0]))
    return "\n".join(text)


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """Formats a number with a fixed number of digits, or a dash for `None`."""
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def pos_acc_text(pos_acc: Sequence[float]) -> str:
    """Formats conditional acceptance by draft position as `1: 0.71  2: 0.65 ...`."""
    return "  ".join(f"{position}: {value:.2f}" for position, value in enumerate(pos_acc, start=1)) or "-"


def plain_steps_text(plain_steps: int, because: Sequence[str]) -> str:
    """Says how many forwards drafted nothing, and why; `none` if there were none."""
    return f"{plain_steps}: {'; '.join(because)}" if because and plain_steps else str(plain_steps or "none")
