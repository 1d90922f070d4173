"""Where numbers come from: versions, commit, processor, accelerators; for results, trainings and bug reports."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# What decides how fast matrices are multiplied, by the flag that Linux gives it, the widest first.
INSTRUCTIONS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 with bf16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "avx": "AVX",
    "sve2": "SVE2",
    "sve": "SVE",
    "asimd": "NEON",
}


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Python and, in their order, of those of the packages that are installed; of those that run, as they
    say themselves: torch's tells the build as well."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[package] = str(getattr(sys.modules.get(package), "__version__", installed))
    return found


def git(folder: Path, *arguments: str) -> str | None:
    """What git answers in a folder; `None` without git, or if the folder lies in no checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def architecture() -> str:
    """What Python knows of the processor without asking the system's files, e.g. `x86_64`."""
    return platform.processor() or platform.machine()


@functools.cache
def processor() -> str:
    """Model, widest instructions and number of logical cores, e.g. `AMD EPYC, AVX2, 2 logical cores`."""
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        described = ""
    return f"{_named(described)}, {os.cpu_count()} logical cores"


def _named(described: str) -> str:
    """Model and widest instructions in what Linux says of a processor; the architecture where it tells no model.

    Hypervisors hide the model behind its maker's name, and processors of one name may be several times apart.
    """
    facts = dict(re.findall(r"^(model name|flags|Features)[ \t]*:[ \t]*(.*)$", described, re.MULTILINE))
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    widest = next((name for flag, name in INSTRUCTIONS.items() if flag in flags), "")
    model = facts.get("model name", "").strip() or architecture()
    return f"{model}, {widest}" if widest else model


def device_name(device: torch.device) -> str:
    """What tells machines apart on which the same code is fast in different ways: the accelerator, or the processor
    with its instructions and number of cores."""
    if device.type == "cpu":
        return processor()
    import torch

    backend = getattr(torch, device.type)
    return str(backend.get_device_name(device)) if hasattr(backend, "get_device_name") else device.type


def accelerators() -> str:
    """Names of the CUDA devices, or `none`."""
    import torch  # here, so that commands that need no device answer without it

    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())) or "none"
