"""Draft heads, one module per method."""

from .draft_lm import DraftLanguageModel, DraftLanguageModelConfig
from .eagle import EagleHead, EagleHeadConfig
from .eagle3 import Eagle3Head, Eagle3HeadConfig
from .hydra import HydraHead, HydraHeadConfig
from .medusa import MedusaHead, MedusaHeadConfig
from .poss import PossHead, PossHeadConfig
from .poss_eagle3 import PossEagle3Head, PossEagle3HeadConfig
from .poss_lora import PossLoraHead, PossLoraHeadConfig

__all__ = [
    "DraftLanguageModel",
    "DraftLanguageModelConfig",
    "Eagle3Head",
    "Eagle3HeadConfig",
    "EagleHead",
    "EagleHeadConfig",
    "HydraHead",
    "HydraHeadConfig",
    "MedusaHead",
    "MedusaHeadConfig",
    "PossEagle3Head",
    "PossEagle3HeadConfig",
    "PossHead",
    "PossHeadConfig",
    "PossLoraHead",
    "PossLoraHeadConfig",
]
