"""Targets whose layers are spread over processes, which must all take the same decisions."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


def parallel_group(target: PreTrainedModel) -> torch.distributed.ProcessGroup | None:
    """Returns the group of processes that share a tensor-parallel target; `None` for a target in one process."""
    mesh = getattr(target, "_device_mesh", None)
    if mesh is None or not torch.distributed.is_initialized():
        return None
    mesh = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh
    return mesh.get_group() if mesh.size() > 1 else None


def number_of_first(number: int, group: torch.distributed.ProcessGroup, device: torch.device) -> int:
    """Returns the number of the group's first process, which all processes follow since their clocks differ."""
    told = torch.tensor([number], dtype=torch.int64, device=device)
    torch.distributed.broadcast(told, group=group, group_src=0)
    return int(told)
