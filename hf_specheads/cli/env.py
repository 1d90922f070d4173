"""Print versions and devices, for bug reports.

Quick, because torch is not imported: versions are those of the installed packages, accelerators those that
`nvidia-smi` lists. `--devices` asks torch which devices it can use, which takes seconds because torch is imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from ..provenance import accelerators, processor, versions
from .display import emit

PACKAGES = (
    "hf-specheads", "transformers", "torch", "peft", "accelerate", "safetensors", "huggingface-hub", "datasets",
)  # fmt: skip
LIST_GPUS = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the option to ask torch for devices."""
    parser.add_argument("--devices", action="store_true", help="ask torch for devices and threads (takes seconds)")


def collect(*, ask_torch: bool = True) -> dict[str, str]:
    """Collects versions and devices, as text.

    Args:
        ask_torch: Import torch to learn which devices it can use and its number of threads.
    """
    found = versions(PACKAGES)
    facts = {"python": found["python"], "platform": platform.platform(), "processor": processor()}
    facts |= {package: found.get(package, "not installed") for package in PACKAGES}
    facts |= {"torch build": torch_build(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set")}
    if not ask_torch:
        return facts | {"accelerators": listed_accelerators()}
    import torch

    return facts | {"torch threads": str(torch.get_num_threads()), "accelerators": accelerators()}


def torch_build() -> str:
    """Platform that the installed torch was built for, e.g. `CUDA 12.8`, read from its `version.py`."""
    spec = importlib.util.find_spec("torch")
    folders = [] if spec is None else spec.submodule_search_locations or []
    for file in (Path(folder) / "version.py" for folder in folders):
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            found = re.findall(r"^(cuda|hip|xpu)\b[^=]*= *['\"]([^'\"]+)", text, flags=re.MULTILINE)
            return ", ".join(f"{kind.upper()} {version}" for kind, version in found) or "CPU only"
    return "not known"


def listed_accelerators() -> str:
    """Names of the GPUs that `nvidia-smi` lists, whether or not torch can use them."""
    if shutil.which(LIST_GPUS[0]) is None:
        return "none (nvidia-smi was not found)"
    try:
        done = subprocess.run(LIST_GPUS, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known: nvidia-smi fails ({error})"
    return ", ".join(filter(None, map(str.strip, done.stdout.splitlines()))) or "none"


def run(args: argparse.Namespace) -> int:
    """Prints one fact per line."""
    facts = collect(ask_torch=args.devices)
    emit(args, facts, "\n".join(f"{name:<20} {value}" for name, value in facts.items()))
    return 0
