"""Draft heads that speed up `model.generate` without changing its output.

    heads = load_heads("user/poss-heads")
    out = target.generate(**inputs, assistant_model=heads)

Importing the package lets `AutoConfig` and `AutoModel` know the heads, and `generate` take them as `assistant_model`.
"""

from . import dispatch
from .checkpoints.load import load_heads
from .checkpoints.write import Exported, export_heads
from .configuration import DraftHeadConfig
from .errors import ExportError, HeadLoadError, UnsupportedGenerationError, WrongTargetError
from .generation.candidates import DraftHeadCandidateGenerator
from .generation.loop import speculative_generate
from .heads import (
    DraftLanguageModel,
    DraftLanguageModelConfig,
    Eagle3Head,
    Eagle3HeadConfig,
    EagleHead,
    EagleHeadConfig,
    HydraHead,
    HydraHeadConfig,
    MedusaHead,
    MedusaHeadConfig,
    PossEagle3Head,
    PossEagle3HeadConfig,
    PossHead,
    PossHeadConfig,
    PossLoraHead,
    PossLoraHeadConfig,
    auto,
)
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
    "DraftLanguageModel",
    "DraftLanguageModelConfig",
    "DraftTreeConfig",
    "Eagle3Head",
    "Eagle3HeadConfig",
    "EagleHead",
    "EagleHeadConfig",
    "ExportError",
    "Exported",
    "GenerationStats",
    "HeadLoadError",
    "HydraHead",
    "HydraHeadConfig",
    "MedusaHead",
    "MedusaHeadConfig",
    "OptimalTree",
    "PossEagle3Head",
    "PossEagle3HeadConfig",
    "PossHead",
    "PossHeadConfig",
    "PossLoraHead",
    "PossLoraHeadConfig",
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
