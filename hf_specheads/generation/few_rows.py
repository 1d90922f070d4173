"""Linear layers of models on a CPU, where a few rows are multiplied with a weight.

Rows by the transposed weight, and the weight by the transposed rows, transposed back, are the same numbers. Which of
the two a library of matrix products computes sooner depends on the processor and the sizes. Where the first is slow, a
forward over a few nodes takes as long as several plain steps, and no draft pays, however good it is. So while a round
works, linear layers compute as is faster here: layers of one size take turns in both ways, are timed as they work, and
go on in the faster one. No weight is copied.

What plain decoding computes, a single row by the target's weights, is computed as ever. No model is changed: while the
forwards of a round run, torch's `nn.Linear` has a forward that looks whether it is called by their thread, and outside
of them its own.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections import defaultdict
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

    def compute(self, number: int, product: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
        """The product of a number of rows; arguments as of [`turned`]."""
        if number > EXACTLY:
            number = -(-number // ALIKE) * ALIKE
        way = self._by_rows.get(number)
        if way is None:
            way = self._by_rows.setdefault(number, Trial(doubled if number == 1 else turned))
        result = way(*product)
        if type(way) is Trial and (verdict := way.verdict) is not None:
            self._by_rows[number] = verdict
        return result


_WAYS: defaultdict[int, defaultdict[torch.Size, Ways]] = defaultdict(lambda: defaultdict(Ways))  # by threads and sizes


# ---------------------------------------------------------------------- in models
class FewRows:
    """Linear layers of models, which compute as is faster while these work on a round. None where somebody compiles
    what a model does, or has changed what linear layers do.

    Args:
        models: Target and heads.
    """

    def __init__(self, *models: nn.Module):
        modules = list(itertools.chain.from_iterable(model.modules() for model in models))
        self.may_help = any(map(_is_plain, modules)) and not any(map(is_compiled, modules))

    @contextmanager
    def at_work(self, fewest: int) -> Iterator[None]:
        """Meanwhile forwards of this thread compute products of so many rows or more as is faster: of two, where a
        single row is to be multiplied as plain decoding does."""
        if not self.may_help or not _begin():
            yield
            return
        _OF_THREAD.fewest, _OF_THREAD.ways = fewest, _WAYS[torch.get_num_threads()]
        try:
            yield
        finally:
            _OF_THREAD.fewest = MOST_ROWS + 1
            _end()


def _is_plain(layer: nn.Module) -> bool:
    return has_plain_weight(layer) and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32


class _OfThread(threading.local):
    fewest = MOST_ROWS + 1  # rows that are computed so
    ways: defaultdict[torch.Size, Ways]


_OF_THREAD, _LOCK, _TORCHS_OWN = _OfThread(), threading.Lock(), nn.Linear.forward
_at_work = 0  # threads


def _begin() -> bool:
    """Whether linear layers have our forward from now on."""
    global _at_work
    with _LOCK:
        if nn.Linear.forward not in (_TORCHS_OWN, _forward):
            return False
        _at_work += 1
        nn.Linear.forward = _forward  # type: ignore[method-assign, assignment]
    return True


def _end() -> None:
    global _at_work
    with _LOCK:
        _at_work -= 1
        if _at_work == 0 and nn.Linear.forward is _forward:
            nn.Linear.forward = _TORCHS_OWN  # type: ignore[method-assign]


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # so torch calls it
    weight, bias = self.weight, self.bias
    rows = input.numel() // max(input.shape[-1], 1)
    if _OF_THREAD.fewest <= rows <= MOST_ROWS and _is_plain(self):
        return _OF_THREAD.ways[weight.shape].compute(rows, (input, weight, bias))
    return linear(input, weight, bias)
