"""The device of accelerator tests: CUDA where available, otherwise an emulation that `accelerator.cpp` builds.

The emulation registers the device type `pretend`, with two devices. Its kernels are the CPU's, so it cannot test
kernels, streams or graphs. It shows whether tensors of several devices meet, what the host waits for, and whether a
time was taken without waiting. A process cannot unload the emulation, so `test_accelerator` starts a process of its
own.
"""

from __future__ import annotations

import ctypes
import shutil
import sys
import time
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_suffix(".cpp")
NAME = "pretend"
DEVICES = 2
OURS = "hf_specheads"


def emulation_problem() -> str | None:
    """Returns the reason why the emulation cannot be built here, or `None` if it can."""
    for tool in ("c++", "ninja"):
        if shutil.which(tool) is None:
            return f"no CUDA here, and no {tool} to build the emulation of an accelerator with"
    return None


@dataclass
class Seen:
    """What the host asked of a device while it was watched.

    Attributes:
        waits: Operators that the host waited for, each with the innermost line of our code: `("item", "loop.py:281
            accept")`.
        copies: Copies that the host did not wait for, and copies between two devices.
        operators: Number of operators that were launched.
    """

    waits: list[tuple[str, str]] = field(default_factory=list)
    copies: list[tuple[str, str]] = field(default_factory=list)
    operators: int = 0

    def __call__(self, what: bytes, name: bytes) -> None:
        if what == b"operator":
            self.operators += 1
            return
        lines = (
            f"{Path(frame.f_code.co_filename).name}:{number} {frame.f_code.co_name}"
            for frame, number in traceback.walk_stack(sys._getframe(1))
            if f"/{OURS}/" in frame.f_code.co_filename
        )
        (self.waits if what == b"wait" else self.copies).append((name.decode(), next(lines, "")))


class Emulation:
    """The device type `pretend`, built and registered."""

    def __init__(self) -> None:
        from torch.utils.cpp_extension import load

        path = load(
            "specheads_pretend", [str(SOURCE)], extra_cflags=["-O1", "-w", "-std=c++20"], is_python_module=False
        )
        path = path or sys.modules["torch.utils.cpp_extension"]._get_build_directory("specheads_pretend", False)
        path = Path(path)
        self.emulation = ctypes.CDLL(str(path if path.is_file() else next(path.glob("*.so"))))
        self.emulation.set_seconds_per_operator.argtypes = [ctypes.c_double]
        self._listener: Any = None
        torch.utils.rename_privateuse1_backend(NAME)
        self.emulation.register_hooks()
        torch._register_device_module(NAME, self._module())
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def _module(self) -> types.ModuleType:
        """Makes the module that PyTorch looks for as `torch.pretend`."""
        module = types.ModuleType(f"torch.{NAME}")
        members = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_is_in_bad_fork": lambda: False,
            "_lazy_init": lambda: None,
            "device_count": lambda: DEVICES,
            "current_device": self.emulation.current_device,
            "set_device": lambda device: self.emulation.set_device(torch.device(device).index or 0),
            "manual_seed": lambda seed: None,  # kernels and random numbers are the CPU's
            "manual_seed_all": lambda seed: None,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
            "get_device_name": lambda device=None: NAME,
            "synchronize": self._synchronize,
        }
        for name, member in members.items():
            setattr(module, name, member)
        return module

    def _synchronize(self, device: Any = None) -> None:
        index = None if device is None else torch.device(device).index
        self.emulation.synchronize(self.emulation.current_device() if index is None else index)

    @contextmanager
    def watched(self) -> Iterator[Seen]:
        """Records everything that the host asks of the devices within the context."""
        seen = Seen()
        kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
        self._listener = kind(seen)  # a reference must be kept, because the library calls the listener
        self.emulation.listen(self._listener)
        try:
            yield seen
        finally:
            self.emulation.listen(None)

    @contextmanager
    def slow(self, seconds: float) -> Iterator[None]:
        """Lets every operator occupy the device for this time within the context. Only code that waits for the device
        notices."""
        self.emulation.set_seconds_per_operator(seconds)
        try:
            yield
        finally:
            self.emulation.set_seconds_per_operator(0.0)
            for index in range(DEVICES):
                self.emulation.synchronize(index)


def waited(call: Any) -> float:
    """Returns the wall seconds of a call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
