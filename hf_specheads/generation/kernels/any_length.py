"""Keeps rounds on CUDA to attention kernels that need no planning for each length.

Trees come with masks, and for masks in 16 bits torch prefers cuDNN's kernels on Hopper. cuDNN makes a plan for one
number of rows and slots, which takes many times as long as the plan then saves: every round, and every level of a
draft, has a length that did not occur before. Plain decoding has no masks and gets other kernels.
"""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from typing import Any

from torch.backends import cuda


class KernelsOfAnyLength(ContextDecorator):
    """While this lasts, torch does not use cuDNN for attention, unless no other kernel that takes masks is enabled.

    The switch is torch's own and holds for the whole process: meanwhile other threads get other kernels as well, with
    the same numbers up to rounding. Calls that run at the same time are counted, and the last one restores the switch.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._was_on = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                others = cuda.mem_efficient_sdp_enabled() or cuda.math_sdp_enabled()
                self._was_on = others and cuda.cudnn_sdp_enabled()
                if self._was_on:
                    cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *_error: Any) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._was_on:
                cuda.enable_cudnn_sdp(True)


any_length = KernelsOfAnyLength()
