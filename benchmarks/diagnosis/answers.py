"""Time that commands take which only answer, and what importing the package adds to importing an auto class.

    python -m benchmarks answers

Reports processor seconds, the least of several runs. They include the start of Python and imports, and hardly depend
on what else the machine does.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

from hf_specheads.cli import COMMANDS

from ..results import Result, footnote, markdown_table, number

SOURCES = ("hf_specheads/cli",)
AUTO = "from transformers import AutoModelForCausalLM"
IMPORTS = ("import hf_specheads", AUTO, f"import hf_specheads; {AUTO}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the heads and the number of runs."""
    parser.add_argument("--heads", default="model_cards/eagle3", help="heads to inspect: folder")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, of which the least counts")


def measure(args: argparse.Namespace) -> Result:
    """Measures every command and every import."""
    commands = [["--help"], ["env"], ["inspect", args.heads], *([name, "--help"] for name in COMMANDS)]
    spent = least_seconds({" ".join(words): ["-m", "hf_specheads", *words] for words in commands}, args.repeats)
    imports = least_seconds({code: ["-c", code] for code in IMPORTS}, args.repeats)
    return {"commands": spent, "imports": imports}


def least_seconds(runs: dict[str, list[str]], repeats: int) -> dict[str, float]:
    """Returns the least processor seconds that a fresh interpreter takes for each. Runs take turns, in alternating
    order."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats):
        for name, words in list(runs.items())[:: 1 if turn % 2 else -1]:
            before = processor_seconds()
            subprocess.run([sys.executable, *words], capture_output=True, check=True)
            spent[name].append(processor_seconds() - before)
    return {name: min(seconds) for name, seconds in spent.items()}


def processor_seconds() -> float:
    """Returns the processor seconds that child processes have used so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def texts_agree(result: Result) -> bool:
    """Tells whether all commands answer within a second of processor time."""
    return max(result["commands"].values()) < 1


def table(result: Result) -> str:
    """One row per command (of the `--help` commands, only the slowest), then one row per import."""
    helps = {name: spent for name, spent in result["commands"].items() if name.endswith(" --help")}
    slowest = max(helps, key=lambda name: helps[name])
    shown = {name: spent for name, spent in result["commands"].items() if name not in helps or name == slowest}
    rows = [(f"`specheads {name}`" + f", the slowest of {len(helps)}" * (name == slowest), number(spent, 2))
            for name, spent in shown.items()]  # fmt: skip
    rows += [(f"`{code}`", number(spent, 2)) for code, spent in result["imports"].items()]
    said = f"least of {result['repeats']} runs"
    return f"{markdown_table(('', 'processor seconds'), rows)}\n{footnote(result, said)}"
