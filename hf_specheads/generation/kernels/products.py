"""Compiled steps on CUDA: products of the same few rows with several weights are computed by one kernel.

A forward over a tree takes as long as reading the weights. A product of a few rows with one small weight ends before
the device reads at full speed: the queries, keys and values of a layer, computed one after the other, take twice as
long as one product with as many columns. Stacking the weights in memory would cost a copy of them; a kernel that gets
all of them as arguments needs none. The kernel is used where it is faster on this device than torch's own products,
which is measured once per shape while a step is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import library
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node

from .attention import HAS_TRITON

DEVICES = ("cuda",)
MOST_ROWS = 64  # products of more rows are left to torch
MOST_WEIGHTS = 3  # weights of one kernel: of queries, keys and values
LARGEST = 256 * 2**20  # bytes of the largest weight for the kernel; larger ones are read at full speed in any case
aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_TRANSPOSES = ((aten.t.default,), (aten.permute.default, [1, 0]))  # operators with their further arguments


# ---------------------------------------------------------------------- the operator
SCHEMA = "(Tensor rows, Tensor[] weights, int[] how) -> Tensor[]"


@library.custom_op("specheads::products", mutates_args=(), schema=SCHEMA)
def products(rows: torch.Tensor, weights: list[torch.Tensor], how: list[int]) -> list[torch.Tensor]:
    """Products of rows [M, K] with each weight [N, K], transposed: [M, N] each. `how` has the fields of
    [`products_triton.How`]."""
    if rows.device.type != "cuda":
        return [rows @ weight.t() for weight in weights]
    from .products_triton import How, launch

    outputs = [rows.new_empty(len(rows), len(weight)) for weight in weights]
    launch(rows.contiguous(), weights, outputs, How(*how))
    return outputs


@products.register_fake
def _(rows: torch.Tensor, weights: list[torch.Tensor], how: list[int]) -> list[torch.Tensor]:
    return [rows.new_empty(rows.shape[0], weight.shape[0]) for weight in weights]


# ---------------------------------------------------------------------- finding products in a graph
@dataclass(frozen=True)
class Product:
    """A product in a graph: `node` is `rows` [M, K] by `weight` [N, K], transposed, plus `bias` [N] if present."""

    node: Node
    rows: Node
    weight: Node
    bias: Node | None

    @property
    def source(self) -> tuple[Node, tuple[int, ...]]:
        """What the rows are a view of, and their shape; products with the same source read the same rows."""
        source: Any = self.rows
        while source.op == "call_function" and (source.target in _VIEWS or _cuts_nothing(source)):
            source = source.args[0]
        return source, tuple(self.rows.meta["val"].shape)


def _cuts_nothing(node: Node) -> bool:
    """Whether a node is a slice of the whole tensor, as a slice of the last row is if there is a single row."""
    if node.target is not aten.slice.Tensor:
        return False
    whole: Any = node.args[0]
    return bool(node.meta["val"].shape == whole.meta["val"].shape)


class OneKernelForSiblings(CustomGraphPass):
    """Rewrites graphs of inductor so that one kernel computes products of the same rows, where that is faster."""

    def __call__(self, graph: Graph) -> None:
        siblings: dict[Any, list[Product]] = {}
        for node in graph.nodes:
            if (product := product_of(node, _fits)) is not None:
                siblings.setdefault(product.source, []).append(product)
        for alike in siblings.values():
            for first in range(0, len(alike), MOST_WEIGHTS):
                group = alike[first : first + MOST_WEIGHTS]
                if (how := how_it_pays(*_case_of(group))) is not None:
                    _replace(graph, group, how)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, str(Path(__file__).with_name("products_triton.py"))))


def product_of(node: Node, fits: Callable[[Node, Node, Node | None], bool]) -> Product | None:
    """The product that a node computes; `None` if it is none or does not fit. Weights must be inputs of the graph, so
    that they precede all other nodes.

    Args:
        node: Node of an inductor graph, after autograd.
        fits: Whether rows, weight and bias are of the kind that is looked for.
    """
    if node.op != "call_function" or node.kwargs:
        return None
    args: list[Any] = list(node.args)
    if node.target is aten.mm.default:
        args = [None, *args]
    elif node.target is not aten.addmm.default:
        return None
    bias, rows, transposed = args
    if transposed.op != "call_function" or (transposed.target, *transposed.args[1:]) not in _TRANSPOSES:
        return None
    weight = transposed.args[0]
    inputs = [weight] if bias is None else [weight, bias]
    if any(one.op not in ("placeholder", "get_attr") for one in inputs) or not fits(rows, weight, bias):
        return None
    return Product(node, rows, weight, bias)


def _fits(rows: Node, weight: Node, bias: Node | None) -> bool:
    left, right = rows.meta.get("val"), weight.meta.get("val")
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)) or left.device.type not in DEVICES:
        return False
    sizes = (*left.shape, *right.shape)
    if right.dim() != 2 or not all(isinstance(size, int) for size in sizes) or not right.is_contiguous():
        return False
    if bias is not None and tuple(bias.meta["val"].shape) != (sizes[2],):
        return False
    small = sizes[0] <= MOST_ROWS and right.nbytes <= LARGEST
    return small and left.dtype == right.dtype and left.dtype.itemsize == 2


def _case_of(group: list[Product]) -> tuple[torch.device, torch.dtype, int, int, tuple[int, ...]]:
    rows = group[0].rows.meta["val"]
    return rows.device, rows.dtype, *rows.shape, tuple(len(one.weight.meta["val"]) for one in group)


def _replace(graph: Graph, group: list[Product], how: list[int]) -> None:
    first, weights = group[0], [one.weight for one in group]
    with graph.inserting_before(first.node):
        all_of_them = graph.call_function(products._opoverload, (first.rows, weights, how))
        all_of_them.meta["val"] = [one.node.meta["val"] for one in group]
        for place, one in enumerate(group):
            output = graph.call_function(getitem, (all_of_them, place))
            output.meta["val"] = one.node.meta["val"]
            if one.bias is not None:
                output = graph.call_function(aten.add.Tensor, (output, one.bias))
                output.meta["val"] = one.node.meta["val"]
            one.node.replace_all_uses_with(output)
    for one in group:
        graph.erase_node(one.node)


# ---------------------------------------------------------------------- whether it pays
def how_it_pays(
    device: torch.device, dtype: torch.dtype, rows: int, width: int, columns: tuple[int, ...]
) -> list[int] | None:
    """Fields of the fastest [`products_triton.How`]; `None` if torch's own products are as fast on this device."""
    from .products_triton import quickest

    try:
        with unset_fake_temporarily():  # the compiler's fake tensors have no data to time with
            how = quickest(device, dtype, rows, width, columns)
    except torch.OutOfMemoryError:
        return None
    return None if how is None else list(astuple(how))


@contextmanager
def one_kernel_for_siblings() -> Iterator[None]:
    """While this lasts, inductor applies [`OneKernelForSiblings`], if there are a CUDA device (not ROCm) and Triton,
    and the user has not set a pass of their own."""
    settings = torch._inductor.config
    able = torch.cuda.is_available() and torch.version.hip is None and HAS_TRITON
    if not able or settings.post_grad_custom_pre_pass is not None:
        yield
        return
    with settings.patch(post_grad_custom_pre_pass=OneKernelForSiblings()):
        yield
