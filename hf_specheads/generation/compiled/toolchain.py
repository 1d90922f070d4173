"""What the compiler finds out once in a process before it makes code for a CPU, found out while it reads the model.

Inductor asks the C++ compiler by trial which vector instructions there are, and has it read its headers in advance:
several seconds of other processes, for which the first compiled call would wait.
"""

from __future__ import annotations

import importlib
import threading
from functools import cache
from typing import Any

from transformers.utils import logging

from .guards import no_collections

logger = logging.get_logger(__name__)

# As torch tries a processor's vector instructions, and reads the headers that kernels with vectors read.
_KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out) { at::vec::Vectorized<float>(1).exp().store(out); }
"""


@cache
def warm_up_toolchain() -> threading.Thread:
    """Begins once, in a thread of its own; a failure is left to the compiler, which meets and explains it itself."""
    thread = threading.Thread(target=_warm_up, name="hf_specheads-toolchain", daemon=True)
    thread.start()
    return thread


def _warm_up() -> None:
    try:
        with no_collections():
            kinds = importlib.import_module("torch._inductor.cpu_vec_isa")
            config = importlib.import_module("torch._inductor.config")
            codecache = importlib.import_module("torch._inductor.codecache")
            _read_headers(kinds, config, codecache.CppPythonBindingsCodeCache)
            codecache.torch_key()  # reads all of torch's sources, to know in which version of it graphs were compiled
    except Exception as error:  # of places inside torch that may move, or a machine without a C++ compiler
        logger.debug("the C++ compiler was not warmed up: %s", error)


def _read_headers(kinds: Any, config: Any, kernels: Any) -> None:
    """Compiles a kernel with the newest vector instructions of this processor. That it can be is what torch would find
    out of each generation of them alone, before it reads the headers: where it cannot be, torch is left to it."""
    with config.patch({"cpp.vec_isa_ok": True}):
        kinds.valid_vec_isa_list()
    try:
        kernels.load_pybinding(["float*"], _KERNEL)
    except Exception:
        kinds.valid_vec_isa_list.cache_clear()
        for kind in {base for newest in kinds.supported_vec_isa_list for base in type(newest).__mro__}:
            getattr(vars(kind).get("__bool__"), "cache_clear", bool)()
        raise
    for kind in kinds.valid_vec_isa_list():
        _known_to_be(kind)


def _known_to_be(kind: Any) -> None:
    """That the compiler has a processor's instructions: torch remembers it of some generations of them only with the
    setting under which it found it out, and tries again without."""
    kind.check_build = lambda code: True
    try:
        bool(kind)
    finally:
        del kind.check_build
