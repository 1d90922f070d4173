"""Running means of the loss components, agreement with the target, tokens per second and use of the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from .devices.utilisation import count_operations
from .unroll.unroll import DEFAULT_LOSSES, PassLosses

T = TypeVar("T")


class AgreementMeter:
    """Counts of [`losses.agreement`] per draft position, over batches and processes."""

    def __init__(self, num_passes: int, device: torch.device | str):
        self.sums = torch.zeros(num_passes, 3, dtype=torch.float32, device=device)

    def drain(self) -> dict[str, float]:
        """`accuracy_i` and `acceptance_i` of draft position i, and what a chain would accept of them in a round,
        plus 1 (`expected_acceptance_length`); empty without rows. Starts anew."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.sums)
        counts = self.sums.tolist()
        self.sums.zero_()
        if not counts[0][2]:
            return {}
        shares = [(same / max(rows, 1), accepted / max(rows, 1)) for same, accepted, rows in counts]
        values = {f"accuracy_{i}": same for i, (same, _) in enumerate(shares, start=1)}
        values |= {f"acceptance_{i}": accepted for i, (_, accepted) in enumerate(shares, start=1)}
        length, reached = 1.0, 1.0
        for _, accepted in shares:
            reached *= accepted
            length += reached
        return values | {"expected_acceptance_length": length}


class Throughput:
    """Tokens per second between two entries of the log, evaluations left out, and how well the device is used.

    Args:
        peak: Operations per second the device can do; `None` if nobody knows.
    """

    def __init__(self, peak: float | None = None) -> None:
        self.tokens = torch.zeros((), dtype=torch.float32)
        self.peak = peak
        self._places, self._batches = 0, 0  # of tokens, padding included
        self._operations = 0.0  # of a place
        self._since: float | None = None
        self._paused = 0.0

    def of(self, batch: Mapping[str, torch.Tensor], work: Callable[[], T]) -> T:
        """Does the work of a batch, and counts it. Operations are counted in the second batch (what is compiled was
        compiled by then), and taken to be in proportion to the size of the others."""
        self.add(batch)
        self._batches += 1
        if self.peak is None or self._batches != 2:
            return work()
        result, operations = count_operations(work)
        self._operations = operations / batch["input_ids"].numel()
        return result

    def add(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Counts the tokens of a batch that is about to be trained on, padding left out."""
        if self._since is None:  # what came before the first step is no training
            self._since = time.perf_counter()
        real = batch.get("attention_mask", batch["input_ids"])
        self.tokens = self.tokens.to(real.device) + real.ne(0).sum()
        self._places += batch["input_ids"].numel()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here does not count."""
        started, counting = time.perf_counter(), self._since is not None
        yield
        if counting:  # an evaluation before the first step is not a part of any interval
            self._paused += time.perf_counter() - started

    def drain(self) -> dict[str, float]:
        """`tokens_per_second` of all processes; `mfu` and `peak_memory_gib` of this one's device, where known. Starts
        anew."""
        tokens = self.tokens.float()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(tokens)
        now = time.perf_counter()
        seconds = max(now - (now if self._since is None else self._since) - self._paused, 1e-9)
        values = {"tokens_per_second": round(float(tokens) / seconds, 1)}
        if self.peak is not None and self._operations:
            values["mfu"] = self._operations * self._places / (seconds * self.peak)
        self.tokens, self._places, self._since, self._paused = torch.zeros((), dtype=torch.float32), 0, now, 0.0
        if torch.cuda.is_available():
            values["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        return values


class LossMeter:
    """Sums of each loss component per draft position, over batches and processes.

    Attributes:
        steps: What to divide the sums by when they are read: optimizer steps, or rows.
    """

    def __init__(self, num_passes: int, device: torch.device | str, names: Sequence[str] = DEFAULT_LOSSES):
        self.names = list(names)
        self.seen: set[str] = set()
        self.sums = torch.zeros(num_passes, len(self.names), dtype=torch.float32, device=device)
        self.steps = 0
        self._marked = self.sums.clone()

    def add(self, position: int, losses: PassLosses) -> None:
        """Adds the losses of one pass."""
        self.seen |= set(losses.values)
        zero = self.sums.new_zeros(())
        self.sums[position] += torch.stack([losses.values.get(name, zero).detach().float() for name in self.names])

    def mark(self) -> None:
        """Remembers the sums, for [`roll_back`]."""
        self._marked = self.sums.clone()

    def roll_back(self) -> None:
        """Takes out what was added since [`mark`]: the losses of a step that is not taken."""
        self.sums.copy_(self._marked)

    def drain(self, per_step_of_all: bool = False) -> dict[str, float]:
        """Means since the last call, `feature_loss_1` first, summed over processes; starts anew.

        Args:
            per_step_of_all: Whether `steps` is summed over processes too (rows) or the same on all (optimizer steps).
        """
        steps = torch.tensor(float(self.steps), dtype=torch.float32, device=self.sums.device)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.sums)
            if per_step_of_all:
                dist.all_reduce(steps)
        # Others may have seen losses where this process had no batch.
        columns = zip(self.names, self.sums.T.tolist(), strict=True)
        seen = self.seen | {name for name, column in columns if any(column)}
        means = (self.sums / steps.clamp_min(1)).tolist()
        self.sums.zero_()
        self.steps = 0
        return {
            f"{name}_loss_{position}": mean
            for position, losses in enumerate(means, start=1)
            for name, mean in zip(self.names, losses, strict=True)
            if name in seen
        }
