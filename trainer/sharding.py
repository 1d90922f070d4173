"""A frozen target whose layers are sharded over the processes (FSDP2), while heads stay data-parallel.

Only the decoder layers are: embedding, final norm and `lm_head`, which heads and losses call by themselves, stay whole
on every process. Each layer is gathered for its own forward and freed after it, so all processes have to run the
target together.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .arguments import DraftHeadTrainingArguments


def sharding_problem(args: DraftHeadTrainingArguments, joint: bool) -> str | None:
    """Why a target cannot be sharded as asked, with the mend; `None` if it can."""
    if args.world_size <= 1:
        return "shard_target=True needs several processes; start them with `accelerate launch --num_processes N`."
    if joint:
        return "shard_target=True is for a frozen target, and an adapter of it is trained; set shard_target=False."
    if args.eval_acceptance_prompts:
        return (
            "with shard_target=True the processes cannot generate apart, as the evaluation of acceptance does; set "
            "eval_acceptance_prompts=0, and measure with `specheads eval`."
        )
    return None


def shard_target(target: PreTrainedModel, args: DraftHeadTrainingArguments, joint: bool = False) -> int:
    """Shards the decoder layers of a target in place; returns how many there are.

    Raises:
        ValueError: if it cannot be.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if (problem := sharding_problem(args, joint)) is not None:
        raise ValueError(problem)
    layers = getattr(target.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{type(target).__name__} keeps its decoder layers where nobody knows, so they cannot be sharded; set "
            "shard_target=False."
        )
    mesh = init_device_mesh(args.device.type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return len(layers)


def share_here(target: nn.Module) -> float | None:
    """Share of the sharded weights that lies on this process; `None` for a target that is whole."""
    sharded = [parameter for parameter in target.parameters() if isinstance(parameter, DTensor)]
    if not sharded:
        return None
    return sum(parameter.to_local().numel() for parameter in sharded) / sum(p.numel() for p in sharded)
