"""Draft heads that speed up `model.generate` without changing its output.

    heads = load_heads("user/poss-heads")
    out = target.generate(**inputs, assistant_model=heads)
"""

from .configuration import DraftHeadConfig, DraftTreeConfig, EagleHeadConfig, PossHeadConfig
from .heads import EagleHead, PossHead
from .modeling import DraftHead, WrongTargetError
from .version import __version__

__all__ = [
    "DraftHead",
    "DraftHeadConfig",
    "DraftTreeConfig",
    "EagleHead",
    "EagleHeadConfig",
    "PossHead",
    "PossHeadConfig",
    "WrongTargetError",
    "__version__",
]
