"""A frozen target whose layers are sharded over the processes (FSDP2 or ZeRO-3), while heads stay data-parallel.

Only the decoder layers are: embedding, final norm and `lm_head`, which heads and losses call by themselves, stay whole
on every process. Each layer is gathered for its own forward and freed after it, so all processes have to run the
target together. Generation, where a text decides how many forwards there are, is led by the first process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..arguments import DraftHeadTrainingArguments

T = TypeVar("T")


def sharding_problem(args: DraftHeadTrainingArguments, joint: bool) -> str | None:
    """Why a target cannot be sharded as asked, with the mend; `None` if it can."""
    if args.world_size <= 1:
        return "shard_target=True needs several processes; start them with `accelerate launch --num_processes N`."
    if joint:
        return "shard_target=True is for a frozen target, and an adapter of it is trained; set shard_target=False."
    if args.target_sharding == "zero3" and importlib.util.find_spec("deepspeed") is None:
        return "target_sharding='zero3' needs DeepSpeed; run `pip install deepspeed`, or leave it out (FSDP2)."
    return None


def shard_target(target: PreTrainedModel, args: DraftHeadTrainingArguments, joint: bool = False) -> int:
    """Shards the decoder layers of a target in place, one after the other; returns how many there are.

    Layers go to the process's device one by one, so that no device ever holds them all. A target that is sharded
    already stays as it is.

    Raises:
        ValueError: if it cannot be.
    """
    if (problem := sharding_problem(args, joint)) is not None:
        raise ValueError(problem)
    layers = decoder_layers(target, "set shard_target=False")
    if share_here(target) is None:
        shard = _sharder(args)
        for layer in layers:
            shard(layer)
    return len(layers)


def load_shares(
    load: Callable[[], PreTrainedModel],
    without_weights: Callable[[], PreTrainedModel],
    args: DraftHeadTrainingArguments,
) -> PreTrainedModel:
    """A sharded target of which only the first process reads the weights: it hands out layer after layer, and each
    process keeps its share of them.

    Args:
        load: The target on the processor, called by the first process.
        without_weights: The same architecture on the meta device, called by the others.
        args: Of the run.

    Raises:
        ValueError: on every process, if the first one cannot load the target, or the others cannot build it.
    """
    if (problem := sharding_problem(args, joint=False)) is not None:
        raise ValueError(problem)
    target, failed = None, None
    try:
        target = load() if dist.get_rank() == 0 else without_weights()
        _refuse_hidden_tensors(target)
    except Exception as error:  # told on all processes, which would wait for one another
        failed = error
    plan = _agree_on_a_plan(target, failed)
    assert target is not None
    target.eval().requires_grad_(False)
    shard = _sharder(args)
    names = {module: name for name, module in target.named_modules()}
    for layer in decoder_layers(target, "set shard_target=False"):
        _receive(target, [each for each in plan if each.name.startswith(f"{names[layer]}.")], args.device)
        shard(layer)
    _receive(target, [each for each in plan if not _is_sharded(_tensor(target, each.name))], args.device)
    return target


@dataclass(frozen=True)
class _Place:
    """A parameter or buffer of the target, as the first process has it; `same_as` another one where they are tied."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter: bool
    same_as: str | None


def _plan_of(target: PreTrainedModel) -> list[_Place]:
    first: dict[int, str] = {}
    places = []
    for kind, named in ((True, target.named_parameters), (False, target.named_buffers)):
        for name, tensor in named(remove_duplicate=False):
            known = first.setdefault(id(tensor), name)
            same = None if known == name else known
            places.append(_Place(name, tuple(tensor.shape), tensor.dtype, kind, same))
    return places


def _refuse_hidden_tensors(target: nn.Module) -> None:
    """What is neither parameter nor buffer would not be handed out."""
    for name, module in target.named_modules():
        hidden = [own for own, value in vars(module).items() if isinstance(value, torch.Tensor) and value.is_meta]
        if hidden:
            raise ValueError(
                f"{type(module).__name__} ({name}) keeps the tensors {hidden} beside its buffers; load the target "
                "whole, in Python, and hand it to `DraftHeadTrainer`."
            )


def _agree_on_a_plan(target: PreTrainedModel | None, failed: Exception | None) -> list[_Place]:
    """What the first process has to hand out; refused on all processes if one of them has failed."""
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, None if failed is None else " ".join(str(failed).split()))
    if (reason := next((reason for reason in reasons if reason is not None), None)) is not None:
        raise ValueError(f"the target cannot be loaded in shares: {reason}") from failed
    plans: list[Any] = [_plan_of(target) if target is not None and dist.get_rank() == 0 else None]
    dist.broadcast_object_list(plans, 0)
    return plans[0]


def _receive(target: PreTrainedModel, places: Sequence[_Place], device: torch.device) -> None:
    """Brings these tensors of the first process to the device of every process."""
    for place in places:
        if place.same_as is not None:
            _put(target, place, _tensor(target, place.same_as))
            continue
        tensor = _tensor(target, place.name).detach() if dist.get_rank() == 0 else None
        if tensor is None:
            tensor = torch.empty(place.shape, dtype=place.dtype, device=device)
        tensor = tensor.to(device).contiguous()
        dist.broadcast(tensor, 0)
        _put(target, place, nn.Parameter(tensor, requires_grad=False) if place.parameter else tensor)


def _tensor(target: nn.Module, name: str) -> torch.Tensor:
    owner, _, own = name.rpartition(".")
    return getattr(target.get_submodule(owner), own)


def _put(target: nn.Module, place: _Place, tensor: torch.Tensor) -> None:
    owner, _, own = place.name.rpartition(".")
    module = target.get_submodule(owner)
    (module._parameters if place.parameter else module._buffers)[own] = tensor  # type: ignore[assignment]


def _sharder(args: DraftHeadTrainingArguments) -> Callable[[nn.Module], Any]:
    """What shards a layer in place, so that it is gathered for its own forward and freed after it."""
    if args.target_sharding == "zero3":
        return _shard_by_deepspeed
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(args.device.type, (dist.get_world_size(),))
    return partial(fully_shard, mesh=mesh, reshard_after_forward=True)


def _shard_by_deepspeed(layer: nn.Module) -> None:
    """ZeRO-3, without an optimizer. An engine of its own for every layer: heads and losses call what is around the
    layers in another order than a forward does, which an engine of the whole target would take for a new model."""
    import deepspeed

    dtype = next(layer.parameters()).dtype
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16},
    }
    deepspeed.initialize(model=layer, config=config, dist_init_required=False)
    layer.eval()


def _is_sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_tensor")


def _sizes(parameter: torch.Tensor) -> tuple[int, int]:
    """Numbers of a sharded parameter on this process, and in all."""
    if isinstance(parameter, DTensor):
        return parameter.to_local().numel(), parameter.numel()
    return parameter.ds_tensor.numel(), parameter.ds_numel  # type: ignore[attr-defined]  # DeepSpeed's


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
    sizes = [_sizes(parameter) for parameter in target.parameters() if _is_sharded(parameter)]
    if not sizes:
        return None
    return sum(here for here, _ in sizes) / sum(whole for _, whole in sizes)
