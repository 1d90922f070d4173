"""Saved heads in the state before publishing: with facts of their training and measured results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_specheads import DraftHead


def save_with_facts(heads: DraftHead, folder: Path, training: dict[str, Any], results: Any) -> Path:
    """Saves heads whose recorded target is `lab/target`, and the facts beside them. Returns the folder."""
    heads.config.target["name"] = "lab/target"
    heads.save_pretrained(folder)
    (folder / "training_facts.json").write_text(json.dumps(training))
    (folder / "eval_results.json").write_text(json.dumps(results))
    return folder
