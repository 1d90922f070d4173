"""Warms up the C++ toolchain of torch's compiler in the background, while the compiler reads the model.

Before inductor makes code for a CPU, it has the C++ compiler try which vector instructions there are, and precompile
headers. That takes several seconds in other processes, which the first compiled call would wait for.
"""

from __future__ import annotations

import importlib
import threading
from functools import cache
from typing import Any

from transformers.utils import logging

from .guards import no_collections

logger = logging.get_logger(__name__)

# A kernel that uses vector instructions as torch's own trial does, and the headers that vectorised kernels include.
_KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(float* out) { at::vec::Vectorized<float>(1).exp().store(out); }
"""


@cache
def warm_up_toolchain() -> threading.Thread:
    """Starts the warm-up once, in a thread of its own. A failure is ignored: the compiler will meet and explain it."""
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
            codecache.torch_key()  # hashes all of torch's sources, which identifies its version in cached graphs
    except Exception as error:  # internals of torch may have moved, or the machine has no C++ compiler
        logger.debug("the C++ compiler was not warmed up: %s", error)


def _read_headers(kinds: Any, config: Any, kernels: Any) -> None:
    """Compiles a kernel with the newest vector instructions of this processor. On success this replaces the separate
    trial that torch makes of each generation of instructions before it reads the headers. On failure torch's state is
    restored, so that torch makes its own trials."""
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
    """Makes torch remember that the compiler supports a processor's instructions. Torch caches its answer for some of
    the generations only together with the setting it was found under, and would try again without that setting."""
    kind.check_build = lambda code: True
    try:
        bool(kind)
    finally:
        del kind.check_build
