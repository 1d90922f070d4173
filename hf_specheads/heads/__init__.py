"""Draft heads, one module per method."""

from .draft_lm import DraftLanguageModel, DraftLanguageModelConfig
from .eagle import EagleHead, EagleHeadConfig
from .hydra import HydraHead, HydraHeadConfig
from .medusa import MedusaHead, MedusaHeadConfig
from .poss import PossHead, PossHeadConfig
from .poss_lora import PossLoraHead, PossLoraHeadConfig

__all__ = [
    "DraftLanguageModel",
    "DraftLanguageModelConfig",
    "EagleHead",
    "EagleHeadConfig",
    "HydraHead",
    "HydraHeadConfig",
    "MedusaHead",
    "MedusaHeadConfig",
    "PossHead",
    "PossHeadConfig",
    "PossLoraHead",
    "PossLoraHeadConfig",
]
