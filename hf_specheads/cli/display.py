"""What commands print: facts as JSON or text on stdout, progress on stderr; accepted runs marked, and tables."""

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
    """A command's answer on stdout: under `--json` the facts and nothing else, otherwise the text."""
    print(json.dumps(facts, indent=2, default=str) if args.json else text, flush=True)


def note(args: argparse.Namespace, text: str) -> None:
    """What a command is doing, on stderr, for somebody who waits at a terminal."""
    if not args.quiet and sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def hide_progress() -> None:
    """Switches the bars of transformers, huggingface_hub and this package off, without importing any of them."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read when they are imported
    if "transformers" in sys.modules:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()


def print_in_any_encoding() -> None:
    """Lets stdout take every text: what its encoding lacks (`LC_ALL=C`, pipes of Windows) is escaped, as in stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def reader_has_gone() -> bool:
    """Whether stdout is a pipe that nobody reads any more (`| head`); if so, later prints are lost in silence."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # tells of errors alone
    except (AttributeError, io.UnsupportedOperation):  # Windows has no poll, notebooks have no files
        return False
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
    return True


def brackets(stream: TextIO | None = None) -> tuple[str, str]:
    """What accepted runs stand in without colour, as far as the encoding of a stream (stdout) has it."""
    try:
        "⟦⟧".encode(getattr(stream or sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return "[[", "]]"
    return "⟦", "⟧"


def use_colour(stream: TextIO | None = None) -> bool:
    """Whether to colour: a terminal that is not `dumb`, and `NO_COLOR` not set."""
    stream = stream or sys.stdout
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def spans(steps: Sequence[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    """Which tokens were drafted and accepted: (first, past the last, accepted), covering all.

    Args:
        steps: Tokens that each target forward gained, and how many of them, the first ones, were drafted.
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
    """The text with every accepted run in green, or in [`brackets`] without colour; `steps` as in [`spans`].

    Pieces are differences of growing prefixes, so characters spread over several tokens stay whole.
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
    """An aligned table: first column left, the others right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    text.insert(1, "-" * len(text[0]))
    return "\n".join(text)


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """A rounded number, or a dash for one that was not measured."""
    return "-" if value is None else f"{value:.{digits}f}{suffix}"


def pos_acc_text(pos_acc: Sequence[float]) -> str:
    """`1: 0.71  2: 0.65 ...`, draft position and conditional acceptance."""
    return "  ".join(f"{position}: {value:.2f}" for position, value in enumerate(pos_acc, start=1)) or "-"


def plain_steps_text(plain_steps: int, because: Sequence[str]) -> str:
    """How many forwards drafted nothing, and why; `none` if there were none."""
    return f"{plain_steps}: {'; '.join(because)}" if because and plain_steps else str(plain_steps or "none")
