"""Compiled steps on a CPU: products of a few rows with weights, by the weight times the transposed rows where that is
faster ([`few_rows`]). Which it is, is timed while a step is compiled, once for every size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node

from .few_rows import FASTER, MOST_ROWS, TIMES
from .products import Product, product_of

BYTES, MOST_WEIGHTS = 64 * 2**20, 16  # of weights that take turns, which no cache should hold, and how many these are
aten = torch.ops.aten


class TurnedProducts(CustomGraphPass):
    """Rewrites graphs of inductor so."""

    def __call__(self, graph: Graph) -> None:
        found = [product for node in graph.nodes if (product := product_of(node, _fits)) is not None]
        for product in found:
            weight = product.weight.meta["val"]
            if pays(_rows_of(product.rows), *weight.shape, torch.get_num_threads()):
                _turn(graph, product)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _rows_of(rows: Node) -> int:
    """How many rows there are; where steps of several sizes share a graph, in the first of them."""
    size = rows.meta["val"].shape[0]
    return size if isinstance(size, int) else size.node.hint or 0


def _fits(rows: Node, weight: Node, bias: Node | None) -> bool:
    left, right = rows.meta.get("val"), weight.meta.get("val")
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)) or right.dim() != 2:
        return False
    alike = left.device.type == "cpu" and left.dtype == right.dtype == torch.float32 and right.is_contiguous()
    known = all(isinstance(size, int) for size in right.shape) and 1 < _rows_of(rows) <= MOST_ROWS
    return alike and known and (bias is None or bias.meta["val"].dim() == 1)


def _turn(graph: Graph, product: Product) -> None:
    rows, weight = product.rows.meta["val"], product.weight.meta["val"]
    with graph.inserting_before(product.node):
        columns = graph.call_function(aten.permute.default, (product.rows, [1, 0]))
        columns.meta["val"] = rows.t()
        turned = graph.call_function(aten.mm.default, (product.weight, columns))
        turned.meta["val"] = weight.new_empty((weight.shape[0], rows.shape[0]))
        output = graph.call_function(aten.permute.default, (turned, [1, 0]))
        output.meta["val"] = turned.meta["val"].t()
        if product.bias is not None:
            output = graph.call_function(aten.add.Tensor, (output, product.bias))
            output.meta["val"] = product.node.meta["val"]
    product.node.replace_all_uses_with(output)
    graph.erase_node(product.node)


@cache
def pays(rows: int, columns: int, width: int, threads: int) -> bool:
    """Whether rows [M, K] by weights [N, K] are multiplied sooner like that, in this process with so many threads."""
    number = min(max(BYTES // (4 * columns * width), 1), MOST_WEIGHTS)
    with unset_fake_temporarily(), torch.no_grad():  # the compiler's tensors have no numbers
        some = torch.ones(rows, width, dtype=torch.float32)
        weights = [torch.ones(columns, width, dtype=torch.float32) for _ in range(number)]
        seconds: tuple[list[float], list[float]] = ([], [])
        for turn in range(4 * TIMES):
            weight, way = weights[turn % number], turn % 2
            began = time.perf_counter()
            torch.mm(weight, some.t()) if way else torch.mm(some, weight.t())
            seconds[way].append(time.perf_counter() - began)
    own, other = (statistics.median(spent[len(spent) // 5 :]) for spent in seconds)
    return own > FASTER * other


@contextmanager
def turned_products() -> Iterator[None]:
    """While this lasts, inductor compiles graphs so, unless the user has a pass of his own."""
    settings = torch._inductor.config
    if settings.post_grad_custom_pre_pass is not None:
        yield
        return
    with settings.patch(post_grad_custom_pre_pass=TurnedProducts()):
        yield
