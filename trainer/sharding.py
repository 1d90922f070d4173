"""A frozen target whose layers are sharded over the processes (FSDP2), while heads stay data-parallel.

Only the decoder layers are: embedding, final norm and `lm_head`, which heads and losses call by themselves, stay whole
on every process. Each layer is gathered for its own forward and freed after it, so all processes have to run the
target together. Generation, where a text decides how many forwards there are, is led by the first process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .arguments import DraftHeadTrainingArguments

T = TypeVar("T")


def sharding_problem(args: DraftHeadTrainingArguments, joint: bool) -> str | None:
    """Why a target cannot be sharded as asked, with the mend; `None` if it can."""
    if args.world_size <= 1:
        return "shard_target=True needs several processes; start them with `accelerate launch --num_processes N`."
    if joint:
        return "shard_target=True is for a frozen target, and an adapter of it is trained; set shard_target=False."
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
    layers = decoder_layers(target, "set shard_target=False")
    mesh = init_device_mesh(args.device.type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return len(layers)


def decoder_layers(target: PreTrainedModel, mend: str) -> nn.ModuleList:
    """The target's decoder layers.

    Args:
        target: Any decoder-only model.
        mend: What to do where nobody finds them.

    Raises:
        ValueError: there.
    """
    layers = getattr(target.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(target).__name__} keeps its decoder layers where nobody knows; {mend}.")
    return layers


def led_by_the_first(target: PreTrainedModel, work: Callable[[], T]) -> T:
    """Runs `work` on the first process, while the others take part in every forward that a sharded target makes.

    What a process gathers of a layer does not depend on what it computes with it, so the others run one token. They
    cannot get out of step, whatever `work` does.

    Args:
        target: Sharded by [`shard_target`].
        work: Calls the target any number of times; its result can be pickled.

    Returns:
        The first process's result, on all of them.
    """
    decoder = target.get_decoder()
    told = torch.zeros((), dtype=torch.int32, device=target.get_input_embeddings().weight.device)
    result: list[Any] = [None]
    if dist.get_rank() == 0:
        hook = decoder.register_forward_pre_hook(lambda *_: dist.broadcast(told.fill_(1), 0), prepend=True)
        try:
            result[0] = work()
        finally:
            hook.remove()
            dist.broadcast(told.fill_(0), 0)
    else:
        dist.broadcast(told, 0)
        while told.item():
            _take_part(target)
            dist.broadcast(told, 0)
    dist.broadcast_object_list(result, 0)
    return result[0]


def in_step(batches: Iterable[T], target: PreTrainedModel) -> Iterator[T]:
    """The batches of this process; where others have more of them, it takes part in their forwards.

    Args:
        batches: Each of which makes one forward of the target.
        target: Sharded by [`shard_target`].
    """
    remaining = iter(batches)
    left = torch.zeros((), dtype=torch.int32, device=target.get_input_embeddings().weight.device)
    while True:
        batch = next(remaining, None)
        dist.all_reduce(left.fill_(batch is not None), op=dist.ReduceOp.MAX)
        if batch is not None:
            yield batch
        elif left.item():
            _take_part(target)
        else:
            return


@torch.no_grad()
def _take_part(target: PreTrainedModel) -> None:
    """Gathers every layer once, as a forward on another process does."""
    device = target.get_input_embeddings().weight.device
    target.get_decoder()(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)


def share_here(target: nn.Module) -> float | None:
    """Share of the sharded weights that lies on this process; `None` for a target that is whole."""
    sharded = [parameter for parameter in target.parameters() if isinstance(parameter, DTensor)]
    if not sharded:
        return None
    return sum(parameter.to_local().numel() for parameter in sharded) / sum(p.numel() for p in sharded)
