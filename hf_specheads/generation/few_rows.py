"""Linear layers of models on a CPU, where a few rows are multiplied with a weight.

Rows by the transposed weight, and the weight by the transposed rows, transposed back, are the same numbers. Which of
the two a library of matrix products computes sooner depends on the processor and the sizes. Where the first is slow, a
forward over a few nodes takes as long as several plain steps, and no draft pays, however good it is. So while a round
works, linear layers compute as is faster here: layers of one size take turns in both ways, are timed as they work, and
go on in the faster one. No weight is copied.

What plain decoding computes, a single row by the target's weights, is computed as ever. Models are as they were
outside the forwards of rounds, and in other threads at all times.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ..target.projection import has_plain_weight
from .unrecorded import is_compiled

MOST_ROWS = 128
EXACTLY, ALIKE = 16, 8  # rows up to which every number is timed by itself; of more, so many numbers count as one
TIMES = 5  # that either way is timed, of which the median tells
FASTER = 1.05  # by which factor the other way must be, to be taken
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


# ---------------------------------------------------------------------- both ways
def turned(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `linear`, rows [..., K] by a weight [N, K], by the weight times the transposed rows; contiguous."""
    columns = rows.reshape(-1, rows.shape[-1]).t()
    product = torch.mm(weight, columns) if bias is None else torch.addmm(bias[:, None], weight, columns)
    return product.t().contiguous().view(*rows.shape[:-1], len(weight))


def doubled(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same of a single row, taken twice: a product with two rows may be faster than one with a vector."""
    return turned(rows.reshape(1, -1).expand(2, -1), weight, bias)[:1].view(*rows.shape[:-1], len(weight))


class Trial:
    """Two ways of computing products of one size, as long as it is not known which is faster.

    Args:
        other: Than torch's own.
    """

    def __init__(self, other: Product):
        self.ways: tuple[Product, Product] = (linear, other)
        self.seconds: tuple[list[float], list[float]] = ([], [])

    def __call__(self, *product: Any) -> torch.Tensor:
        """Computes one by the way that was timed less often."""
        way = int(len(self.seconds[1]) < len(self.seconds[0]))
        began = time.perf_counter()
        result = self.ways[way](*product)
        self.seconds[way].append(time.perf_counter() - began)
        return result

    @property
    def verdict(self) -> Product | None:
        """The faster way; `None` while that is not known."""
        if min(map(len, self.seconds)) < TIMES:
            return None
        own, other = map(statistics.median, self.seconds)
        return self.ways[own > FASTER * other]


class Ways:
    """How products with weights of one size are computed, by the number of rows."""

    def __init__(self) -> None:
        self._by_rows: dict[int, Product] = {}

    def compute(
        self, number: int, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The product of a number of rows, as [`turned`]."""
        if number > EXACTLY:
            number = -(-number // ALIKE) * ALIKE
        way = self._by_rows.get(number)
        if way is None:
            way = self._by_rows.setdefault(number, Trial(doubled if number == 1 else turned))
        result = way(rows, weight, bias)
        if type(way) is Trial and (verdict := way.verdict) is not None:
            self._by_rows[number] = verdict
        return result


_WAYS: dict[tuple[int, ...], Ways] = {}  # by sizes of the weight, and threads


# ---------------------------------------------------------------------- in models
class FewRows:
    """Linear layers of models, which compute as is faster while these work on a round. None where somebody compiles
    what a model does.

    Args:
        models: Target and heads.
    """

    def __init__(self, *models: nn.Module):
        modules = list(dict.fromkeys(itertools.chain.from_iterable(model.modules() for model in models)))
        plain = [] if any(map(is_compiled, modules)) else filter(_is_plain, modules)
        self.forwards = [(layer.__dict__, _forward_of(layer)) for layer in plain]

    @contextmanager
    def at_work(self, fewest: int) -> Iterator[None]:
        """Meanwhile forwards of this thread compute products of so many rows or more as is faster: of two, where a
        single row is to be multiplied as plain decoding does."""
        _OF_THREAD.fewest = fewest
        for layer, forward in self.forwards:
            layer["forward"] = forward
        try:
            yield
        finally:
            _OF_THREAD.fewest = MOST_ROWS + 1
            for layer, _ in self.forwards:
                layer.pop("forward", None)


class _OfThread(threading.local):
    fewest = MOST_ROWS + 1  # rows that are computed so


_OF_THREAD = _OfThread()


def _is_plain(layer: nn.Module) -> bool:
    own = layer.__dict__.get("forward")  # of another thread's round, or somebody's
    if not has_plain_weight(layer) or not (own is None or hasattr(own, "_few_rows")):
        return False
    return layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32


def _forward_of(layer: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    parameters: dict[str, Any] = layer._parameters
    key = (*parameters["weight"].shape, torch.get_num_threads())
    ways = _WAYS.setdefault(key, Ways())

    def forward(rows: torch.Tensor) -> torch.Tensor:
        number = rows.numel() // rows.shape[-1]
        if _OF_THREAD.fewest <= number <= MOST_ROWS:
            return ways.compute(number, rows, parameters["weight"], parameters["bias"])
        return linear(rows, parameters["weight"], parameters["bias"])

    forward._few_rows = True  # type: ignore[attr-defined]
    return forward
