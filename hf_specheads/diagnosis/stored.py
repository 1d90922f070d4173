"""Reads facts that are stored with heads: acceptance measured in training, and the amount of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..heads.base import DraftHead

FACTS, EVAL_RESULTS = "training_facts.json", "eval_results.json"


def stored_numbers(heads: DraftHead, folder: str | Path | None = None) -> dict[str, Any]:
    """Reads `position_1`, `acceptance_length`, `tokens` (trained on) and `from` (the file); unknown ones are missing.

    Args:
        heads: Loaded heads.
        folder: Folder of their files; default the one that they were loaded from.
    """
    place = Path(folder or heads.config.name_or_path or "nowhere")
    found: dict[str, Any] = {}
    results, facts = _read(place / EVAL_RESULTS), _read(place / FACTS)
    for entry in results if isinstance(results, list) else []:
        # In a tree, any child may be accepted, so its acceptance says nothing about the most likely child alone.
        chain = isinstance(entry, dict) and (entry.get("tree_config") or {}).get("top_k", 1) == 1
        if chain and entry.get("task") == "greedy" and entry.get("pos_acc"):
            found |= {"position_1": entry["pos_acc"][0], "acceptance_length": entry.get("acceptance_length"),
                      "from": EVAL_RESULTS}  # fmt: skip
    if isinstance(facts, dict):
        metrics = {name.removeprefix("eval_"): value for name, value in (facts.get("metrics") or {}).items()}
        chain = (heads.config.tree_config or {}).get("top_k", 1) == 1
        if chain and "pos_acc_1" in metrics and "position_1" not in found:
            found |= {"position_1": metrics["pos_acc_1"], "acceptance_length": metrics.get("acceptance_length"),
                      "from": FACTS}  # fmt: skip
        if (tokens := _tokens(facts, heads)) is not None:
            found["tokens"] = tokens
    return found


def untouched(heads: DraftHead) -> bool | None:
    """Whether norm weights and biases still look freshly initialised, i.e. each of them has a single value.

    The first training step changes that. `None` for heads without such weights.
    """
    alike = [weight for name, weight in heads.named_parameters() if name.endswith(("norm.weight", ".bias"))]
    return all(bool((weight == weight.flatten()[0]).all()) for weight in alike) if alike else None


def _tokens(facts: dict[str, Any], heads: DraftHead) -> int | None:
    """Number of tokens seen in training, if known; an upper bound if documents may be shorter than the maximum."""
    if facts.get("tokens"):
        return int(facts["tokens"])
    examples = (facts.get("steps") or 0) * (facts.get("examples_per_step") or 0)
    longest = heads.config.train_max_length
    return examples * longest if examples and longest else None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
