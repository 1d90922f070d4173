"""Measure a target and its heads and draw the papers' figures, as PNG and SVG, with a Markdown page that shows them.

pos-acc, tau against depth, n-alpha, time of a round, throughput, tree size, training curves. `--quick` gives a first
impression, `--no-timing` is for a busy machine, and `--from results.json` draws earlier measurements again. Needs the
extra `figures`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from .demo import prompts_for
from .display import emit, note
from .pair import (
    add_pair_arguments,
    add_placement_arguments,
    find_pair,
    heads_of_pair,
    load_placed_target,
    sources_of,
)
from .prompts import read_prompts, texts_of

DEFAULT_HEADS = (
    "eagle",
    "hass",
    "poss3",
    "eagle3",
    "dflash",
    "medusa",
    "hydra-plus",
)  # those of them that the pair has are drawn
SWEEPS = ("depths", "nodes", "batch_sizes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for the models, the measurements, and the output."""
    add_pair_arguments(
        parser, nargs="+", help="draft heads, named like the target (default: the best known methods of the pair)"
    )
    add_placement_arguments(parser)
    parser.add_argument("--prompts", type=Path, nargs="+", help=".jsonl or .txt files (default: the demo's)")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N prompts")
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="new tokens per prompt (default: 96, 32 with --quick)"
    )
    parser.add_argument("--depths", type=int, nargs="+", metavar="N", help="depths of chains (default: 1 to 8)")
    parser.add_argument("--nodes", type=int, nargs="+", metavar="N", help="sizes of trees (default: 2 4 8 16 32 64)")
    parser.add_argument("--batch-sizes", type=int, nargs="+", metavar="N", help="sequences at once (default: 1 2 4 8)")
    parser.add_argument("--repeats", type=int, metavar="N", help="timed runs, of which the median counts (default: 3)")
    parser.add_argument("--quick", action="store_true", help="two prompts, few tokens and points, no repetitions")
    parser.add_argument("--no-timing", action="store_true", help="draw only figures that do not depend on a clock")
    parser.add_argument("--only", nargs="+", metavar="FIGURE", help="pos_acc, tau, n_alpha, tree_size, tree_tau, "
                        "round, throughput, training (default: all)")  # fmt: skip
    parser.add_argument("--formats", nargs="+", default=["png", "svg"], metavar="F", help="png, svg")
    parser.add_argument(
        "--from", dest="results", type=Path, metavar="FILE", help="draw an earlier results.json instead of measuring"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("figures"), metavar="DIR", help="folder for pictures, results and page"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="the Markdown page (default: DIR/figures.md)")


def run(args: argparse.Namespace) -> int:
    """Measures, draws and writes the page; prints its path."""
    from ..figures.draw import can_draw, check_names, draw_figures
    from ..figures.page import render_page

    if not can_draw():
        raise ImportError('figures need matplotlib, which is not installed; pip install "hf-specheads[figures]".')
    check_names(args.only, args.formats)
    results = _read(args.results) if args.results else _measured(args)
    args.output.mkdir(parents=True, exist_ok=True)
    if not args.results:
        (args.output / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    note(args, "Drawing ...")
    drawn = draw_figures(results, args.output, args.formats, args.only)
    page = args.page or args.output / "figures.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render_page(results, drawn, page.parent, results["command"]), encoding="utf-8")
    files = [str(file) for some in drawn.values() for file in some]
    emit(args, {"page": str(page), "figures": {name: [str(f) for f in some] for name, some in drawn.items()},
                "results": results}, f"{page}, with {len(files)} pictures of {len(drawn)} figures")  # fmt: skip
    return 0


def _read(path: Path) -> dict[str, Any]:
    """Reads results that were measured earlier.

    Raises:
        ValueError: If the file holds no results.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(results, dict) or not {"heads", "settings", "machine"} <= results.keys():
        raise ValueError(f"{path} holds no results of `specheads figures`; expected its results.json.")
    return results


def sweeps_of(args: argparse.Namespace) -> Any:
    """Builds the settings of the measurements from the arguments.

    Raises:
        ValueError: If a number is below its minimum.
    """
    from ..figures.measure import Sweeps

    given: dict[str, Any] = {name: tuple(sorted(set(getattr(args, name)))) for name in SWEEPS if getattr(args, name)}
    given |= {n: getattr(args, n) for n in ("max_new_tokens", "repeats") if getattr(args, n) is not None}
    for name, value in given.items():
        least = 2 if name == "nodes" else 1
        if min(value if isinstance(value, tuple) else (value,)) < least:
            raise ValueError(f"--{name.replace('_', '-')} takes numbers of at least {least}, got {value}.")
    return (Sweeps.quick if args.quick else Sweeps)(timing=not args.no_timing, **given)


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    sweeps = sweeps_of(args)
    folders = sources_of(args.pair, args.heads or _heads_of(find_pair(args.pair)))
    target, tokenizer, place = load_placed_target(args, ", ".join(folders))
    from .. import load_heads
    from ..figures.measure import measure

    given = texts_of(read_prompts(args.prompts), tokenizer) if args.prompts else []
    prompts: list[Any] = given or prompts_for(tokenizer)
    prompts = prompts[: args.limit or (2 if args.quick else None)]
    heads = {name: load_heads(folder, **place).bind(target) for name, folder in folders.items()}
    results = measure(target, heads, prompts, tokenizer, sweeps, folders)
    # If another program calls this function, its own command line is not that of `specheads figures`.
    words = sys.argv[1:] if sys.argv[1:2] == ["figures"] else ["figures"]
    return {**results, "command": shlex.join(["specheads", *words])}


def _heads_of(pair: Path) -> list[str]:
    """Heads of a pair that are compared by default: those of [`DEFAULT_HEADS`] that exist, or else all."""
    found = heads_of_pair(pair)
    return [name for name in DEFAULT_HEADS if name in found] or found
