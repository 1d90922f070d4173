"""Makes linear layers on a CPU fast where a few rows are multiplied with a weight.

Libraries of matrix products are made for one row or for many. Where they are slow with a few rows, a forward over a
few nodes takes as long as several plain steps, and no draft pays, however good it is. There are other ways to compute
the same numbers: a kernel made for few rows ([`few_rows_native`]) and, in float32, the product of the weight with the
transposed rows, transposed back. So during a round, linear layers of one size try all ways in turn, time them as they
work, and then stay with the fastest one. No weight is copied.

What plain decoding computes, a single row by the target's weights, is computed as always. No model is changed: while
the forwards of a round run, torch's `nn.Linear` has a forward that treats calls from the round's thread specially.
Afterwards it has its own forward again.
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

MOST_ROWS = 128  # products of more rows are left to torch
EXACTLY = 2  # up to this many rows, every number of rows is timed separately
ALIKE, FEW, OF_MANY = 4, 16, 16  # numbers of rows are rounded up to a multiple of ALIKE, beyond FEW rows of OF_MANY
# Every way is timed TIMES times before the medians are compared, but hopeless ways are dropped after GLANCES times.
TIMES, GLANCES = 5, 2
HOPELESS = 1.3  # a way this many times as slow as the fastest one is dropped
FASTER = 1.05  # another way is taken only if torch's own way is more than this many times as slow
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


# ---------------------------------------------------------------------- all ways
def turned(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes `linear` of rows [..., K] and a weight [N, K] as the weight times the transposed rows; contiguous."""
    product = linear(weight, rows.reshape(-1, rows.shape[-1])).t().contiguous()
    if bias is not None:
        product += bias
    return product.view(*rows.shape[:-1], -1)


def doubled(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes [`turned`] of a single row by doubling it: a product with two rows may be faster than with a vector."""
    return turned(rows.reshape(1, -1).expand(2, -1), weight, bias)[:1].view(*rows.shape[:-1], -1)


def other_ways(rows: int, size: torch.Size, dtype: torch.dtype) -> list[Product]:
    """Ways other than torch's own to multiply this many rows with a weight of this size."""
    ways: list[Product] = []
    if dtype == torch.float32:
        ways.append(doubled if rows == 1 else turned)
    kernel = kernel_for(size, dtype)
    return ways if kernel is None else [*ways, kernel]


def kernel_for(size: torch.Size, dtype: torch.dtype) -> few_rows_native.Kernel | None:
    """The native kernel for such weights; `None` if it does not fit them or is not built yet. Once it is built, all
    trials begin anew."""
    return few_rows_native.WORKSHOP.order(dtype, _begin_anew) if few_rows_native.fits(*size) else None


class Trial:
    """Ways of computing products of one size, while it is not known which of them is the fastest.

    Args:
        others: Ways other than torch's own, which is always tried.
    """

    def __init__(self, *others: Product):
        self.ways: tuple[Product, ...] = (linear, *others)
        self.seconds: list[list[float]] = [[] for _ in self.ways]

    def __call__(self, *product: Any) -> torch.Tensor:
        """Computes a product by the way that was timed least often, and times it."""
        way = min(self._hopeful(), key=lambda one: len(self.seconds[one]))
        began = time.perf_counter()
        result = self.ways[way](*product)
        self.seconds[way].append(time.perf_counter() - began)
        return result

    @property
    def least(self) -> float:
        """Shortest time of a product so far, in seconds."""
        return min(itertools.chain.from_iterable(self.seconds))

    @property
    def verdict(self) -> Product | None:
        """The fastest way; `None` while it is not known. The trial is short where the ways' times are far apart."""
        hopeful = self._hopeful()
        if len(hopeful) == 1:
            return self.ways[hopeful[0]]
        if min(len(self.seconds[way]) for way in hopeful) < TIMES:
            return None
        return self.ways[fastest(self.seconds)]

    def _hopeful(self) -> list[int]:
        """Ways that may still be the fastest, by their shortest times: a stall never makes a way look faster."""
        if min(map(len, self.seconds)) < GLANCES:
            return list(range(len(self.ways)))
        least = [min(spent) for spent in self.seconds]
        return [way for way, seconds in enumerate(least) if seconds <= HOPELESS * min(least)]


def fastest(seconds: Sequence[Sequence[float]]) -> int:
    """Index of the fastest way by median time. Another way than the first must be clearly faster to be chosen."""
    own, *others = map(statistics.median, seconds)
    return 1 + others.index(min(others)) if own > FASTER * min(others) else 0


class Ways(dict[int, Product]):
    """How products with weights of one size are computed, by number of rows: a way, or a [`Trial`] of several.

    Args:
        size, dtype: Size and dtype of the weights.
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
        """Computes a product by a trial, and ends the trial if it has a verdict."""
        began = time.perf_counter()
        result = trial(*product)
        if (verdict := trial.verdict) is not None:
            self[rows] = verdict
        _OF_THREAD.lost += time.perf_counter() - began - trial.least
        return result


_WAYS: dict[tuple[int, torch.Size, torch.dtype], Ways] = {}  # by number of threads, size and dtype
_begun = 0  # how often all trials began anew


def _ways_of(weight: torch.Tensor, threads: int) -> Ways:
    size = weight.shape, weight.dtype
    known = _WAYS.get((threads, *size))
    return _WAYS.setdefault((threads, *size), Ways(*size)) if known is None else known


def _begin_anew() -> None:
    """Begins all trials anew, as a kernel was built that is another way to compute."""
    global _begun
    for ways in list(_WAYS.values()):
        ways.clear()
    _begun += 1


# ---------------------------------------------------------------------- in models
class FewRows:
    """The linear layers of models, which compute in the fastest way during a round. There are none if a model is
    compiled; layers whose weight is not plain are left out.

    Args:
        models: Target and draft head.
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
            kernel_for(ways.size, ways.dtype)  # orders the kernel, which is built while the prompt is read
        self._begun = _begun

    @contextmanager
    def at_work(self, rows: int, fewest: int) -> Iterator[None]:
        """While this lasts, forwards of this thread compute products of few rows in the fastest way.

        Args:
            rows: Rows that most products have. Nothing is done if torch's own way is the fastest for all layers, or if
                somebody else has replaced the forward of `nn.Linear`.
            fewest: Fewest rows that are computed so; 2 if a single row must be multiplied as plain decoding does.
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
        """Notes whether all trials of products of this many rows have ended, and whether torch's way always won."""
        met = {ways.get(rows) for ways in self._ways} - {None}  # only the sizes that occurred with this many rows
        if met == {linear}:
            self._in_vain.add(rows)
        elif met and not any(type(way) is Trial for way in met):
            self._settled.add(rows)

    def take_lost(self) -> float:
        """Seconds lost to timing slower ways since this was last called. Callers deduct them from a round's time, as
        trees would otherwise seem more expensive during trials than they are later."""
        lost, self._lost = self._lost, 0.0
        return lost


def _is_plain(layer: nn.Module) -> bool:
    if not has_plain_weight(layer) or (weight := layer._parameters.get("weight")) is None:
        return False
    return weight.is_cpu and weight.dtype in few_rows_native.KINDS


_NONE: dict[nn.Module, Ways] = {}


class _OfThread(threading.local):
    layers = _NONE  # layers that compute in the fastest way in this thread
    fewest = 1  # fewest rows of a product for that
    lost = 0.0  # seconds lost to timing slower ways


_OF_THREAD, _LOCK, _TORCHS_OWN = _OfThread(), threading.Lock(), nn.Linear.forward
_at_work = 0  # threads that use our forward now


def _begin() -> bool:
    """Gives `nn.Linear` our forward; returns `False` if somebody else has replaced its forward."""
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


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # the name that torch uses
    # This runs for every layer of every forward of a round, so it looks up no attribute that is not needed.
    if torch.compiler.is_compiling() or (ways := _OF_THREAD.layers.get(self)) is None:
        return _TORCHS_OWN(self, input)
    parameters: Any = self._parameters
    product, rows = (input, parameters["weight"], parameters["bias"]), input.numel() // input.shape[-1]
    if not _OF_THREAD.fewest <= rows <= MOST_ROWS:
        return linear(*product)
    way = ways[rows]
    return ways.try_out(rows, way, *product) if type(way) is Trial else way(*product)
