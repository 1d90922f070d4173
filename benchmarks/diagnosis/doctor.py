"""Causes of low acceptance planted in sound heads: what `specheads doctor` says, and of the sound ones.

    python -m benchmarks doctor

Every planting changes shipped heads, their target or the prompts as one of the causes would; the doctor is given the
result and nothing else. `before` and `after` are acceptance of draft position 1 as planted, and under the setting the
doctor proposes. Of sound heads it must say nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_specheads import diagnose, load_heads

from ..results import Result, footnote, markdown_table, percent
from ..setup import display_name, load_prompts, load_target
from .plantings import PLANTINGS, Case, Planting

SOURCES = ("hf_specheads", "hf_specheads/diagnosis", "benchmarks/diagnosis")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the pair lies, and how much text is looked at."""
    parser.add_argument("--target", default="model_cards/target", help="target: folder")
    parser.add_argument("--pair", type=Path, default=Path("model_cards"), help="folder of the heads' folders")
    parser.add_argument("--prompts", nargs="+", default=["tuning"], help="sets in benchmarks/prompts, or .jsonl files")
    parser.add_argument("--limit", type=int, default=8, help="use only the first N prompts of every set")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32", help="type of all weights")


def head_folders(pair: Path) -> dict[str, str]:
    """Method by folder of all heads of a pair that need no adapter of their target."""
    found = {}
    for path in sorted(pair.glob("*/config.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.get("model_type", "").startswith("specheads") and not config.get("target_adapter"):
            found[str(path.parent)] = config["method"]
    return found


def examine(case: Case) -> Result:
    """What the doctor says."""
    found = diagnose(case.target, case.heads, case.prompts, max_new_tokens=case.new_tokens, speed=False)
    first = found.findings[0] if found.findings else None
    return {
        "verdict": found.verdict,
        "causes": [one.cause for one in found.findings],
        "mend": None if first is None else first.mend,
        "before": found.facts.score.position_1,
        "tau_before": found.facts.score.tau,
        "after": None if first is None else first.after,
        "seconds": found.seconds,
    }


def case_of(args: argparse.Namespace, target: PreTrainedModel, folder: str, prompts: list[torch.Tensor]) -> Case:
    """Sound heads."""
    return Case(target, load_heads(folder, dtype=target.dtype), prompts, args.max_new_tokens)


def measure(args: argparse.Namespace, tell: Callable[[str], None] = print) -> Result:
    """All plantings, and all sound heads."""
    target, tokenizer = load_target(args)
    prompts = [inputs["input_ids"] for inputs in load_prompts(args.prompts, tokenizer, args.limit)]
    folders = head_folders(args.pair)
    sound = {display_name(folder): examine(case_of(args, target, folder, prompts)) for folder in folders}
    tell(f"sound heads: { ({name: one['causes'] for name, one in sound.items()}) }")
    planted = []
    for planting in PLANTINGS:
        folder = next((folder for folder, method in folders.items() if method == planting.method), None)
        if folder is None:
            continue
        case = case_of(args, target, folder, prompts)
        planting.plant(case)
        planted.append(_row(planting, folder, examine(case)))
        tell(f"{planting.planted}: {planted[-1]['causes']}")
    return {
        "target": display_name(args.target), "prompts": args.prompts, "num_prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens, "dtype": args.dtype, "planted": planted, "sound": sound,
        "named": sum(row["named"] for row in planted),
        "false_alarms": sum(bool(one["causes"]) for one in sound.values()),
    }  # fmt: skip


def _row(planting: Planting, folder: str, said: Result) -> Result:
    named = bool(said["causes"]) and said["causes"][0] in planting.named
    return {
        "number": planting.number,
        "planted": planting.planted,
        "heads": display_name(folder),
        "named": named,
        **said,
    }


def texts_agree(result: Result) -> bool:
    """Whether everything was named, and nothing else."""
    return result["named"] == len(result["planted"]) and not result["false_alarms"]


def table(result: Result) -> str:
    """Plantings, then sound heads."""
    rows = [
        (f"{row['number']}", row["planted"], row["heads"], ", ".join(row["causes"]) or "nothing",
         "yes" if row["named"] else "no", percent(row["before"]), percent(row["after"]))
        for row in result["planted"]
    ]  # fmt: skip
    header = ("cause", "planted", "in", "the doctor says", "named first", "position 1", "after the mend")
    lines = [markdown_table(header, rows)]
    names = ", ".join(f"{name} ({percent(one['before'])})" for name, one in result["sound"].items())
    lines.append(
        f"False alarms on {len(result['sound'])} sound heads: {result['false_alarms']}. Position 1 of {names}.\n"
    )
    said = f"{result['num_prompts']} prompts, {result['max_new_tokens']} tokens each, {result['dtype']}"
    return "\n".join([*lines, footnote(result, said)])
