"""Result files of the oracles, and the tables of `docs/export.md` rendered from them by `python -m benchmarks`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from ..results import RESULTS, column_table

FOLDER = RESULTS / "oracles"


def read(name: str) -> dict[str, Any]:
    """Reads a result by its name."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def parser_of(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Makes the parser of an oracle's command line, for a result of this name."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=FOLDER / f"{name}.json")
    return parser


def ask(python: str, script: str, question: dict[str, Any], **environment: str) -> dict[str, Any]:
    """Runs a script of this folder in another environment, which need not have this package, and returns its answer.

    Raises:
        RuntimeError: with the script's output, if it ends without an answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "question.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(question), encoding="utf-8")
        command = [python, Path(__file__).with_name(script), asked, answer]
        ran = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        if not answer.exists():
            raise RuntimeError(f"{ran.stdout}\n{ran.stderr}")
        return json.loads(answer.read_text(encoding="utf-8"))


def write(path: Path, command: str, entries: list[dict[str, Any]], packages: Iterable[str] = ()) -> None:
    """Writes a result (how it was made, package versions, and entries) and prints the entries."""
    result = {"command": command, "versions": {name: metadata.version(name) for name in packages}, "entries": entries}
    for entry in entries:
        print(json.dumps(entry))
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {key: value for key, value in result.items() if value}
    path.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def _versions(result: dict[str, Any]) -> str:
    found = result.get("versions") or next(entry["versions"] for entry in result["entries"] if "versions" in entry)
    return ", ".join(f"{name} {version}" for name, version in found.items()) + ".\n"


def _export(entry: dict[str, Any]) -> str:
    place = "in the target's checkpoint" if entry["to"] == "native" else f"`--to {entry['to']}`"
    return f"{entry['heads']} {place}"


CLOSE = {
    "largest difference of logits": "{max_error:.1e}", "largest logit": ("largest_logit", 1),
    "same favourite token": "{same_favourite:.1%}",
}  # fmt: skip
EQUAL = "{equal_tensors} of {tensors}"


def vllm_table(result: dict[str, Any]) -> str:
    """Compares texts, rounds and acceptance lengths of vLLM and of our own loop."""
    columns = {
        "export": _export, "draft positions": ("draft_positions", 0),
        "texts equal to plain vLLM's": "{same_as_plain_vllm} of {texts}",
        "texts equal to transformers'": "{same_as_transformers} of {texts}",
        "rounds, vLLM / ours": "{vllm[rounds]} / {ours[rounds]}",
        "accepted, vLLM / ours": "{vllm[accepted]} / {ours[accepted]}",
        "acceptance length, vLLM / ours": "{vllm[acceptance_length]:.2f} / {ours[acceptance_length]:.2f}",
    }  # fmt: skip
    served = [entry for entry in result["entries"] if "error" not in entry]
    note = "{prompts} prompts, {max_new_tokens} new tokens each, greedy, {dtype}; ".format_map(result)
    refused = [entry for entry in result["entries"] if "error" in entry]
    failed = "".join(f"\n{_export(entry)} cannot be served: `{entry['error']}`.\n" for entry in refused)
    return f"{column_table(columns, served)}\n{note}{_versions(result)}{failed}"


def poss_table(result: dict[str, Any]) -> str:
    """Shows the cost of leaving out later specialists at the heads' own depth, in our loop."""
    sides = {"all specialists": "all_specialists", "specialist 0 alone": "specialist_0"}
    columns = {
        "heads": "{heads}", "draft positions": "{full_depth[draft_positions]}",
        **{title: f"{{full_depth[{side}][acceptance_length]:.2f}}" for title, side in sides.items()},
        **{f"accepted by position, {title.removesuffix(' specialists').removesuffix(' alone')}":
           lambda entry, side=side: " ".join(map(str, entry["full_depth"][side]["accepted_by_position"]))
           for title, side in sides.items()},
    }  # fmt: skip
    return column_table(columns, [one for one in result["entries"] if "full_depth" in one and one["to"] == "vllm"])


def _converted(entry: dict[str, Any]) -> str:
    return EQUAL.format(**entry["converter"]) if "converter" in entry else ""


def speculators_table(result: dict[str, Any]) -> str:
    """Shows the largest difference of a draft logit, and how many tensors the converter makes as our EAGLE-3 exports
    have them."""
    columns = {
        "heads": "{heads}", "type": "{dtype}",
        "rows": lambda entry: str(entry["passes"] * entry["rows"]), **CLOSE,
        "tensors equal after conversion": _converted,
    }  # fmt: skip
    return f"{column_table(columns, result['entries'])}\n{_versions(result)}"


def speculators_blocks_table(result: dict[str, Any]) -> str:
    """Shows the class of the library that loads each export, how many tensors stay equal, and the difference of draft
    logits."""
    columns = {
        "heads": "{heads}", "loaded as": "`{class}`", "tensors equal": EQUAL,
        "missing": lambda entry: ", ".join(entry["missing"]) or "none", "slots": ("slots", 0), **CLOSE,
    }  # fmt: skip
    trained = ["; ".join(f"{error:.1e}" for error in entry["training_forward"]) for entry in result["entries"]
               if "training_forward" in entry]  # fmt: skip
    note = (
        f"Largest difference of its training forward of MTP from drafting, by draft position: {', '.join(trained)}. "
    )
    return f"{column_table(columns, result['entries'])}\n{note}{_versions(result)}"


def speculators_eagle_table(result: dict[str, Any]) -> str:
    """Shows the same comparison as [`speculators_table`] for EAGLE-1, with the last version that supports it."""
    columns = {
        "heads": "{heads}", "tensors equal after conversion": EQUAL, "rows": ("rows", 0), **CLOSE,
    }  # fmt: skip
    return f"{column_table(columns, result['entries'])}\n{_versions(result)}"


TABLES = {
    "vllm": vllm_table, "vllm_bfloat16": vllm_table, "vllm_blocks": vllm_table, "speculators": speculators_table,
    "speculators_blocks": speculators_blocks_table, "speculators_eagle": speculators_eagle_table,
}  # fmt: skip


def tables() -> dict[str, str]:
    """Returns every table by its name in documents."""
    made = {name: make(read(name)) for name, make in TABLES.items()}
    made["poss"] = poss_table(read("vllm"))
    return {f"oracles/{name}": table for name, table in made.items()}
