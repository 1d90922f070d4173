"""Which attention kernels rounds run by on CUDA: those that take any length as it comes.

Trees come with masks, and for masks in 16 bits torch prefers cuDNN's kernels on Hopper. cuDNN plans for one number of
rows and of slots, which takes many times what a plan then saves: every round's text is as long as none was before, and
so is every level of a draft. Plain decoding has no masks, and gets other kernels.
"""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from typing import Any

from torch.backends import cuda


class KernelsOfAnyLength(ContextDecorator):
    """While this lasts, torch plans no attention with cuDNN, unless nothing else is left to it.

    The switch is torch's, of the whole process: other threads meanwhile get other kernels as well, and the same
    numbers but for rounding. Calls that run at the same time are counted; the last one leaves the switch as the
    first found it.
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
