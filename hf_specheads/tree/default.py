"""Which draft tree the heads use when the user has not chosen one.

The choice depends only on the machine and device the heads are on, never on a measurement made along the way, so the
same call always grows the same trees.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import torch

from ..provenance import device_name
from .config import DraftTreeConfig

# On a CPU every verified node past the first few costs time (docs/tuning.md). The fastest trees measured for the
# shipped heads were chains of depth 4 to 8 where drafts are good, and trees of 8 nodes and depth 1 to 3 where they are
# not. This tree is a compromise between the two.
CPU_TREE = DraftTreeConfig(depth=4, top_k=3, total_tokens=8)


def default_tree(device: torch.device, published: DraftTreeConfig, deepest: int | None = None) -> DraftTreeConfig:
    """Returns the draft tree of heads for which no tree was ever chosen.

    Args:
        device: Device of the heads.
        published: The tree that the method's authors use. It is returned on accelerators, where verifying many nodes
            costs hardly more than verifying one.
        deepest: Number of draft positions the heads have; `None` if unlimited.
    """
    tree = CPU_TREE if device.type == "cpu" else published
    if deepest is None or tree.depth <= deepest:
        return tree
    return tree.replace(depth=deepest)


def machine_key(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Returns what a tuned tree is valid for: `machine`, `dtype`, and `threads` (`None` unless on a CPU)."""
    threads = torch.get_num_threads() if device.type == "cpu" else None
    return {"machine": device_name(device), "dtype": str(dtype).removeprefix("torch."), "threads": threads}


def tuned_tree(tuned: list[dict[str, Any]] | None, key: dict[str, Any]) -> DraftTreeConfig | None:
    """Returns the newest tree tuned for a machine, or `None` if there is none."""
    for entry in reversed(tuned or []):
        if all(entry.get(name) == value for name, value in key.items()):
            return DraftTreeConfig().replace(**entry["tree_config"])
    return None


def tuned_entry(
    key: dict[str, Any], tree: DraftTreeConfig, tokens_per_second: float, plain_tokens_per_second: float
) -> dict[str, Any]:
    """Returns an entry of `config.tuned`, which records a tuned tree and its measured speed on one machine."""
    return {
        **key,
        "tree_config": tree.to_dict(),
        "tokens_per_second": round(tokens_per_second, 2),
        "plain_tokens_per_second": round(plain_tokens_per_second, 2),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "torch": torch.__version__,
    }


def without_machine(tuned: list[dict[str, Any]] | None, key: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the entries of `config.tuned` that belong to other machines."""
    return [entry for entry in tuned or [] if any(entry.get(name) != value for name, value in key.items())]
