"""Versions, commit, processor and accelerators, to record with results, training runs and bug reports."""

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

# Instruction sets that decide how fast matrices are multiplied, by their flag in /proc/cpuinfo, the widest first.
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
    """Returns the versions of Python and of those packages that are installed, in the order given.

    An imported package is asked for its `__version__`, because that of torch includes the build.
    """
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[package] = str(getattr(sys.modules.get(package), "__version__", installed))
    return found


def git(folder: Path, *arguments: str) -> str | None:
    """Runs git in a folder and returns its output; `None` if git is missing or fails, e.g. outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def architecture() -> str:
    """Returns Python's own description of the processor, which needs no system files, e.g. `x86_64`."""
    return platform.processor() or platform.machine()


@functools.cache
def processor() -> str:
    """Returns model, widest instruction set and number of logical cores, e.g. `AMD EPYC, AVX2, 2 logical cores`."""
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        described = ""
    return f"{_named(described)}, {os.cpu_count()} logical cores"


def _named(described: str) -> str:
    """Returns model and widest instruction set from /proc/cpuinfo; the architecture if it names no model.

    The instruction set is included because hypervisors may replace the model by its vendor's name, and processors with
    the same name can differ in speed by several times.
    """
    facts = dict(re.findall(r"^(model name|flags|Features)[ \t]*:[ \t]*(.*)$", described, re.MULTILINE))
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    widest = next((name for flag, name in INSTRUCTIONS.items() if flag in flags), "")
    model = facts.get("model name", "").strip() or architecture()
    return f"{model}, {widest}" if widest else model


def device_name(device: torch.device) -> str:
    """Returns a name that distinguishes machines by speed: the accelerator's, or for a CPU that of [`processor`]."""
    if device.type == "cpu":
        return processor()
    import torch

    backend = getattr(torch, device.type)
    return str(backend.get_device_name(device)) if hasattr(backend, "get_device_name") else device.type


def accelerators() -> str:
    """Returns the names of the CUDA devices, or `none`."""
    import torch  # imported here so that commands that need no device start without loading torch

    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())) or "none"
