"""Time of the commands that explain, run as a user types them: wall seconds and processor seconds.

    python -m benchmarks commands

The times include the start of Python, imports and loading. Processor seconds hardly depend on what else the machine
does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from ..results import Result, column_table, footnote
from ..setup import display_name
from .answers import processor_seconds

SOURCES = ("hf_specheads", "hf_specheads/diagnosis", "hf_specheads/evaluation", "hf_specheads/cli")
PROMPT = "def read_lines(path):\n"
COMMANDS: dict[str, list[str]] = {
    "doctor": ["doctor"],
    "doctor, no rounds": ["doctor", "--no-speed"],
    "diff": ["diff", "--prompt", PROMPT],
    "generate --compare": ["generate", "--prompt", PROMPT, "--compare", "--max-new-tokens", "128"],
    "bench": ["bench", "--suite", "ours", "--limit", "8", "--max-new-tokens", "128", "--repeats", "1"],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair and the commands."""
    parser.add_argument("--target", default="model_cards/target", help="target: folder")
    parser.add_argument("--heads", default="model_cards/eagle3", help="heads: folder")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS), help="some of the commands")


def measure(args: argparse.Namespace) -> Result:
    """Runs every command once."""
    found = {}
    for name in args.only:
        command, *rest = COMMANDS[name]
        words = [command, "--target", args.target, "--heads", args.heads, "--json", *rest]
        before, started = processor_seconds(), time.perf_counter()
        ran = subprocess.run([sys.executable, "-m", "hf_specheads", *words], capture_output=True, text=True)
        seconds, used = time.perf_counter() - started, processor_seconds() - before
        if ran.returncode not in (0, 1):
            raise RuntimeError(f"{' '.join(words)} failed with {ran.returncode}: {ran.stderr[-1000:]}")
        found[name] = {"words": " ".join(words), "seconds": seconds, "processor_seconds": used,
                       "exit_code": ran.returncode, "verdict": json.loads(ran.stdout).get("verdict")}  # fmt: skip
    return {"target": display_name(args.target), "heads": display_name(args.heads), "commands": found}


def texts_agree(result: Result) -> bool:
    """Tells whether no command reported a problem, as the pair is sound."""
    return not any(one["exit_code"] for one in result["commands"].values())


def table(result: Result) -> str:
    """One row per command."""
    columns = {
        "wall seconds": ("seconds", 0), "processor seconds": ("processor_seconds", 0),
        "verdict": lambda one: one["verdict"] or "-",
    }  # fmt: skip
    commands = {f"`specheads {name}`": one for name, one in result["commands"].items()}
    return f"{column_table(columns, commands, 'command')}\n{footnote(result, '{heads} on {target}')}"
