"""Draft heads that speed up `model.generate` without changing its output.

    heads = load_heads("user/poss-heads")
    out = target.generate(**inputs, assistant_model=heads)
"""

from . import auto
from .auto import AutoDraftHead
from .configuration import DraftHeadConfig, DraftTreeConfig, EagleHeadConfig, PossHeadConfig
from .heads import EagleHead, PossHead
from .hub import load_heads
from .metrics import GenerationStats
from .modeling import DraftHead, WrongTargetError
from .version import __version__

auto.register()

__all__ = [
    "AutoDraftHead",
    "DraftHead",
    "DraftHeadConfig",
    "DraftTreeConfig",
    "EagleHead",
    "EagleHeadConfig",
    "GenerationStats",
    "PossHead",
    "PossHeadConfig",
    "WrongTargetError",
    "__version__",
    "load_heads",
]
