"""Facts about a training run, which are saved beside the weights and rendered in the model card."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState, TrainingArguments

from hf_specheads.heads.base import DraftHead
from hf_specheads.provenance import architecture, device_name, git, versions

FACTS = "training_facts.json"
PACKAGES = ("hf-specheads", "torch", "transformers", "accelerate", "datasets")


def commit() -> str | None:
    """Returns the commit of the checkout this package runs from, with `-dirty` if files differ; `None` if the package
    is installed."""
    here = Path(__file__).resolve().parent
    if git(here, "rev-parse", "--show-prefix") != "trainer/":  # the package is installed inside another repository
        return None
    return git(here, "describe", "--always", "--abbrev=40", "--dirty") or None


def hardware(args: TrainingArguments) -> dict[str, Any]:
    """Returns device, number of processes, and CPU cores and threads of a run."""
    device = args.device
    return {
        "device": f"{device.type} ({device_name(device) if device.type == 'cuda' else architecture()})",
        "processes": args.world_size,
        "cpu_cores": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
    }


def training_facts(
    heads: DraftHead,
    args: TrainingArguments,
    state: TrainerState,
    *,
    num_passes: int,
    train_examples: int | None,
    recipe: dict[str, Any],
    metrics: dict[str, float],
    hours: float | None,
) -> dict[str, Any]:
    """Returns the facts about a run as plain values: draft heads, data, hardware, duration and metrics.

    Args:
        heads: The draft heads after training.
        args: Training arguments of the run.
        state: State of the trainer at the end.
        num_passes: Number of draft positions that were trained.
        train_examples: Number of training examples, `None` if unknown.
        recipe: The recipe in force, see [`recipe.Recipe.to_dict`].
        metrics: Final metrics.
        hours: Wall-clock hours of training, `None` if unknown.
    """
    return {
        "command": " ".join(sys.argv),
        "versions": versions(PACKAGES),
        "commit": commit(),
        "hardware": hardware(args),
        "recipe": recipe,
        "method": heads.config.method,
        "target": {k: v for k, v in (heads.config.target or {}).items() if k != "fingerprint"},
        "num_passes": num_passes,
        "num_specialists": getattr(heads.config, "num_specialists", 1),
        "positions_per_specialist": getattr(heads.config, "positions_per_specialist", None),
        "parameters": sum(p.numel() for p in heads.parameters()),
        "train_examples": train_examples,
        "steps": state.global_step,
        "epochs": state.epoch,
        "examples_per_step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "arguments": json.loads(args.to_json_string()),
        "hours": None if hours is None else round(hours, 4),
        "metrics": metrics,
        "log_history": state.log_history,
    }


def write_facts(facts: dict[str, Any], folder: str | os.PathLike) -> Path:
    """Writes `training_facts.json` into a folder atomically; returns its path."""
    path = Path(folder) / FACTS
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(facts, indent=2, default=str) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return path
