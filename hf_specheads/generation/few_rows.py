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
from typing import Any, cast

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
    product = linear(weight, rows.reshape(-1, rows.shape[-1])).t().contiguous()
    if bias is not None:
        product += bias
    return product.view(*rows.shape[:-1], -1)


def doubled(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same of a single row, taken twice: a product with two rows may be faster than one with a vector."""
    return turned(rows.reshape(1, -1).expand(2, -1), weight, bias)[:1].view(*rows.shape[:-1], -1)


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


class Ways(dict[int, Product]):
    """How products with weights of one size are computed, by the number of rows: a way, or a [`Trial`] of two."""

    def __missing__(self, rows: int) -> Product:
        alike = rows if rows <= EXACTLY else -(-rows // ALIKE) * ALIKE
        trial = Trial(doubled if rows == 1 else turned) if rows == alike else self[alike]
        return self.setdefault(rows, trial)

    def try_out(self, rows: int, trial: Trial, *product: Any) -> torch.Tensor:
        """Computes one of a number of rows of which it is not known yet."""
        result = trial(*product)
        if (verdict := trial.verdict) is not None:
            self[rows] = verdict
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
        plain = [] if any(map(is_compiled, modules)) else filter(_is_plain, modules)
        ways = _WAYS[torch.get_num_threads()]
        self.layers = {layer: ways[cast(torch.Tensor, layer.weight).shape] for layer in plain}
        self._ways = list({id(ways): ways for ways in self.layers.values()}.values())
        self._in_vain: set[int] = set()

    @contextmanager
    def at_work(self, rows: int, fewest: int) -> Iterator[None]:
        """Meanwhile forwards of this thread compute products of few rows as is faster.

        Args:
            rows: That most products have; where torch's own way is the faster for all layers, nothing is done.
            fewest: Rows that are computed so: two, where a single row is to be multiplied as plain decoding does.
        """
        if rows < fewest or rows in self._in_vain or not self.layers or not _begin():
            yield
            return
        _OF_THREAD.fewest, _OF_THREAD.layers = fewest, self.layers
        try:
            yield
        finally:
            _OF_THREAD.layers = _NONE
            _end()
        met = {ways.get(rows) for ways in self._ways} - {None}  # of the sizes that forwards of so many rows have
        if met == {linear}:
            self._in_vain.add(rows)


def _is_plain(layer: nn.Module) -> bool:
    if not has_plain_weight(layer) or "weight" not in layer._parameters:
        return False
    return layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32


_NONE: dict[nn.Module, Ways] = {}


class _OfThread(threading.local):
    layers = _NONE  # that compute so,
    fewest = 1  # products of so many rows or more


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
    # Called for every layer of every forward of a round: no attribute is looked up that is not needed.
    if torch.compiler.is_compiling() or (ways := _OF_THREAD.layers.get(self)) is None:
        return _TORCHS_OWN(self, input)
    parameters: Any = self._parameters
    product, rows = (input, parameters["weight"], parameters["bias"]), input.numel() // input.shape[-1]
    if not _OF_THREAD.fewest <= rows <= MOST_ROWS:
        return linear(*product)
    way = ways[rows]
    return ways.try_out(rows, way, *product) if type(way) is Trial else way(*product)
