"""Result files of the oracles, and the tables of `docs/export.md` made of them by `python -m benchmarks --render`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from ..results import RESULTS, markdown_table

FOLDER = RESULTS / "oracles"


def read(name: str) -> dict[str, Any]:
    """A result by its name."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def write(path: Path, command: str, entries: list[dict[str, Any]], packages: Iterable[str] = ()) -> None:
    """Writes a result: how it was made, with which versions, and its entries, which are printed too."""
    result = {"command": command, "versions": {name: metadata.version(name) for name in packages}, "entries": entries}
    for entry in entries:
        print(json.dumps(entry))
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {key: value for key, value in result.items() if value}
    path.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def _table(head: list[str], rows: list[list[Any]]) -> str:
    return markdown_table(head, [[str(cell) for cell in row] for row in rows])


def _versions(result: dict[str, Any]) -> str:
    found = result.get("versions") or next(entry["versions"] for entry in result["entries"] if "versions" in entry)
    return ", ".join(f"{name} {version}" for name, version in found.items()) + ".\n"


def _export(entry: dict[str, Any]) -> str:
    place = "in the target's checkpoint" if entry["to"] == "native" else f"`--to {entry['to']}`"
    return f"{entry['heads']} {place}"


CLOSE = ["greatest difference", "largest logit", "same favourite token"]


def _close(entry: dict[str, Any]) -> list[str]:
    """How close the draft logits of both sides are: cells under `CLOSE`."""
    return [f"{entry['max_error']:.1e}", f"{entry['largest_logit']:.1f}", f"{entry['same_favourite']:.1%}"]


def _equal(entry: dict[str, Any]) -> str:
    return f"{entry['equal_tensors']} of {entry['tensors']}"


def vllm_table(result: dict[str, Any]) -> str:
    """Texts, rounds and acceptance lengths of vLLM and of ours."""
    served = [entry for entry in result["entries"] if "error" not in entry]
    rows = [
        [_export(entry), entry["draft_positions"],
         *(f"{entry[name]} of {entry['texts']}" for name in ("same_as_plain_vllm", "same_as_transformers")),
         *(f"{entry['vllm'][name]} / {entry['ours'][name]}" for name in ("rounds", "accepted")),
         f"{entry['vllm']['acceptance_length']:.2f} / {entry['ours']['acceptance_length']:.2f}"]
        for entry in served
    ]  # fmt: skip
    head = ["export", "draft positions", "texts as plain vLLM's", "texts as transformers'", "rounds, vLLM / ours",
            "accepted, vLLM / ours", "acceptance length, vLLM / ours"]  # fmt: skip
    note = f"{result['prompts']} prompts, {result['max_new_tokens']} new tokens each, greedy, {result['dtype']}; "
    refused = [entry for entry in result["entries"] if "error" in entry]
    failed = "".join(f"\n{_export(entry)} is not served: `{entry['error']}`.\n" for entry in refused)
    return f"{_table(head, rows)}\n{note}{_versions(result)}{failed}"


def poss_table(result: dict[str, Any]) -> str:
    """What leaving out the later specialists costs at the heads' own depth, in our loop."""
    rows = []
    for entry in result["entries"]:
        if (full := entry.get("full_depth")) and entry["to"] == "vllm":
            whole, alone = full["all_specialists"], full["specialist_0"]
            accepted = [" ".join(str(count) for count in side["accepted_by_position"]) for side in (whole, alone)]
            rows.append([entry["heads"], full["draft_positions"], f"{whole['acceptance_length']:.2f}",
                         f"{alone['acceptance_length']:.2f}", *accepted])  # fmt: skip
    head = ["heads", "draft positions", "all specialists", "specialist 0 alone", "accepted by position, all",
            "accepted by position, specialist 0"]  # fmt: skip
    return _table(head, rows)


def speculators_table(result: dict[str, Any]) -> str:
    """Greatest difference of a draft logit, and what the converter makes of our EAGLE-3 exports."""
    rows = [
        [entry["heads"], entry["dtype"], entry["passes"] * entry["rows"], *_close(entry),
         _equal(entry["converter"]) if "converter" in entry else ""]
        for entry in result["entries"]
    ]  # fmt: skip
    head = ["heads", "type", "rows", *CLOSE, "tensors equal after its converter"]
    return f"{_table(head, rows)}\n{_versions(result)}"


def speculators_blocks_table(result: dict[str, Any]) -> str:
    """Which class of the library loads an export, with how many of its tensors as they are, and its draft logits."""
    rows = [
        [entry["heads"], f"`{entry['class']}`", _equal(entry), ", ".join(entry["missing"]) or "none", entry["slots"],
         *_close(entry)]
        for entry in result["entries"]
    ]  # fmt: skip
    trained = ["; ".join(f"{error:.1e}" for error in entry["training_forward"]) for entry in result["entries"]
               if "training_forward" in entry]  # fmt: skip
    head = ["heads", "loaded as", "tensors equal", "missing", "slots", *CLOSE]
    note = f"Its training forward of MTP against drafting, by draft position: {', '.join(trained)}. "
    return f"{_table(head, rows)}\n{note}{_versions(result)}"


def speculators_eagle_table(result: dict[str, Any]) -> str:
    """The same for EAGLE-1, with the last version that knew it."""
    rows = [[entry["heads"], _equal(entry), entry["rows"], *_close(entry)] for entry in result["entries"]]
    head = ["heads", "tensors equal after its converter", "rows", *CLOSE]
    return f"{_table(head, rows)}\n{_versions(result)}"


TABLES = {
    "vllm": vllm_table, "vllm_bfloat16": vllm_table, "vllm_blocks": vllm_table, "speculators": speculators_table,
    "speculators_blocks": speculators_blocks_table, "speculators_eagle": speculators_eagle_table,
}  # fmt: skip


def tables() -> dict[str, str]:
    """Every table by its name in documents."""
    made = {name: make(read(name)) for name, make in TABLES.items()}
    made["poss"] = poss_table(read("vllm"))
    return {f"oracles/{name}": table for name, table in made.items()}
