"""Linear layers of models on a CPU, where a few rows are multiplied with a weight.

Libraries of matrix products are made for one row or for many. Where they are slow with a few, a forward over a few
nodes takes as long as several plain steps, and no draft pays, however good it is. There are other ways to the same
numbers: a kernel made for few rows ([`few_rows_native`]), and, in float32, the weight by the transposed rows,
transposed back. So while a round works, linear layers compute as is faster here: layers of one size take turns in all
ways there are, are timed as they work, and go on in the fastest one. No weight is copied.

What plain decoding computes, a single row by the target's weights, is computed as ever. No model is changed: while the
forwards of a round run, torch's `nn.Linear` has a forward that looks whether it is called by their thread, and outside
of them its own.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import linear

from ...target.projection import has_plain_weight
from . import few_rows_native
from .unrecorded import is_compiled

MOST_ROWS = 128
EXACTLY = 2  # rows up to which every number is timed by itself
ALIKE, FEW, OF_MANY = 4, 16, 16  # of more so many numbers count as one, of more than few so many
TIMES, GLANCES = 5, 2  # that every way is timed, of which the median tells; that are enough of a way that is
HOPELESS = 1.3  # times slower than another
FASTER = 1.05  # by which factor another way than torch's must be, to be taken
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


# ---------------------------------------------------------------------- all ways
def turned(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `linear`, rows [..., K] by a weight [N, K], by the weight times the transposed rows; contiguous."""
    product = linear(weight, rows.reshape(-1, rows.shape[-1])).t().contiguous()
    if bias is not None:
        product += bias
    return product.view(*rows.shape[:-1], -1)


def doubled(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same of a single row, taken twice: a product with two rows may be faster than one with a vector."""
    return turned(rows.reshape(1, -1).expand(2, -1), weight, bias)[:1].view(*rows.shape[:-1], -1)


def other_ways(rows: int, size: torch.Size, dtype: torch.dtype) -> list[Product]:
    """Than torch's own, to multiply so many rows with a weight."""
    ways: list[Product] = []
    if dtype == torch.float32:
        ways.append(doubled if rows == 1 else turned)
    kernel = kernel_for(size, dtype)
    return ways if kernel is None else [*ways, kernel]


def kernel_for(size: torch.Size, dtype: torch.dtype) -> few_rows_native.Kernel | None:
    """That of few rows with such weights, if it is built and multiplies them; all is tried again once it is built."""
    return few_rows_native.WORKSHOP.order(dtype, _begin_anew) if few_rows_native.fits(*size) else None


class Trial:
    """Ways of computing products of one size, as long as it is not known which is the fastest.

    Args:
        others: Than torch's own.
    """

    def __init__(self, *others: Product):
        self.ways: tuple[Product, ...] = (linear, *others)
        self.seconds: list[list[float]] = [[] for _ in self.ways]

    def __call__(self, *product: Any) -> torch.Tensor:
        """Computes one by the way that was timed least often."""
        way = min(self._hopeful(), key=lambda one: len(self.seconds[one]))
        began = time.perf_counter()
        result = self.ways[way](*product)
        self.seconds[way].append(time.perf_counter() - began)
        return result

    @property
    def least(self) -> float:
        """Seconds that a product takes by what is known."""
        return min(itertools.chain.from_iterable(self.seconds))

    @property
    def verdict(self) -> Product | None:
        """The fastest way; `None` while that is not known. It is short where ways are far apart."""
        hopeful = self._hopeful()
        if len(hopeful) == 1:
            return self.ways[hopeful[0]]
        if min(len(self.seconds[way]) for way in hopeful) < TIMES:
            return None
        return self.ways[fastest(self.seconds)]

    def _hopeful(self) -> list[int]:
        """Ways that may be the fastest; a stall makes none faster than it is."""
        if min(map(len, self.seconds)) < GLANCES:
            return list(range(len(self.ways)))
        least = [min(spent) for spent in self.seconds]
        return [way for way, seconds in enumerate(least) if seconds <= HOPELESS * min(least)]


def fastest(seconds: Sequence[Sequence[float]]) -> int:
    """Which of several ways it is by what they took, where another than the first must be clearly faster."""
    own, *others = map(statistics.median, seconds)
    return 1 + others.index(min(others)) if own > FASTER * min(others) else 0


class Ways(dict[int, Product]):
    """How products with weights of one size are computed, by the number of rows: a way, or a [`Trial`] of several.

    Args:
        size, dtype: The weights'.
    """

    def __init__(self, size: torch.Size, dtype: torch.dtype):
        super().__init__()
        self.size, self.dtype = size, dtype

    def __missing__(self, rows: int) -> Product:
        step = ALIKE if rows <= FEW else OF_MANY
        alike = rows if rows <= EXACTLY else -(-rows // step) * step
        if rows != alike:
            return self.setdefault(rows, self[alike])
        others = other_ways(rows, self.size, self.dtype)
        return self.setdefault(rows, Trial(*others) if others else linear)

    def try_out(self, rows: int, trial: Trial, *product: Any) -> torch.Tensor:
        """Computes one of a number of rows of which it is not known yet."""
        began = time.perf_counter()
        result = trial(*product)
        if (verdict := trial.verdict) is not None:
            self[rows] = verdict
        _OF_THREAD.lost += time.perf_counter() - began - trial.least
        return result


_WAYS: dict[tuple[int, torch.Size, torch.dtype], Ways] = {}  # by threads, sizes and dtypes
_begun = 0  # times that all was tried from the beginning


def _ways_of(weight: torch.Tensor, threads: int) -> Ways:
    size = weight.shape, weight.dtype
    known = _WAYS.get((threads, *size))
    return _WAYS.setdefault((threads, *size), Ways(*size)) if known is None else known


def _begin_anew() -> None:
    """There is another way, of which nothing is known: a kernel was built."""
    global _begun
    for ways in list(_WAYS.values()):
        ways.clear()
    _begun += 1


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
        threads = torch.get_num_threads()
        self.layers = {layer: _ways_of(cast(torch.Tensor, layer._parameters["weight"]), threads) for layer in plain}
        self._ways = list({id(ways): ways for ways in self.layers.values()}.values())
        self._in_vain: set[int] = set()
        self._settled: set[int] = set()
        self._lost = 0.0
        for ways in self._ways:
            kernel_for(ways.size, ways.dtype)  # is built while the prompt is read
        self._begun = _begun

    @contextmanager
    def at_work(self, rows: int, fewest: int) -> Iterator[None]:
        """Meanwhile forwards of this thread compute products of few rows as is faster.

        Args:
            rows: That most products have; where torch's own way is the faster for all layers, nothing is done.
            fewest: Rows that are computed so: two, where a single row is to be multiplied as plain decoding does.
        """
        if self._begun != _begun:
            self._begun = _begun
            self._in_vain.clear()
            self._settled.clear()
        if rows < fewest or rows in self._in_vain or not self.layers or not _begin():
            yield
            return
        _OF_THREAD.fewest, _OF_THREAD.layers, _OF_THREAD.lost = fewest, self.layers, 0.0
        try:
            yield
        finally:
            _OF_THREAD.layers = _NONE
            self._lost += _OF_THREAD.lost
            _end()
        if rows not in self._settled:
            self._settle(rows)

    def _settle(self, rows: int) -> None:
        """Looks whether all is known of products of so many rows."""
        met = {ways.get(rows) for ways in self._ways} - {None}  # of the sizes that forwards of so many rows have
        if met == {linear}:
            self._in_vain.add(rows)
        elif met and not any(type(way) is Trial for way in met):
            self._settled.add(rows)

    def take_lost(self) -> float:
        """Seconds that products took longer since the last call than they will, as slower ways were timed: while they
        are, trees of a size would seem dearer than they are."""
        lost, self._lost = self._lost, 0.0
        return lost


def _is_plain(layer: nn.Module) -> bool:
    if not has_plain_weight(layer) or (weight := layer._parameters.get("weight")) is None:
        return False
    return weight.is_cpu and weight.dtype in few_rows_native.KINDS


_NONE: dict[nn.Module, Ways] = {}


class _OfThread(threading.local):
    layers = _NONE  # that compute so,
    fewest = 1  # products of so many rows or more,
    lost = 0.0  # and took so many seconds longer than they will


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
