"""What the compiler finds out once in a process before it makes code for a CPU, found out while it reads the model.

Inductor asks the C++ compiler by trial which vector instructions there are, and has it read its headers in advance:
several seconds of other processes, for which the first compiled call would wait.
"""

from __future__ import annotations

import importlib
import threading
from functools import cache

from transformers.utils import logging

logger = logging.get_logger(__name__)

# That it holds a vector decides which headers are read.
_KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out) { at::vec::Vectorized<float>(1).store(out); }
"""


@cache
def warm_up_toolchain() -> threading.Thread:
    """Begins once, in a thread of its own; a failure is left to the compiler, which meets and explains it itself."""
    thread = threading.Thread(target=_warm_up, name="hf_specheads-toolchain", daemon=True)
    thread.start()
    return thread


def _warm_up() -> None:
    try:
        _try_vector_instructions()
        codecache = importlib.import_module("torch._inductor.codecache")
        codecache.CppPythonBindingsCodeCache.load_pybinding(["float*"], _KERNEL)
    except Exception as error:  # of places inside torch that may move, or a machine without a C++ compiler
        logger.debug("the C++ compiler was not warmed up: %s", error)


def _try_vector_instructions() -> None:
    """One trial for all that the processor names: who compiles for the newest can compile for those before it."""
    kinds = importlib.import_module("torch._inductor.cpu_vec_isa")
    config = importlib.import_module("torch._inductor.config")
    named = set(kinds.x86_isa_checker())
    newest = next((kind for kind in kinds.supported_vec_isa_list if set(str(kind).split()) <= named), None)
    if newest is not None and newest.check_build(newest._avx_code):
        with config.patch({"cpp.vec_isa_ok": True}):
            kinds.valid_vec_isa_list()
