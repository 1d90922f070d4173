"""Shards the layers of a frozen target over processes (FSDP2 or ZeRO-3), while draft heads stay data-parallel.

Only decoder layers are sharded. Embedding, final norm and `lm_head` stay whole on every process, because draft heads
and losses call them directly. Each layer is gathered for its own forward and freed after it, so all processes have to
run the target together. Generation, whose number of forwards depends on the text, is led by the first process.
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
    """Returns why a target cannot be sharded as requested, and what to do about it; `None` if it can be."""
    if args.world_size <= 1:
        return "shard_target=True needs several processes; start them with `accelerate launch --num_processes N`."
    if joint:
        return "shard_target=True is for a frozen target, and an adapter of it is trained; set shard_target=False."
    if args.target_sharding == "zero3" and importlib.util.find_spec("deepspeed") is None:
        return "target_sharding='zero3' needs DeepSpeed; run `pip install deepspeed`, or leave it out (FSDP2)."
    return None


def shard_target(target: PreTrainedModel, args: DraftHeadTrainingArguments, joint: bool = False) -> int:
    """Shards the decoder layers of a target in place, and returns their number.

    Layers go to the process's device one by one, so that no device ever holds all of them. A target that is already
    sharded stays as it is.

    Raises:
        ValueError: if the target cannot be sharded.
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
    """Loads a sharded target. Only the first process reads the weights; it broadcasts layer after layer, and each
    process keeps its share.

    Args:
        load: Loads the target onto the CPU; called by the first process.
        without_weights: Builds the same architecture on the meta device; called by the other processes.
        args: Training arguments of the run.

    Raises:
        ValueError: on every process, if the first one cannot load the target or another one cannot build it.
    """
    if (problem := sharding_problem(args, joint=False)) is not None:
        raise ValueError(problem)
    target, failed = None, None
    try:
        target = load() if dist.get_rank() == 0 else without_weights()
        _refuse_hidden_tensors(target)
    except Exception as error:  # raised on all processes below; otherwise the others would wait forever
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
    """A parameter or buffer of the target on the first process; `same_as` names another tensor that it is tied to."""

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
    """Refuses tensors that are neither parameters nor buffers, because the first process would not broadcast them."""
    for name, module in target.named_modules():
        hidden = [own for own, value in vars(module).items() if isinstance(value, torch.Tensor) and value.is_meta]
        if hidden:
            raise ValueError(
                f"{type(module).__name__} ({name}) keeps the tensors {hidden} outside of its parameters and buffers, "
                "so other processes would not receive them; load the whole target in Python, and pass it to "
                "`DraftHeadTrainer`."
            )


def _agree_on_a_plan(target: PreTrainedModel | None, failed: Exception | None) -> list[_Place]:
    """Returns the list of tensors that the first process broadcasts; raises on all processes if one has failed."""
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, None if failed is None else " ".join(str(failed).split()))
    if (reason := next((reason for reason in reasons if reason is not None), None)) is not None:
        raise ValueError(f"the target cannot be loaded in shares: {reason}") from failed
    plans: list[Any] = [_plan_of(target) if target is not None and dist.get_rank() == 0 else None]
    dist.broadcast_object_list(plans, 0)
    return plans[0]


def _receive(target: PreTrainedModel, places: Sequence[_Place], device: torch.device) -> None:
    """Broadcasts tensors of the first process to the device of every process."""
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
    """Returns a function that shards a layer in place, to be gathered for its own forward and freed after it."""
    if args.target_sharding == "zero3":
        return _shard_by_deepspeed
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(args.device.type, (dist.get_world_size(),))
    return partial(fully_shard, mesh=mesh, reshard_after_forward=True)


def _shard_by_deepspeed(layer: nn.Module) -> None:
    """Shards a layer by ZeRO-3, without an optimizer. Every layer gets an engine of its own: draft heads and losses
    call the modules around the layers in another order than a forward does, which would confuse an engine of the
    whole target."""
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
    """Returns the number of elements of a sharded parameter on this process and in total."""
    if isinstance(parameter, DTensor):
        return parameter.to_local().numel(), parameter.numel()
    return parameter.ds_tensor.numel(), parameter.ds_numel  # type: ignore[attr-defined]  # DeepSpeed's


def decoder_layers(target: PreTrainedModel, mend: str) -> nn.ModuleList:
    """Returns the target's decoder layers.

    Args:
        target: Any decoder-only model.
        mend: Advice for the error message if the layers cannot be found.

    Raises:
        ValueError: if the layers cannot be found.
    """
    layers = getattr(target.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{type(target).__name__} keeps its decoder layers elsewhere than in `get_decoder().layers`; {mend}."
        )
    return layers


def led_by_the_first(target: PreTrainedModel, work: Callable[[], T]) -> T:
    """Runs `work` on the first process, while the others take part in every forward of the sharded target.

    Gathering a layer does not depend on the input of its forward, so the other processes run a single token. Before
    every forward the first process tells them to take part, so they stay in step whatever `work` does.

    Args:
        target: Target sharded by [`shard_target`].
        work: Function that calls the target any number of times. Its result must be picklable.

    Returns:
        The result of the first process, on all processes.
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
    """Yields the batches of this process; when they are used up, takes part in the forwards of the other processes.

    Args:
        batches: Batches, each of which causes one forward of the target.
        target: Target sharded by [`shard_target`].
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
    """Returns the share of the sharded weights that lies on this process; `None` for a target that is not sharded."""
    sizes = [_sizes(parameter) for parameter in target.parameters() if _is_sharded(parameter)]
    if not sizes:
        return None
    return sum(here for here, _ in sizes) / sum(whole for _, whole in sizes)
