"""Statistics of a `generate` call: accepted tokens per round, acceptance length, pos-acc. Defined only here."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from .tree.draft_tree import DraftTree

NOT_TIMED: AbstractContextManager[None] = nullcontext()


def devices_of(*models: torch.nn.Module) -> tuple[torch.device, ...]:
    """Devices that hold weights of the models, each once."""
    return tuple({weight.device: None for model in models for weight in model.parameters()})


def wait_for(devices: Iterable[torch.device]) -> None:
    """Waits until the devices have finished their queued work, so that timing on the host includes it."""
    for device in devices:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)


def acceptance_length(num_accepted: list[list[int]]) -> float:
    """tau: mean number of accepted draft tokens per round **plus the bonus token**; 0.0 without rounds."""
    rounds = [n for row in num_accepted for n in row]
    return sum(n + 1 for n in rounds) / len(rounds) if rounds else 0.0


def position_acceptance(num_accepted: list[list[int]], offered: list[list[int]]) -> list[float]:
    """pos-acc(i) = P(draft position i accepted | all earlier ones accepted), position 1 first (PosS, section 3).

    A round counts for position i if it drafted that deep (`offered`) and accepted the first i - 1 positions.

    Args:
        num_accepted: Number of accepted draft tokens, per batch row and round.
        offered: Number of draft positions that could have been accepted, per batch row and round (fewer near the
            length limit).
    """
    pairs = [(n, d) for row, depth in zip(num_accepted, offered, strict=True) for n, d in zip(row, depth, strict=True)]
    deepest = max((d for _, d in pairs), default=0)
    result = []
    for position in range(1, deepest + 1):
        reached = [n for n, d in pairs if d >= position and n >= position - 1]
        if not reached:
            break
        result.append(sum(n >= position for n in reached) / len(reached))
    return result


@dataclass
class GenerationStats:
    """Statistics of one `generate` call.

    Attributes:
        num_accepted: Per batch row, the number of accepted draft tokens of each round (bonus token not counted).
        offered: Per batch row, the number of draft positions that each round could have accepted.
        plain_steps: Number of forwards over a single token, taken between rounds when drafting does not pay
            (`heads.adaptive`). They are not rounds, so the numbers above do not include them.
        plain_because: Reason for the plain steps, in one sentence; `None` without plain steps.
        new_tokens: Tokens emitted, averaged over the sequences of a batch.
        target_forwards: Forwards of the target, including the prefill but not the probe.
        probe_seconds: Wall seconds of probing the target (`heads.probe`), in the first call of a process.
        draft_forwards: Forwards of the draft head's specialists that computed outputs.
        host_syncs: Number of times the engine made the host wait for the device: to read what was accepted, and in
            draws that check their distribution. Waits of the call's logits processors and stopping criteria, which
            plain `generate` has as well, and waits due to `heads.profile` are not counted.
        lossy: Whether the text may differ from what the target alone would have generated (typical acceptance with
            `do_sample=True`); otherwise it has exactly the target's distribution.
        seconds: Wall seconds by stage, filled if `heads.profile` is set: `prefill`, `draft`, `target`, `total`, ...
        trees: The draft tree of every round, on the CPU, if `heads.trace` is set.
        profile: Whether stages are timed.
        devices: Devices of the target and the heads; when profiling, every stage waits for them.
    """

    num_accepted: list[list[int]] = field(default_factory=list)
    offered: list[list[int]] = field(default_factory=list)
    plain_steps: int = 0
    plain_because: str | None = None
    new_tokens: float = 0.0
    target_forwards: int = 0
    probe_seconds: float = 0.0
    draft_forwards: int = 0
    host_syncs: int = 0
    lossy: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    trees: list[DraftTree] = field(default_factory=list)
    profile: bool = False
    devices: tuple[torch.device, ...] = ()

    @property
    def rounds(self) -> int:
        """Number of rounds of the batch row with the most rounds."""
        return max((len(row) for row in self.num_accepted), default=0)

    @property
    def acceptance_length(self) -> float:
        """tau, including the bonus token."""
        return acceptance_length(self.num_accepted)

    @property
    def tokens_per_forward(self) -> float:
        """New tokens of a sequence per target forward, prefill and plain steps included; 0.0 without forwards."""
        return self.new_tokens / self.target_forwards if self.target_forwards else 0.0

    @property
    def pos_acc(self) -> list[float]:
        """Conditional acceptance per draft position (pos-acc), position 1 first; see [`position_acceptance`]."""
        return position_acceptance(self.num_accepted, self.offered)

    def record_round(self, row: int, num_accepted: int, offered: int) -> None:
        """Records one verified round of one batch row."""
        while len(self.num_accepted) <= row:
            self.num_accepted.append([])
            self.offered.append([])
        self.num_accepted[row].append(num_accepted)
        self.offered[row].append(offered)

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Context manager that, when profiling, adds a block's wall time to `seconds[name]`, device work included."""
        return self._timed(name) if self.profile else NOT_TIMED

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        wait_for(self.devices)
        started = time.perf_counter()
        try:
            yield
        finally:
            wait_for(self.devices)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
