"""Print versions and devices, for bug reports."""

from __future__ import annotations

import argparse
import platform

from .display import emit

PACKAGES = (
    "hf-specheads", "transformers", "torch", "peft", "accelerate", "safetensors", "huggingface-hub", "datasets",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def collect() -> dict[str, str]:
    """Versions and devices as text; loads torch, which alone knows the devices, and not transformers."""
    import torch

    from ..provenance import accelerators, versions

    found = versions(PACKAGES)
    facts = {"python": found["python"], "platform": platform.platform()}
    facts |= {package: found.get(package, "not installed") for package in PACKAGES}
    facts["torch threads"] = str(torch.get_num_threads())
    facts["accelerators"] = accelerators()
    return facts


def run(args: argparse.Namespace) -> int:
    """Prints one fact a line."""
    facts = collect()
    emit(args, facts, "\n".join(f"{name:<20} {value}" for name, value in facts.items()))
    return 0
