"""Cooperation of several processes: sums gradients in buckets, and waits for the process that prepares data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments

BUCKET_BYTES = 32 * 2**20
LONGEST_WAIT = timedelta(days=2)  # tokenizing may take longer than the default timeout of collectives


def sum_gradients(parameters: Iterable[nn.Parameter], processes: int) -> None:
    """Sums gradients over processes, bucket by bucket; a parameter without a gradient on this process counts as 0."""
    if processes <= 1:
        return
    grads = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grads.append(parameter.grad)
    pending = []
    for bucket in _buckets(grads):
        flat = torch.cat([grad.flatten() for grad in bucket])
        pending.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        if len(pending) > 1:  # limits the extra memory to two buckets
            _take_in(*pending.pop(0))
    for waiting in pending:
        _take_in(*waiting)


def _buckets(grads: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields groups of gradients of one dtype with at most `BUCKET_BYTES`; a larger gradient is a group of its own."""
    bucket: list[torch.Tensor] = []
    size = 0
    for grad in grads:
        if bucket and (size + grad.nbytes > BUCKET_BYTES or grad.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.nbytes
    if bucket:
        yield bucket


def _take_in(bucket: list[torch.Tensor], flat: torch.Tensor, work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
    for grad, summed in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
        grad.copy_(summed.view_as(grad))


@contextmanager
def first_process_first(args: TrainingArguments) -> Iterator[None]:
    """Runs the context on the first process of every machine before the others, which then find the work in the cache
    of `datasets`.

    Processes wait on a process group of their own, so that no collective of the training times out meanwhile.
    """
    if args.world_size <= 1:
        yield
        return
    group = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
    first = args.local_process_index == 0
    if not first:
        dist.barrier(group)
    try:
        yield
    finally:
        if first:
            dist.barrier(group)


def refuse_sharding(trainer: Trainer) -> None:
    """Refuses FSDP and DeepSpeed for draft heads, and several devices in one process.

    Raises:
        ValueError: for any of these, saying what to do instead.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            "draft heads are a few layers and are trained data-parallel; FSDP and DeepSpeed are not supported. "
            "Launch without them (for a large target, set shard_target=True, or load it with `device_map`)."
        )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"{trainer.args.n_gpu} devices are visible to one process; start one process per device with "
            "`accelerate launch`, or make a single device visible to it."
        )
