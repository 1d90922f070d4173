"""Print versions and devices, for bug reports."""

from __future__ import annotations

import argparse
import platform

from ..provenance import accelerators, versions

PACKAGES = (
    "hf-specheads", "transformers", "torch", "peft", "accelerate", "safetensors", "huggingface-hub", "datasets",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def collect() -> dict[str, str]:
    """Versions and devices as text."""
    import torch

    found = versions(PACKAGES)
    facts = {"python": found["python"], "platform": platform.platform()}
    facts |= {package: found.get(package, "not installed") for package in PACKAGES}
    facts["torch threads"] = str(torch.get_num_threads())
    facts["accelerators"] = accelerators()
    facts["generate() dispatch"] = _dispatch_state()
    return facts


def _dispatch_state() -> str:
    from transformers import GenerationMixin

    import hf_specheads  # noqa: F401 (importing it installs the dispatch)

    installed = getattr(GenerationMixin._assisted_decoding, "_specheads_original", None) is not None
    return "installed" if installed else "not installed"


def run(args: argparse.Namespace) -> int:
    """Prints one fact a line."""
    for name, value in collect().items():
        print(f"{name:<20} {value}")
    return 0
