"""Compiled steps on a CPU: a graph's C++ kernels are compiled in as few files as there are cores, not in a file each.

Inductor gives every kernel a file and a library of its own. Most of what one costs goes into headers, the same for
all, and into linking.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch._inductor import async_compile as tasks
from torch._inductor.codecache import CppPythonBindingsCodeCache, LambdaFuture
from transformers.utils import logging

logger = logging.get_logger(__name__)

# What inductor writes of a kernel: one function, with nothing before it that another kernel might write as well.
_FUNCTION = re.compile(
    r'\s*#include <torch/csrc/inductor/cpp_prefix\.h>\s*extern "C"\s+void\s+kernel\((?P<rest>.*)', re.DOTALL
)
# Of a file as a whole: what stands inside the namespaces below finds these headers already read.
_HEADERS = """#include <torch/csrc/inductor/cpp_prefix.h>
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sstream>
#include <cstdlib>
#include <cerrno>
"""
Kernel = tuple[tuple[str, ...], str]  # types of its arguments, source


@contextmanager
def kernels_in_few_files() -> Iterator[None]:
    """Graphs compiled meanwhile have their kernels so."""
    known = tasks.AsyncCompile.cpp_pybinding
    if hasattr(known, "one_each"):
        yield
        return
    tasks.AsyncCompile.cpp_pybinding = _collecting(known)  # type: ignore[method-assign]
    try:
        yield
    finally:
        tasks.AsyncCompile.cpp_pybinding = known  # type: ignore[method-assign]


def _collecting(one_each: Callable) -> Callable:
    def cpp_pybinding(self: tasks.AsyncCompile, argtypes: list[str], source_code: str) -> Any:
        if tasks.get_compile_threads() <= 1 or not _FUNCTION.fullmatch(source_code):
            return one_each(self, argtypes, source_code)
        waiting: KernelFiles | None = vars(self).get("kernel_files")
        if waiting is None or waiting.functions is not None:
            waiting = self.kernel_files = KernelFiles(self, one_each)  # type: ignore[attr-defined]
        kernel = tuple(argtypes), source_code
        waiting.kernels.append(kernel)
        return LambdaFuture(lambda: waiting.function(kernel))

    cpp_pybinding.one_each = one_each  # type: ignore[attr-defined]
    return cpp_pybinding


@dataclass
class KernelFiles:
    """The kernels of one graph, which are compiled when the first is asked for: by then inductor has named them all.

    Args:
        compiler: Of the graph.
        one_each: How it compiles one alone.
        kernels: In order.
        functions: Once compiled.
    """

    compiler: tasks.AsyncCompile
    one_each: Callable
    kernels: list[Kernel] = field(default_factory=list)
    functions: dict[Kernel, Callable] | None = None

    def function(self, kernel: Kernel) -> Callable:
        """A kernel, compiled."""
        if self.functions is None:
            self.functions = self._together() or self._alone(self.kernels)
        return self.functions[kernel]

    def _together(self) -> dict[Kernel, Callable] | None:
        """`None` where that fails: alone they may do, or say what is wrong."""
        shares = shared_out(self.kernels, tasks.get_compile_threads())
        alone = [share[0] for share in shares if len(share) == 1]
        try:
            begun = [(share, _begun(share, self.compiler)) for share in shares if len(share) > 1]
            functions = self._alone(alone)
            for share, library in begun:
                functions |= zip(share, library().functions, strict=True)
        except Exception as error:
            logger.debug("kernels are compiled in a file each: %s", error)
            return None
        return functions

    def _alone(self, kernels: list[Kernel]) -> dict[Kernel, Callable]:
        futures = {kernel: self.one_each(self.compiler, list(kernel[0]), kernel[1]) for kernel in kernels}
        return {kernel: future.result() for kernel, future in futures.items()}


def shared_out(kernels: list[Kernel], most: int) -> list[list[Kernel]]:
    """Kernels in at most so many files of about the same length; the same whenever the kernels are."""
    shares: list[list[Kernel]] = [[] for _ in range(min(most, len(kernels)))]
    for kernel in sorted(kernels, key=lambda kernel: -len(kernel[1])):
        min(shares, key=lambda share: sum(len(source) for _, source in share)).append(kernel)
    return shares


def source_of(kernels: list[Kernel]) -> str:
    """One file of several kernels: each with its Python bindings, as torch writes them, in a namespace of its own."""
    bindings, spaces = CppPythonBindingsCodeCache, [_HEADERS]
    for index, (argtypes, source) in enumerate(kernels):
        name, function = f"kernel_{index}", _FUNCTION.fullmatch(source)
        parsed = ", ".join(f"parse_arg<{kind.replace('const ', '')}>(args, {n})" for n, kind in enumerate(argtypes))
        call = f"{name}({parsed}); Py_RETURN_NONE;"
        suffix = bindings.suffix_template.format(
            arg_len=len(argtypes), call_entry_func=call, entry_func=name, extra_parse_arg=""
        )
        rest = function["rest"]  # type: ignore[index]
        spaces.append(f"namespace of_{name} {{\nstatic void {name}({rest}\n{suffix}\n}}\n")
    return "".join(spaces)


def _begun(kernels: list[Kernel], compiler: tasks.AsyncCompile) -> Callable[[], Any]:
    """Begins to compile a file, and what waits for it."""
    reader: Any = type(f"FileOf{len(kernels)}", (_File,), {"count": len(kernels)})
    return reader.load_async(source_of(kernels), submit_fn=compiler.submit)


class _File(CppPythonBindingsCodeCache):
    """A library of several kernels, each of which is a Python module."""

    cache: dict[str, Callable[[], Any]] = {}
    count = 0

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> Any:
        modules = []
        for name in (f"kernel_{index}" for index in range(cls.count)):
            one: Any = type(name, (CppPythonBindingsCodeCache,), {"entry_function": name})
            modules.append((one._load_library_inner(path, key), name))
        return SimpleNamespace(functions=[getattr(module, name) for module, name in modules])
