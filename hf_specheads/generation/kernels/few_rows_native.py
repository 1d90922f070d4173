"""Products of a few rows on a CPU, and the maximum of rows of numbers, by a C kernel ([`few_rows.c`]) that is built by
the machine's compiler.

Libraries of matrix products are made for one row or for many. In 16 bits, on processors without instructions for it, a
product of eight rows takes as long as eight products of one row; in float32 it takes several times as long as one.
Reading the weight once would be enough, and the kernel takes little longer than that. When links of a chain are
drafted one by one, operators are so small that calling them costs more than computing, so the favourite (most
probable) child is found in a single call.

The kernel is built at the first request on a machine, in a thread of its own, for the dtype in use and the vector
instructions that torch uses. It is kept in the folder `hf_specheads` of `HF_HOME`. There is no kernel if the machine
has no compiler or the kernel's results differ from torch's.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from torch.nn.functional import linear
from transformers.utils import logging

logger = logging.get_logger(__name__)

SOURCE = Path(__file__).with_name("few_rows.c")
KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
INSTRUCTIONS = {  # compiler flags, by torch's name of the processor's capability
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
}
STEP, FEWEST_OUTPUTS = 16, 16  # a weight's inputs must be a multiple of STEP, its outputs at least FEWEST_OUTPUTS
WORTH_THREADS = 2**17  # numbers from which on the search for maxima of rows uses several threads
SECONDS = 60  # time limit for the compiler


class Kernel:
    """Computes `linear` of rows [..., K] and a weight [N, K] of the kernel's dtype; other cases are left to torch."""

    def __init__(self, library: ctypes.PyDLL, dtype: torch.dtype):
        torchs: Any = torch._C._dynamo.guards
        for_python: Any = library.few_rows_for_python
        for_python.argtypes, for_python.restype = [ctypes.c_void_p], ctypes.py_object
        self.function = for_python(torchs._torchinductor_pyobject_tensor_data_ptr)
        library.highest_for_python.restype = ctypes.py_object
        self.highest = library.highest_for_python()
        self.dtype, self.widens = dtype, dtype != torch.float32

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # Small products take no longer than these checks, so only what is needed is checked and allocated.
        plain = rows.dtype == self.dtype and weight.is_contiguous() and (bias is None or bias.is_contiguous())
        *shape, inputs = rows.shape
        outputs, expected = weight.shape
        if not plain or inputs != expected or not fits(outputs, inputs) or _watched():
            return linear(rows, weight, bias)
        rows = rows.contiguous()
        wide = torch.empty_like(rows, dtype=torch.float32) if self.widens else rows
        product = rows.new_empty(*shape, outputs)
        self.function(rows, wide, rows.numel() // inputs, inputs, [weight], [bias], [product], (outputs,))
        return product

    def multiply(
        self, rows: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Products of the same rows with several weights, each with its bias or `None`. The caller has checked that
        the kernel supports them."""
        rows = rows.contiguous()
        *shape, inputs = rows.shape
        wide = torch.empty_like(rows, dtype=torch.float32) if self.widens else rows
        biases = [bias if bias is None else bias.contiguous() for bias in biases]
        outputs = tuple([weight.shape[0] for weight in weights])
        products = [rows.new_empty(*shape, number) for number in outputs]
        self.function(rows, wide, rows.numel() // inputs, inputs, weights, biases, products, outputs)
        return products


def _watched() -> bool:
    """Whether autograd or autocast is on, which need torch's own product."""
    return torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")


def best_of_rows(logits: torch.Tensor, vocabulary: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The most probable token of each row of logits, by the kernel; `None` if torch has to find it.

    Args:
        logits: fp32 [..., V].
        vocabulary: int64 [V], tokens of the logits; `None` if these are the indices.

    Returns:
        Log-probabilities and tokens, [..., 1] each.
    """
    if torch.compiler.is_compiling() or (kernel := WORKSHOP.any) is None:
        return None
    if not _are_rows(logits) or not (vocabulary is None or vocabulary.is_contiguous()):
        return None
    *shape, count = logits.shape
    tokens = logits.new_empty(*shape, 1, dtype=torch.int64)
    scores, rows = logits.new_empty(*shape, 1), tokens.numel()
    kernel.highest(logits, rows, count, tokens, _threads(rows, count), vocabulary, scores)
    return scores, tokens


def highest(scores: torch.Tensor) -> torch.Tensor | None:
    """Indices int64 [...] of the highest scores, fp32 [..., V], as `argmax`; `None` if torch has to find them."""
    if torch.compiler.is_compiling() or (kernel := WORKSHOP.any) is None or not _are_rows(scores):
        return None
    *shape, count = scores.shape
    places = scores.new_empty(shape, dtype=torch.int64)
    rows = places.numel()
    kernel.highest(scores, rows, count, places, _threads(rows, count))
    return places


def _are_rows(numbers: torch.Tensor) -> bool:
    """Whether the kernel can search these numbers."""
    plain = numbers.dtype == torch.float32 and numbers.is_cpu and not numbers.requires_grad
    return plain and numbers.is_contiguous() and numbers.numel() > 0


def _threads(rows: int, count: int) -> int:
    return min(torch.get_num_threads(), rows) if rows > 1 and rows * count >= WORTH_THREADS else 1


def fits(outputs: int, inputs: int) -> bool:
    """Whether the kernel multiplies with weights [N, K] of this size."""
    return inputs > 0 and inputs % STEP == 0 and outputs >= FEWEST_OUTPUTS


# ---------------------------------------------------------------------- building
def _command(dtype: torch.dtype) -> list[str] | None:
    """Command that builds the kernel on this machine, without its output path; `None` if it cannot be built."""
    found = [path for path in map(shutil.which, ("cc", "gcc", "clang")) if path]
    compiler = shlex.split(os.environ.get("CC", "")) or found[:1]
    instructions = INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ())
    if not compiler or os.name != "posix" or not (instructions or platform.machine() in ("aarch64", "arm64")):
        return None
    asked = ["-O3", "-shared", "-fPIC", "-fopenmp", f"-DKIND={KINDS[dtype]}", *instructions]
    return [*compiler, *asked, str(SOURCE), "-lm"]


def _place(command: list[str]) -> Path:
    """Path of the library that a command builds from the current source."""
    source = SOURCE.read_text(encoding="utf-8")
    made_of = [*(source if part == str(SOURCE) else part for part in command), platform.machine()]
    name = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:32]
    return Path(constants.HF_HOME, "hf_specheads", f"few_rows-{name}.so")


def build(dtype: torch.dtype) -> Kernel | None:
    """Builds the kernel for a dtype, or loads it if it was built before; `None` if there is none."""
    try:
        if (command := _command(dtype)) is None:
            return None
        place = _place(command)
        if not place.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=place.parent) as folder:  # other processes may build at the same time
                made = Path(folder, place.name)
                subprocess.run([*command, "-o", str(made)], check=True, capture_output=True, timeout=SECONDS)
                made.replace(place)
        runtimes = _openmp_runtimes()
        kernel = Kernel(ctypes.PyDLL(str(place)), dtype)
        if runtimes and _openmp_runtimes() - runtimes:
            raise OSError(f"it uses another OpenMP runtime than torch does: {_openmp_runtimes() - runtimes}")
    except (OSError, ValueError, subprocess.SubprocessError, AttributeError) as error:
        logger.debug("No kernel for products of few rows in %s: %s", dtype, error)
        return None
    return kernel if _is_right(kernel) else None


def _openmp_runtimes() -> set[str]:
    """OpenMP runtimes loaded in this process. There must be one only: idle threads of one would slow another down."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []
    libraries = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return {path for path in libraries if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}


@torch.inference_mode()
def _is_right(kernel: Kernel) -> bool:
    """Whether the kernel computes what torch does, for every kind of tile."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3 * FEWEST_OUTPUTS + 1, 3 * STEP, generator=generator, dtype=torch.float32)
    rows = torch.randn(14, 3 * STEP, generator=generator, dtype=torch.float32)
    weight, rows = weight.to(kernel.dtype), rows.to(kernel.dtype)
    bias = weight[:, 0].contiguous()
    for number in range(1, len(rows) + 1):
        expected = linear(rows[:number].double(), weight.double(), bias.double())
        found = kernel.multiply(rows[:number], [weight], [bias])[0].double()
        if not torch.allclose(found, expected, rtol=4 * torch.finfo(kernel.dtype).eps, atol=1e-4):
            return False
    return _finds_the_best(kernel, generator)


def _finds_the_best(kernel: Kernel, generator: torch.Generator) -> bool:
    """Whether the kernel finds the maxima that torch finds, in rows of several lengths."""
    for count in (1, STEP - 1, STEP, 19 * STEP + 5):
        logits = torch.randn(count, generator=generator, dtype=torch.float32) * 4
        expected, place = torch.log_softmax(logits.double(), -1).max(-1)
        score, token, found = torch.empty(1, dtype=torch.float32), torch.empty_like(place), torch.empty_like(place)
        kernel.highest(logits, 1, count, token, 1, None, score)
        kernel.highest(logits, 1, count, found, 1)
        right = torch.allclose(score.double(), expected, rtol=1e-5, atol=1e-6)
        if not (right and token == place and found == place):
            return False
    return True


class _Workshop:
    """Builds kernels and keeps them, by dtype.

    Attributes:
        any: Any kernel, for what all of them can do; `None` while there is none.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.threads: dict[torch.dtype, threading.Thread] = {}
        self.kernels: dict[torch.dtype, Kernel | None] = {}
        self.any: Kernel | None = None

    def order(self, dtype: torch.dtype, then: Callable[[], None]) -> Kernel | None:
        """Returns the kernel if it is built. Otherwise builds it in a thread of its own, which then calls `then`."""
        if dtype in self.kernels:
            return self.kernels[dtype]
        with self.lock:
            if dtype not in self.threads:
                work = threading.Thread(target=self._work, args=(dtype, then), name="hf_specheads-kernel", daemon=True)
                self.threads[dtype] = work
                work.start()
        return None

    def _work(self, dtype: torch.dtype, then: Callable[[], None]) -> None:
        self.kernels[dtype] = kernel = build(dtype)
        if kernel is not None:
            self.any = kernel
            then()

    def wait(self) -> None:
        """Waits until all kernels that were ordered are built."""
        for work in list(self.threads.values()):
            work.join()


WORKSHOP = _Workshop()
