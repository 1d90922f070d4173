"""Runs a measurement, or renders the results of all measurements into tables and documents.

python -m benchmarks NAME ...   measures, writes benchmarks/results/NAME.json and its table NAME.md
python -m benchmarks --render   writes all tables, pictures and the marked parts of README.md and docs/*.md
python -m benchmarks --check    exits with 1 and names what --render would change

Run these commands in the root of the repository. A measurement exits with 1 if a text that should equal that of plain
`generate` differs from it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from . import figure, lent, results
from .acceptance import acceptance, curves
from .diagnosis import answers, commands, diff, doctor
from .oracles import render as oracles
from .results import RESULTS, Result
from .setup import settings
from .speed import (
    batch,
    cache,
    compiled,
    context,
    copies,
    draws,
    few_rows,
    first_call,
    hybrid,
    mixed_lengths,
    options,
    quantised,
    speedup,
    stream,
    unrecorded,
    vocabulary,
)
from .speed import round as round_
from .targets import families
from .training import memory, step, switches
from .trees import default, kinds, replay, tune

# A measurement is a module with `add_arguments(parser)`, `measure(args)` and `table(result)`. Optional attributes:
# SOURCES, the folders it measures (default: the package); `variant(args)`, a suffix of the result's name (default:
# none, or `shape` for random weights); `short_table(result)`, which documents show under the name NAME-short; and
# `texts_agree(result)`, which decides the exit status (default: [`results.texts_agree`]).
MODULES = (
    speedup, batch, copies, mixed_lengths, stream, compiled, first_call, context, cache, hybrid, round_, unrecorded,
    few_rows, draws, options, quantised, vocabulary, kinds, tune, default, replay, acceptance, curves, step, memory,
    switches, families, doctor, diff, commands, answers,
)  # fmt: skip
MEASUREMENTS: dict[str, ModuleType] = {module.__name__.rpartition(".")[2]: module for module in MODULES}


def measurement_of(name: str) -> ModuleType:
    """Returns the measurement that wrote the result of this name, such as `round`, `round_shape` or
    `assistant/speedup`.

    Raises:
        ValueError: if there is no such measurement.
    """
    stem = name.rpartition("/")[2]
    module = MEASUREMENTS.get(stem) or MEASUREMENTS.get(stem.rpartition("_")[0])
    if module is None:
        raise ValueError(f"{name!r} is not the result of a measurement; known measurements: {list(MEASUREMENTS)}.")
    return module


def table_of(name: str, result: Result, kind: str = "table") -> str:
    """Renders a result as Markdown, with a remark if the measured code has changed since. Uses the module's `kind` of
    table (such as `short_table`) if it has one, otherwise its `table`."""
    module = measurement_of(name)
    return getattr(module, kind, module.table)(result) + results.mark(result, sources_of(module))


def sources_of(module: ModuleType) -> tuple[str, ...]:
    """Returns the folders whose code a measurement measures."""
    return getattr(module, "SOURCES", ("hf_specheads",))


def result_name(name: str, args: argparse.Namespace) -> str:
    """Returns the name of the result that a measurement writes when called with these arguments."""
    made_up = "shape" if getattr(args, "shape", None) else ""
    variant = getattr(MEASUREMENTS[name], "variant", lambda _: made_up)(args)
    return f"{name}_{variant}" if variant else name


def run(name: str, args: argparse.Namespace, words: Sequence[str]) -> int:
    """Runs one measurement, writes its result and prints its table. Returns 1 if texts differ that should be equal."""
    module = MEASUREMENTS[name]
    if args.threads:
        torch.set_num_threads(args.threads)
    came_about = results.provenance_of(words, sources_of(module))
    result = results.rounded({"provenance": came_about, **settings(args), **module.measure(args)})
    table = table_of(name, result)
    results.write(args.output, result_name(name, args), result, table)
    print(table)
    return 0 if getattr(module, "texts_agree", results.texts_agree)(result) else 1


def rendered(folder: Path, documents: Sequence[Path]) -> dict[Path, str]:
    """Returns the expected content of every table in a folder of results and of every document."""
    found = results.read(folder)
    tables = {name: table_of(name, result) for name, result in found.items()}
    texts = {folder / f"{name}.md": table for name, table in tables.items()}
    shown = tables | {f"{name}-short": table_of(name, result, "short_table") for name, result in found.items()}
    shown |= oracles.tables() | lent.tables()
    for document in documents:
        texts[document] = results.render(document.read_text(encoding="utf-8"), found, shown)
    return texts


def bring_up_to_date(args: argparse.Namespace) -> int:
    """Rewrites all files that differ from the results. With `--check` only names them, and returns 1 if there are
    any."""
    texts = rendered(args.results, args.documents)
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    mends = {path: partial(path.write_text, texts[path], encoding="utf-8") for path in stale}
    if args.results == RESULTS:
        mends |= figure.redraws()
    for path, mend in mends.items():
        print(f"stale: {path}" if args.check else f"written: {path}")
        if not args.check:
            mend()
    if args.check:
        print("run `python -m benchmarks --render`" if mends else f"{len(texts)} files agree with the results")
    return int(args.check and bool(mends))


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser, with one subcommand per measurement."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=raw)
    parser.add_argument("--render", action="store_true", help="write tables, documents and pictures from the results")
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 if something is stale")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to render from")
    parser.add_argument("--documents", type=Path, nargs="+", default=results.documents(), help="files to render into")
    names = parser.add_subparsers(dest="name", metavar="NAME")
    for name, module in MEASUREMENTS.items():
        doc = module.__doc__ or ""
        one = names.add_parser(name, help=doc.partition("\n")[0], description=doc, formatter_class=raw)
        one.add_argument("--threads", type=int, help="number of CPU threads (default: torch's choice)")
        one.add_argument("--output", type=Path, default=RESULTS, help="folder for the JSON file and the table")
        module.add_arguments(one)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    words = sys.argv[1:] if words is None else words
    parser = make_parser()
    args = parser.parse_args(words)
    if args.name:
        return run(args.name, args, words)
    if not (args.render or args.check):
        parser.error("give the NAME of a measurement, --render or --check")
    return bring_up_to_date(args)


if __name__ == "__main__":
    sys.exit(main())
