"""Draft heads that speed up `model.generate` without changing its output.

    heads = load_heads("user/poss-heads")
    out = target.generate(**inputs, assistant_model=heads)

After importing the package, `AutoConfig` and `AutoModel` load draft heads, and `generate` accepts them as
`assistant_model`. The import loads neither torch nor transformers: public names are imported on first access, and the
hook in `generate` is installed when the first name needs the classes of draft heads ([`registration`], [`dispatch`]).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .registration import expect_heads
from .version import __version__

if TYPE_CHECKING:  # the same names as in `_MODULES`, for type checkers and editors
    from .checkpoints.load import load_heads as load_heads
    from .checkpoints.write import Exported as Exported
    from .checkpoints.write import export_heads as export_heads
    from .configuration import DraftHeadConfig as DraftHeadConfig
    from .diagnosis.diagnosis import Diagnosis as Diagnosis
    from .diagnosis.difference import Difference as Difference
    from .diagnosis.difference import explain_difference as explain_difference
    from .diagnosis.doctor import diagnose as diagnose
    from .errors import ExportError as ExportError
    from .errors import HeadLoadError as HeadLoadError
    from .errors import UnsupportedGenerationError as UnsupportedGenerationError
    from .errors import WrongTargetError as WrongTargetError
    from .generation.call import speculative_generate as speculative_generate
    from .generation.candidates import DraftHeadCandidateGenerator as DraftHeadCandidateGenerator
    from .generation.streams.stream import FinishedText as FinishedText
    from .generation.streams.stream import generate_stream as generate_stream
    from .heads.auto import AutoDraftHead as AutoDraftHead
    from .heads.base import DraftHead as DraftHead
    from .heads.dflash import DFlashHead as DFlashHead
    from .heads.dflash import DFlashHeadConfig as DFlashHeadConfig
    from .heads.dflash2 import DFlash2Head as DFlash2Head
    from .heads.dflash2 import DFlash2HeadConfig as DFlash2HeadConfig
    from .heads.domino import DominoHead as DominoHead
    from .heads.domino import DominoHeadConfig as DominoHeadConfig
    from .heads.draft_lm import DraftLanguageModel as DraftLanguageModel
    from .heads.draft_lm import DraftLanguageModelConfig as DraftLanguageModelConfig
    from .heads.dspark import DSparkHead as DSparkHead
    from .heads.dspark import DSparkHeadConfig as DSparkHeadConfig
    from .heads.eagle import EagleHead as EagleHead
    from .heads.eagle import EagleHeadConfig as EagleHeadConfig
    from .heads.eagle3 import Eagle3Head as Eagle3Head
    from .heads.eagle3 import Eagle3HeadConfig as Eagle3HeadConfig
    from .heads.hydra import HydraHead as HydraHead
    from .heads.hydra import HydraHeadConfig as HydraHeadConfig
    from .heads.lookup import LookupHead as LookupHead
    from .heads.lookup import LookupHeadConfig as LookupHeadConfig
    from .heads.medusa import MedusaHead as MedusaHead
    from .heads.medusa import MedusaHeadConfig as MedusaHeadConfig
    from .heads.mtp import MtpHead as MtpHead
    from .heads.mtp import MtpHeadConfig as MtpHeadConfig
    from .heads.peagle import PEagleHead as PEagleHead
    from .heads.peagle import PEagleHeadConfig as PEagleHeadConfig
    from .heads.poss import PossHead as PossHead
    from .heads.poss import PossHeadConfig as PossHeadConfig
    from .heads.poss_eagle3 import PossEagle3Head as PossEagle3Head
    from .heads.poss_eagle3 import PossEagle3HeadConfig as PossEagle3HeadConfig
    from .heads.poss_lora import PossLoraHead as PossLoraHead
    from .heads.poss_lora import PossLoraHeadConfig as PossLoraHeadConfig
    from .metrics import GenerationStats as GenerationStats
    from .tree.config import DraftTreeConfig as DraftTreeConfig
    from .tuning.search import OptimalTree as OptimalTree
    from .tuning.search import search_tree as search_tree
    from .tuning.tune import TuningResult as TuningResult
    from .tuning.tune import tune as tune
    from .tuning.vocabulary import tune_vocabulary as tune_vocabulary

_MODULES = {
    "checkpoints.load": ("load_heads",),
    "checkpoints.write": ("Exported", "export_heads"),
    "configuration": ("DraftHeadConfig",),
    "diagnosis.diagnosis": ("Diagnosis",),
    "diagnosis.difference": ("Difference", "explain_difference"),
    "diagnosis.doctor": ("diagnose",),
    "errors": ("ExportError", "HeadLoadError", "UnsupportedGenerationError", "WrongTargetError"),
    "generation.candidates": ("DraftHeadCandidateGenerator",),
    "generation.call": ("speculative_generate",),
    "generation.streams.stream": ("FinishedText", "generate_stream"),
    "heads.auto": ("AutoDraftHead",),
    "heads.base": ("DraftHead",),
    "heads.dflash": ("DFlashHead", "DFlashHeadConfig"),
    "heads.dflash2": ("DFlash2Head", "DFlash2HeadConfig"),
    "heads.domino": ("DominoHead", "DominoHeadConfig"),
    "heads.draft_lm": ("DraftLanguageModel", "DraftLanguageModelConfig"),
    "heads.dspark": ("DSparkHead", "DSparkHeadConfig"),
    "heads.eagle": ("EagleHead", "EagleHeadConfig"),
    "heads.eagle3": ("Eagle3Head", "Eagle3HeadConfig"),
    "heads.hydra": ("HydraHead", "HydraHeadConfig"),
    "heads.lookup": ("LookupHead", "LookupHeadConfig"),
    "heads.medusa": ("MedusaHead", "MedusaHeadConfig"),
    "heads.mtp": ("MtpHead", "MtpHeadConfig"),
    "heads.peagle": ("PEagleHead", "PEagleHeadConfig"),
    "heads.poss": ("PossHead", "PossHeadConfig"),
    "heads.poss_eagle3": ("PossEagle3Head", "PossEagle3HeadConfig"),
    "heads.poss_lora": ("PossLoraHead", "PossLoraHeadConfig"),
    "metrics": ("GenerationStats",),
    "tree.config": ("DraftTreeConfig",),
    "tuning.search": ("OptimalTree", "search_tree"),
    "tuning.tune": ("TuningResult", "tune"),
    "tuning.vocabulary": ("tune_vocabulary",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value  # so that Python does not call this function for the name again
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


expect_heads()
