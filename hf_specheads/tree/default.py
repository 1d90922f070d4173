"""Facts about machines that decide which draft tree heads use when nobody says.

The choice depends on where the heads lie, never on a measurement in passing: the same call grows the same trees.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import torch

from ..provenance import device_name
from .config import DraftTreeConfig

# On a CPU every verified node past the first few costs time (docs/tuning.md). The fastest trees measured for the
# shipped heads were chains of 4 to 8 where drafts are good, and 8 nodes of depth 1 to 3 where they are not; this lies
# between.
CPU_TREE = DraftTreeConfig(depth=4, top_k=3, total_tokens=8)


def default_tree(device: torch.device, published: DraftTreeConfig, deepest: int | None = None) -> DraftTreeConfig:
    """The tree of heads for which none was ever chosen.

    Args:
        device: Where the heads are.
        published: What the method's authors use, on accelerators, where verifying many nodes costs hardly more than
            one.
        deepest: Draft positions the heads have, `None` without limit.
    """
    tree = CPU_TREE if device.type == "cpu" else published
    if deepest is None or tree.depth <= deepest:
        return tree
    return tree.replace(depth=deepest)


def machine_key(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What a tuned tree is for: `machine`, `dtype`, and on a CPU the `threads`."""
    threads = torch.get_num_threads() if device.type == "cpu" else None
    return {"machine": device_name(device), "dtype": str(dtype).removeprefix("torch."), "threads": threads}


def tuned_tree(tuned: list[dict[str, Any]] | None, key: dict[str, Any]) -> DraftTreeConfig | None:
    """The tree tuned for a machine, `None` if there is none."""
    for entry in reversed(tuned or []):
        if all(entry.get(name) == value for name, value in key.items()):
            return DraftTreeConfig().replace(**entry["tree_config"])
    return None


def tuned_entry(
    key: dict[str, Any], tree: DraftTreeConfig, tokens_per_second: float, plain_tokens_per_second: float
) -> dict[str, Any]:
    """What is saved with heads about a tree that is fast on a machine: an entry of `config.tuned`."""
    return {
        **key,
        "tree_config": tree.to_dict(),
        "tokens_per_second": round(tokens_per_second, 2),
        "plain_tokens_per_second": round(plain_tokens_per_second, 2),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "torch": torch.__version__,
    }


def without_machine(tuned: list[dict[str, Any]] | None, key: dict[str, Any]) -> list[dict[str, Any]]:
    """The tuned trees of other machines."""
    return [entry for entry in tuned or [] if any(entry.get(name) != value for name, value in key.items())]
