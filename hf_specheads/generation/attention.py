"""How the target's attention runs while trees are verified."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

GROUPED_ATTENTION = "TRANSFORMERS_SDPA_FORCE_GQA"


@contextmanager
def grouped_attention_under_masks(target: PreTrainedModel) -> Iterator[None]:
    """On a CPU, lets sdpa attention read grouped keys and values as they are although there is a mask.

    transformers copies them for every query head whenever a mask is given, because kernels of other devices need that.
    On a CPU that copies the whole cache in every tree forward, for the same result bit for bit; plain decoding
    has no mask and copies nothing. The switch is transformers' own environment variable; a user's setting stays.
    """
    devices = getattr(target, "hf_device_map", None) or {"": target.device}
    if GROUPED_ATTENTION in os.environ or any(str(device) != "cpu" for device in devices.values()):
        yield
        return
    os.environ[GROUPED_ATTENTION] = "1"
    try:
        yield
    finally:
        os.environ.pop(GROUPED_ATTENTION, None)
