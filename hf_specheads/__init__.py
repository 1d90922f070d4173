"""Draft heads that speed up `model.generate` without changing its output.

    heads = load_heads("user/poss-heads")
    out = target.generate(**inputs, assistant_model=heads)

Importing the package lets `AutoConfig` and `AutoModel` know the heads, and `generate` take them as `assistant_model`.
"""

from . import auto, dispatch
from .auto import AutoDraftHead
from .candidates import DraftHeadCandidateGenerator
from .configuration import DraftHeadConfig, DraftTreeConfig
from .errors import ExportError, HeadLoadError, UnsupportedGenerationError, WrongTargetError
from .export import Exported, export_heads
from .generation import speculative_generate
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
)
from .hub import load_heads
from .metrics import GenerationStats
from .modeling import DraftHead
from .tree_search import OptimalTree, search_tree
from .tuning import TuningResult, tune
from .version import __version__
from .vocabulary_tuning import tune_vocabulary

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
