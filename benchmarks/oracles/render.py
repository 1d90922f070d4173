"""The tables of `docs/export.md` from the result files of the oracles; `python -m benchmarks --render` writes them."""

from __future__ import annotations

import json
import re
from typing import Any

from ..results import RESULTS, ROOT

DOCUMENT = ROOT / "docs" / "export.md"
FILES = {name: RESULTS / "oracles" / f"{name}.json" for name in
         ("vllm", "vllm_bfloat16", "speculators", "speculators_loads", "speculators_eagle")}  # fmt: skip


def _table(head: list[str], rows: list[list[Any]]) -> str:
    align = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in (head, align, *rows))


def _versions(result: dict[str, Any]) -> str:
    found = result.get("versions") or result["entries"][0]["versions"]
    return ", ".join(f"{name} {version}" for name, version in found.items())


def vllm_table(result: dict[str, Any]) -> str:
    """Texts, rounds and acceptance lengths of vLLM and of ours."""
    rows = [
        [
            f"{entry['heads']} `--to {entry['to']}`",
            entry["draft_positions"],
            f"{entry['same_as_plain_vllm']} of {entry['texts']}",
            f"{entry['same_as_transformers']} of {entry['texts']}",
            f"{entry['vllm']['rounds']} / {entry['ours']['rounds']}",
            f"{entry['vllm']['accepted']} / {entry['ours']['accepted']}",
            f"{entry['vllm']['acceptance_length']:.2f} / {entry['ours']['acceptance_length']:.2f}",
        ]
        for entry in result["entries"]
    ]
    head = ["export", "draft positions", "texts as plain vLLM's", "texts as transformers'", "rounds, vLLM / ours",
            "accepted, vLLM / ours", "acceptance length, vLLM / ours"]  # fmt: skip
    note = f"{result['prompts']} prompts, {result['max_new_tokens']} new tokens each, greedy, {result['dtype']}; "
    return f"{_table(head, rows)}\n\n{note}{_versions(result)}."


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
    rows = []
    for entry in result["entries"]:
        converter = entry.get("converter")
        made = f"{converter['equal_tensors']} of {converter['tensors']}" if converter else ""
        rows.append([entry["heads"], entry["dtype"], entry["passes"] * entry["rows"], f"{entry['max_error']:.1e}",
                     f"{entry['largest_logit']:.1f}", f"{entry['same_favourite']:.1%}", made])  # fmt: skip
    head = ["heads", "type", "rows", "greatest difference", "largest logit", "same favourite token",
            "tensors equal after its converter"]  # fmt: skip
    return f"{_table(head, rows)}\n\n{_versions(result)}."


def speculators_loads_table(result: dict[str, Any]) -> str:
    """Which class of the library loads an export, and with how many of its tensors as they are."""
    rows = [
        [entry["heads"], f"`{entry['class']}`", f"{entry['equal_tensors']} of {entry['tensors']}",
         ", ".join(entry["missing"]) or "none"]
        for entry in result["entries"]
    ]  # fmt: skip
    return f"{_table(['heads', 'loaded as', 'tensors equal', 'missing'], rows)}\n\n{_versions(result)}."


def speculators_eagle_table(result: dict[str, Any]) -> str:
    """The same for EAGLE-1, with the last version that knew it."""
    rows = [
        [entry["heads"], f"{entry['equal_tensors']} of {entry['tensors']}", entry["rows"], f"{entry['max_error']:.1e}",
         f"{entry['largest_logit']:.1f}", f"{entry['same_favourite']:.1%}"]
        for entry in result["entries"]
    ]  # fmt: skip
    head = ["heads", "tensors equal after its converter", "rows", "greatest difference", "largest logit",
            "same favourite token"]  # fmt: skip
    return f"{_table(head, rows)}\n\n{_versions(result)}."


def tables() -> dict[str, str]:
    """Every table by its name in the document."""
    results = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
    return {
        "vllm": vllm_table(results["vllm"]),
        "vllm_bfloat16": vllm_table(results["vllm_bfloat16"]),
        "poss": poss_table(results["vllm"]),
        "speculators": speculators_table(results["speculators"]),
        "speculators_loads": speculators_loads_table(results["speculators_loads"]),
        "speculators_eagle": speculators_eagle_table(results["speculators_eagle"]),
    }


def rendered(text: str) -> str:
    """The document with every table between its markers replaced."""
    for name, table in tables().items():
        pattern = rf"(<!-- table {name} -->\n).*?(<!-- end {name} -->)"
        text, count = re.subn(
            pattern, lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"{DOCUMENT.name} has {count} places for the table {name!r}, expected 1.")
    return text
