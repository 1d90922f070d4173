"""What the compiler asks before it runs what it has compiled, and what is done around its work."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

# By default the compiler does not look for hooks: one that a module gets after it was compiled would never run.
GUARD_HOOKS = {"skip_nnmodule_hook_guards": False}


def without_guards(step: Callable) -> Callable | None:
    """What the compiler has made of a step, without the guards it evaluates before it runs it: whether everything is
    as it was when it was compiled, down to the settings of every module. `None` if it has made several things of it.
    """
    entries: list[Any] = getattr(torch._dynamo.eval_frame, "_debug_get_cache_entry_list", lambda _: [])(step.__code__)
    return types.FunctionType(entries[0].code, step.__globals__, step.__name__) if len(entries) == 1 else None


@contextmanager
def quick_compiler() -> Iterator[None]:
    """The compiler works without collections of garbage and without what it would tell nobody."""
    settings = torch._dynamo.config.patch(_quick_settings())
    with no_collections(), no_names_of_lines(), settings, ExitStack() as kernels:
        _enter_kernels(kernels)
        yield


def _enter_kernels(kernels: ExitStack) -> None:
    """Imports much of the compiler."""
    if torch.cuda.is_available():
        from ..kernels.products import one_kernel_for_siblings

        kernels.enter_context(one_kernel_for_siblings())
        return
    from ..kernels.few_rows_compiled import few_rows_products

    kernels.enter_context(few_rows_products())
    try:
        from .kernel_files import kernels_in_few_files
    except ImportError:  # places inside torch may move
        return
    kernels.enter_context(kernels_in_few_files())


def _quick_settings() -> dict[str, Any]:
    """Of the compiler: it collects no garbage of its own accord, where the installed one would."""
    return {name: False for name in ("run_gc_after_compile",) if hasattr(torch._dynamo.config, name)}


@contextmanager
def no_names_of_lines() -> Iterator[None]:
    """torch looks up in which function every line lies that it traces, by taking whole source files apart, whether or
    not its log of them is on; not meanwhile, unless it is."""
    tracing = sys.modules.get("torch._dynamo.symbolic_convert")
    known = getattr(tracing, "get_funcname", None)
    logs = [getattr(tracing, name, None) for name in ("trace_call_log", "trace_source_log")]
    if known in (None, _unnamed) or None in logs or any(log.isEnabledFor(logging.DEBUG) for log in logs if log):
        yield
        return
    tracing.get_funcname = _unnamed  # type: ignore[union-attr]
    try:
        yield
    finally:
        tracing.get_funcname = known  # type: ignore[union-attr]


def _unnamed(filename: str, lineno: int) -> None:
    return None


class _Collections:
    """Switched off as long as anybody, in whatever thread, wants none."""

    def __init__(self) -> None:
        self.lock, self.unwanted, self.were_on = threading.Lock(), 0, False

    def stop(self) -> None:
        with self.lock:
            if not self.unwanted:
                self.were_on = gc.isenabled()
            self.unwanted += 1
            gc.disable()

    def resume(self) -> None:
        with self.lock:
            self.unwanted -= 1
            if not self.unwanted and self.were_on:
                gc.enable()


_COLLECTIONS = _Collections()


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage is looked for meanwhile: compilers make so many objects that the search, through all objects of the
    process each time, takes a good part of their time."""
    _COLLECTIONS.stop()
    try:
        yield
    finally:
        _COLLECTIONS.resume()


def let_go_at_exit(owner: Any, *kept: dict) -> None:
    """Compiled code dies while the compiler's modules are whole: in a process that ends they are emptied before what
    is left dies, and torch 2.14 prints a traceback then."""
    weakref.finalize(owner, _let_go, kept)


def _let_go(kept: tuple[dict, ...]) -> None:
    for one in kept:
        one.clear()


def own_copy(step: Callable) -> Callable:
    """The same function with a code object of its own."""
    return types.FunctionType(step.__code__.replace(), step.__globals__, step.__name__)
