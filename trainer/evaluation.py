"""Meters of loss components, agreement with the target, tokens per second and device utilisation."""

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
    """Sums of [`losses.agreement`] per draft position, over batches and processes."""

    def __init__(self, num_passes: int, device: torch.device | str):
        self.sums = torch.zeros(num_passes, 3, dtype=torch.float32, device=device)

    def drain(self) -> dict[str, float]:
        """Returns `accuracy_i` and `acceptance_i` of each draft position i, and `expected_acceptance_length`: 1 plus
        the draft tokens that a chain would have accepted per round. Empty without rows. Resets the sums."""
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
    """Measures tokens per second between two log entries, evaluations excluded, and device utilisation.

    Args:
        peak: Peak operations per second of the device; `None` if unknown.
    """

    def __init__(self, peak: float | None = None) -> None:
        self.tokens = torch.zeros((), dtype=torch.float32)
        self.peak = peak
        self._places, self._batches = 0, 0  # `_places` counts token positions, padding included
        self._operations = 0.0  # operations per token position
        self._since: float | None = None
        self._paused = 0.0

    def of(self, batch: Mapping[str, torch.Tensor], work: Callable[[], T]) -> T:
        """Runs the work of a batch, and counts its tokens. Operations are counted in the second batch only, when
        compilation is over; other batches are assumed to need operations in proportion to their size."""
        self.add(batch)
        self._batches += 1
        if self.peak is None or self._batches != 2:
            return work()
        result, operations = count_operations(work)
        self._operations = operations / batch["input_ids"].numel()
        return result

    def add(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Counts the tokens of a batch that is about to be trained on, padding excluded."""
        if self._since is None:  # the clock starts with the first step, not with loading
            self._since = time.perf_counter()
        real = batch.get("attention_mask", batch["input_ids"])
        self.tokens = self.tokens.to(real.device) + real.ne(0).sum()
        self._places += batch["input_ids"].numel()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time spent inside the context."""
        started, counting = time.perf_counter(), self._since is not None
        yield
        if counting:  # an evaluation before the first step belongs to no interval
            self._paused += time.perf_counter() - started

    def drain(self) -> dict[str, float]:
        """Returns `tokens_per_second` of all processes and, where known, `mfu` and `peak_memory_gib` of the device of
        this process. Resets the counts."""
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
        steps: Divisor of the sums in [`drain`]: optimizer steps, or rows.
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
        """Saves the current sums for [`roll_back`]."""
        self._marked = self.sums.clone()

    def roll_back(self) -> None:
        """Removes what was added since [`mark`], because the step is skipped."""
        self.sums.copy_(self._marked)

    def drain(self, per_step_of_all: bool = False) -> dict[str, float]:
        """Returns the mean losses since the last call, e.g. `feature_loss_1`, summed over processes; resets the sums.

        Args:
            per_step_of_all: Whether `steps` counts rows and is summed over processes too, instead of optimizer steps,
                which are the same on all processes.
        """
        steps = torch.tensor(float(self.steps), dtype=torch.float32, device=self.sums.device)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self.sums)
            if per_step_of_all:
                dist.all_reduce(steps)
        # Other processes may have seen losses while this process had no batch.
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
