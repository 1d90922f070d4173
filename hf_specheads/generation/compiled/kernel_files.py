"""Compiles a graph's C++ kernels on a CPU in as few files as there are compile threads, not in a file each.

Inductor gives every kernel a file and a library of its own. Most of their cost is in reading headers, which are the
same for all, and in linking.
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

# Source of a kernel as inductor writes it: a single function, with no other definition that might clash in one file.
_FUNCTION = re.compile(
    r'\s*#include <torch/csrc/inductor/cpp_prefix\.h>\s*extern "C"\s+void\s+kernel\((?P<rest>.*)', re.DOTALL
)
# Headers of a file. They must be included here, outside of the namespaces that the kernels are put into.
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
    """While this lasts, graphs are compiled with their kernels in few files."""
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
    """The kernels of one graph. All are compiled when the first is asked for: by then inductor has listed them all.

    Args:
        compiler: Inductor's compiler of the graph.
        one_each: Inductor's own method, which compiles a kernel in a file of its own.
        kernels: The kernels, in order.
        functions: The compiled kernels; `None` before that.
    """

    compiler: tasks.AsyncCompile
    one_each: Callable
    kernels: list[Kernel] = field(default_factory=list)
    functions: dict[Kernel, Callable] | None = None

    def function(self, kernel: Kernel) -> Callable:
        """The compiled function of a kernel."""
        if self.functions is None:
            self.functions = self._together() or self._alone(self.kernels)
        return self.functions[kernel]

    def _together(self) -> dict[Kernel, Callable] | None:
        """Compiles the kernels in few files; `None` if that fails. Alone they may succeed, or show what is wrong."""
        shares = shared_out(self.kernels, tasks.get_compile_threads())
        alone = [share[0] for share in shares if len(share) == 1]
        try:
            begun = [(share, _begun(share, self.compiler)) for share in shares if len(share) > 1]
            functions = self._alone(alone)
            for share, library in begun:
                functions |= zip(share, library().functions, strict=True)
        except Exception as error:
            logger.debug("every kernel is compiled in a separate file: %s", error)
            return None
        return functions

    def _alone(self, kernels: list[Kernel]) -> dict[Kernel, Callable]:
        futures = {kernel: self.one_each(self.compiler, list(kernel[0]), kernel[1]) for kernel in kernels}
        return {kernel: future.result() for kernel, future in futures.items()}


def shared_out(kernels: list[Kernel], most: int) -> list[list[Kernel]]:
    """Distributes kernels over at most `most` files of about the same length; deterministic for the same kernels."""
    shares: list[list[Kernel]] = [[] for _ in range(min(most, len(kernels)))]
    for kernel in sorted(kernels, key=lambda kernel: -len(kernel[1])):
        min(shares, key=lambda share: sum(len(source) for _, source in share)).append(kernel)
    return shares


def source_of(kernels: list[Kernel]) -> str:
    """Source of one file of several kernels: each is in a namespace of its own, with the Python bindings of torch."""
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
    """Starts to compile a file of kernels; returns a function that waits for the library."""
    reader: Any = type(f"FileOf{len(kernels)}", (_File,), {"count": len(kernels)})
    return reader.load_async(source_of(kernels), submit_fn=compiler.submit)


class _File(CppPythonBindingsCodeCache):
    """Reader of a library of several kernels, each of which is a Python module."""

    cache: dict[str, Callable[[], Any]] = {}
    count = 0

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> Any:
        modules = []
        for name in (f"kernel_{index}" for index in range(cls.count)):
            one: Any = type(name, (CppPythonBindingsCodeCache,), {"entry_function": name})
            modules.append((one._load_library_inner(path, key), name))
        return SimpleNamespace(functions=[getattr(module, name) for module, name in modules])
