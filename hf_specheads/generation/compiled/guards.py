"""Handles the guards of compiled code, and what slows the compiler down while it works."""

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

# By default the compiler does not guard on hooks, so a hook added to a module after compilation would never run.
GUARD_HOOKS = {"skip_nnmodule_hook_guards": False}


def without_guards(step: Callable) -> Callable | None:
    """The code that the compiler has made of a step, without its guards, which check before every run that everything
    is as it was at compilation, down to the settings of every module. `None` if there are several such codes."""
    entries: list[Any] = getattr(torch._dynamo.eval_frame, "_debug_get_cache_entry_list", lambda _: [])(step.__code__)
    return types.FunctionType(entries[0].code, step.__globals__, step.__name__) if len(entries) == 1 else None


@contextmanager
def quick_compiler() -> Iterator[None]:
    """While this lasts, the compiler works without garbage collections and without logs that nobody reads, and with
    our own kernels for products of few rows."""
    settings = torch._dynamo.config.patch(_quick_settings())
    with no_collections(), no_names_of_lines(), settings, ExitStack() as kernels:
        _enter_kernels(kernels)
        yield


def _enter_kernels(kernels: ExitStack) -> None:
    """Enables the kernels for products of few rows. Their modules import much of the compiler, so they load here."""
    if torch.cuda.is_available():
        from ..kernels.products import one_kernel_for_siblings

        kernels.enter_context(one_kernel_for_siblings())
        return
    from ..kernels.few_rows_compiled import few_rows_products

    kernels.enter_context(few_rows_products())
    try:
        from .kernel_files import kernels_in_few_files
    except ImportError:  # internals of torch may have moved
        return
    kernels.enter_context(kernels_in_few_files())


def _quick_settings() -> dict[str, Any]:
    """Settings of the compiler: no garbage collection after compiling, if the installed version does one."""
    return {name: False for name in ("run_gc_after_compile",) if hasattr(torch._dynamo.config, name)}


@contextmanager
def no_names_of_lines() -> Iterator[None]:
    """While this lasts, torch does not look up the function of every line it traces, unless a log that shows it is on.
    Without this, torch parses whole source files for it even if the logs are off."""
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
    """Switches garbage collection off as long as any thread asks for that."""

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
    """While this lasts, no garbage is collected. A compiler makes so many objects that collections, which search all
    objects of the process each time, take a large part of its time."""
    _COLLECTIONS.stop()
    try:
        yield
    finally:
        _COLLECTIONS.resume()


def let_go_at_exit(owner: Any, *kept: dict) -> None:
    """Lets compiled code die with its owner, or at exit while the compiler's modules still exist. Interpreter shutdown
    would empty these modules first, and torch 2.14 would print a traceback when compiled code dies after them."""
    weakref.finalize(owner, _let_go, kept)


def _let_go(kept: tuple[dict, ...]) -> None:
    for one in kept:
        one.clear()


def own_copy(step: Callable) -> Callable:
    """A copy of a function that has its own code object."""
    return types.FunctionType(step.__code__.replace(), step.__globals__, step.__name__)
