"""Draft heads that speed up `model.generate` without changing its output.

    heads = load_heads("user/poss-heads")
    out = target.generate(**inputs, assistant_model=heads)

Importing the package lets `AutoConfig` and `AutoModel` know the heads, and `generate` take them as `assistant_model`.
"""

from . import dispatch, heads
from .checkpoints.load import load_heads
from .checkpoints.write import Exported, export_heads
from .configuration import DraftHeadConfig
from .errors import ExportError, HeadLoadError, UnsupportedGenerationError, WrongTargetError
from .generation.candidates import DraftHeadCandidateGenerator
from .generation.loop import speculative_generate
from .heads import *  # noqa: F403 (the families, each named in its module)
from .heads import auto
from .heads.auto import AutoDraftHead
from .heads.base import DraftHead
from .metrics import GenerationStats
from .tree.config import DraftTreeConfig
from .tuning.search import OptimalTree, search_tree
from .tuning.tune import TuningResult, tune
from .tuning.vocabulary import tune_vocabulary
from .version import __version__

auto.register()
dispatch.install()

__all__ = [
    "AutoDraftHead",
    "DraftHead",
    "DraftHeadCandidateGenerator",
    "DraftHeadConfig",
    "DraftTreeConfig",
    "ExportError",
    "Exported",
    "GenerationStats",
    "HeadLoadError",
    "OptimalTree",
    "TuningResult",
    "UnsupportedGenerationError",
    "WrongTargetError",
    "__version__",
    "export_heads",
    "load_heads",
    "search_tree",
    "speculative_generate",
    "tune",
    "tune_vocabulary",
]
__all__ += heads.__all__
