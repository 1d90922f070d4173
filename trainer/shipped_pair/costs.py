"""Cost of making training data, stored beside the data and shown in the cards of draft heads trained on them."""

import json
from pathlib import Path

from transformers import PreTrainedModel

COSTS = "costs.json"


def costs_of(path: Path) -> Path:
    """Returns the path where the costs of a file or a folder are stored."""
    return path / COSTS if path.is_dir() else path.with_name(f"{path.name}.{COSTS}")


def add_costs(path: Path, model: PreTrainedModel, tokens: int, seconds: float, logits: bool = True) -> None:
    """Adds forwards over `tokens` tokens, and the time they took, to the costs of earlier calls.

    Each token counts two operations per weight of the layers, and per weight of `lm_head` if `logits` are computed for
    every token. Attention scores are not counted.
    """
    spent = read_costs(path) or {"flops": 0, "hours": 0.0}
    weights = sum(parameter.numel() for parameter in model.get_decoder().layers.parameters())
    weights += model.get_output_embeddings().weight.numel() if logits else 0
    total = {"flops": spent["flops"] + 2 * weights * tokens, "hours": round(spent["hours"] + seconds / 3600, 4)}
    costs_of(path).write_text(json.dumps(total), encoding="utf-8")


def read_costs(path: Path) -> dict[str, float] | None:
    """Reads `flops` and `hours` of a file or a folder; `None` if none were stored."""
    kept = costs_of(path)
    return json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else None
