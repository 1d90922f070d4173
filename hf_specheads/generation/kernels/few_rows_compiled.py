"""Compiled steps on a CPU: computes products of a few rows in the fastest of several ways ([`few_rows`]).

The ways are timed while a step is compiled, once per size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import library
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node
from torch.nn.functional import linear

from . import few_rows_native
from .few_rows import MOST_ROWS, TIMES, fastest, kernel_for
from .products import Product, product_of

# Ways are timed with weights that take turns, so that no cache holds them: about BYTES of them, at most MOST_WEIGHTS.
BYTES, MOST_WEIGHTS = 64 * 2**20, 256
MIDDLING = 8  # least number of rows assumed for a graph whose number of rows is not fixed
ROWS_FIRST, WEIGHT_FIRST, BY_KERNEL = range(3)  # the ways to compute a product
aten = torch.ops.aten


# ---------------------------------------------------------------------- the operator
NAME = "specheads::few_rows"
SCHEMA = "(Tensor rows, Tensor[] weights, Tensor?[] biases) -> Tensor[]"
library.define(NAME, SCHEMA, tags=torch.Tag.pt2_compliant_tag)


def few_rows(rows: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """Products of rows [M, K] with each weight [N, K], transposed, plus its bias [N] or `None`: [M, N] each, by the
    kernel if it is built."""
    # If another process has compiled the graph, this orders the kernel in the present one.
    kernels = [kernel_for(weight.shape, weight.dtype) for weight in weights]
    if kernels[0] is not None and all(kernels):
        return kernels[0].multiply(rows, weights, biases)
    return [linear(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


library.impl(NAME, "CPU", few_rows)


@library.register_fake(NAME)
def _(rows: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None]) -> list[torch.Tensor]:
    return [rows.new_empty(rows.shape[0], weight.shape[0]) for weight in weights]


class Into:
    """As [`few_rows`], but writes into existing products [M, N], for graphs whose weights the kernel supports. Once
    the kernel is built, its C function takes this object's place, because calling an operator through torch takes as
    long as a small product.

    Args:
        dtype: Dtype of rows and weights.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.name = dtype, f"into_{few_rows_native.KINDS[dtype]}"

    def __call__(
        self, rows: torch.Tensor, wide: torch.Tensor, many: int, inputs: int, weights: list[torch.Tensor],
        biases: list[torch.Tensor | None], products: list[torch.Tensor], outputs: tuple[int, ...],
    ) -> None:  # fmt: skip
        if (kernel := kernel_for(weights[0].shape, self.dtype)) is not None:
            setattr(torch.ops.specheads.few_rows, self.name, kernel.function)
            kernel.function(rows, wide, many, inputs, weights, biases, products, outputs)
            return
        for product, weight, bias in zip(products, weights, biases, strict=True):
            product.copy_(linear(rows, weight, bias))


def _write_call(node: Any, write: Callable[[str], None]) -> None:
    """Writes the call of [`Into`] for a node into the code of a graph."""
    sizes, name = V.graph.wrapper_code, node.get_name()
    source, *_ = node.inputs
    rows, weights, biases = node.codegen_args()
    (many, inputs), dtype = source.get_size(), source.get_dtype()
    outputs = [weight.get_size()[0] for weight in node.inputs[1 : 1 + len(node.outputs)]]

    def empty(columns: Any, dtype: torch.dtype) -> str:
        size, strides = map(sizes.codegen_python_shape_tuple, ((many, columns), (columns, 1)))
        return f"empty_strided_cpu({size}, {strides}, {dtype})"

    write(f"{name} = [{', '.join(empty(number, dtype) for number in outputs)}]")
    write(f"{name}_rows = {rows}.contiguous()")
    wide = f"{name}_rows" if dtype == torch.float32 else empty(inputs, torch.float32)
    numbers = sizes.codegen_python_shape_tuple((many, inputs))[1:-1]
    multiply = f"torch.ops.specheads.few_rows.into_{few_rows_native.KINDS[dtype]}"
    write(f"{multiply}({name}_rows, {wide}, {numbers}, {weights}, {biases}, {name}, {tuple(map(int, outputs))})")
    write(f"del {name}_rows")


for _into in map(Into, few_rows_native.KINDS):
    setattr(torch.ops.specheads.few_rows, _into.name, _into)
try:
    from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN, CustomCodegen
except ImportError:  # with older torch, graphs call the operator itself
    pass
else:
    CUSTOM_EXTERN_KERNEL_CODEGEN["torch.ops.specheads.few_rows.default"] = CustomCodegen(python=_write_call)


# ---------------------------------------------------------------------- in graphs
class FewRowsProducts(CustomGraphPass):
    """Rewrites graphs of inductor so that products of few rows are computed in the fastest way."""

    def __call__(self, graph: Graph) -> None:
        siblings: dict[Any, list[Product]] = {}
        for product in [found for node in graph.nodes if (found := product_of(node, _fits)) is not None]:
            by_kernel = few_rows_native.fits(*product.weight.meta["val"].shape)
            siblings.setdefault((*map(str, product.source), by_kernel), []).append(product)
        for group in siblings.values():
            weights = [product.weight.meta["val"] for product in group]
            sizes = tuple(tuple(weight.shape) for weight in weights)
            way = way_for(_rows_of(group[0].rows), sizes, weights[0].dtype, torch.get_num_threads())
            if way == BY_KERNEL:
                _replace(graph, group, _by_kernel)
            elif way == WEIGHT_FIRST:
                for product in group:
                    _replace(graph, [product], _turned)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, few_rows_native.__file__, str(few_rows_native.SOURCE)))


def _rows_of(rows: Node) -> int:
    """Number of rows; for a graph that steps of several sizes share, that of a middle-sized step."""
    size = rows.meta["val"].shape[0]
    return size if isinstance(size, int) else max(size.node.hint or 0, MIDDLING)


def _fits(rows: Node, weight: Node, bias: Node | None) -> bool:
    left, right = rows.meta.get("val"), weight.meta.get("val")
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)) or right.dim() != 2:
        return False
    alike = left.device.type == "cpu" and left.dtype == right.dtype and right.is_contiguous()
    known = all(isinstance(size, int) for size in right.shape) and _rows_of(rows) <= MOST_ROWS
    return alike and left.dtype in few_rows_native.KINDS and known and (bias is None or _is_row(bias))


def _is_row(bias: Node) -> bool:
    value = bias.meta["val"]
    return bool(value.dim() == 1 and value.is_contiguous())


def _replace(graph: Graph, group: list[Product], by: Callable[[Graph, list[Product]], list[Node]]) -> None:
    with graph.inserting_before(group[0].node):
        outputs = by(graph, group)
    for product, output in zip(group, outputs, strict=True):
        product.node.replace_all_uses_with(output)
        graph.erase_node(product.node)


def _turned(graph: Graph, group: list[Product]) -> list[Node]:
    (product,) = group
    rows, weight = product.rows.meta["val"], product.weight.meta["val"]
    columns = graph.call_function(aten.permute.default, (product.rows, [1, 0]))
    columns.meta["val"] = rows.t()
    turned = graph.call_function(aten.mm.default, (product.weight, columns))
    turned.meta["val"] = weight.new_empty((weight.shape[0], rows.shape[0]))
    output = graph.call_function(aten.permute.default, (turned, [1, 0]))
    output.meta["val"] = turned.meta["val"].t()
    if product.bias is not None:
        output = graph.call_function(aten.add.Tensor, (output, product.bias))
        output.meta["val"] = product.node.meta["val"]
    return [output]


def _by_kernel(graph: Graph, group: list[Product]) -> list[Node]:
    operands = group[0].rows, [product.weight for product in group], [product.bias for product in group]
    all_of_them = graph.call_function(torch.ops.specheads.few_rows.default, operands)
    all_of_them.meta["val"] = [product.node.meta["val"].contiguous() for product in group]
    outputs = [graph.call_function(getitem, (all_of_them, place)) for place in range(len(group))]
    for output, value in zip(outputs, all_of_them.meta["val"], strict=True):
        output.meta["val"] = value
    return outputs


# ---------------------------------------------------------------------- which is the fastest
Way = Callable[[torch.Tensor, list[torch.Tensor]], Any]


@cache
def way_for(rows: int, sizes: tuple[tuple[int, int], ...], dtype: torch.dtype, threads: int) -> int:
    """The fastest way in this process to multiply `rows` rows with weights of sizes (N, K) by this many threads."""
    numbers = sum(columns * width for columns, width in sizes)
    turns = min(max(BYTES // (dtype.itemsize * numbers), 1), MOST_WEIGHTS)
    with unset_fake_temporarily(), torch.no_grad():  # the compiler's fake tensors have no data to time with
        some = torch.ones(rows, sizes[0][1], dtype=dtype)
        weights = [[torch.ones(size, dtype=dtype) for size in sizes] for _ in range(turns)]
        ways = _ways(weights[0])
        seconds: list[list[float]] = [[] for _ in ways]
        for turn in range(2 * TIMES * len(ways)):
            these, way = weights[turn % turns], turn % len(ways)
            began = time.perf_counter()
            ways[way](some, these)
            seconds[way].append(time.perf_counter() - began)
    return fastest([spent[len(spent) // 5 :] for spent in seconds])


def _ways(weights: list[torch.Tensor]) -> list[Way]:
    ways: list[Way] = [
        lambda rows, weights: [torch.mm(rows, weight.t()) for weight in weights],
        lambda rows, weights: [torch.mm(weight, rows.t()).t() for weight in weights],
    ]
    for weight in weights:
        kernel_for(weight.shape, weight.dtype)
    few_rows_native.WORKSHOP.wait()
    if all(kernel_for(weight.shape, weight.dtype) is not None for weight in weights):
        ways.append(lambda rows, weights: few_rows(rows, weights, [None] * len(weights)))
    return ways


@contextmanager
def few_rows_products() -> Iterator[None]:
    """While this lasts, inductor applies [`FewRowsProducts`], unless the user has set a pass of their own."""
    settings = torch._inductor.config
    if settings.post_grad_custom_pre_pass is not None:
        yield
        return
    with settings.patch(post_grad_custom_pre_pass=FewRowsProducts()):
        yield
