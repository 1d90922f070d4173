"""Training of draft heads: the multi-position unroll, its losses, and a `transformers.Trainer` around them.

Installed as `hf_specheads.trainer`; run as `python -m hf_specheads.trainer --config recipe.yaml key=value ...`. Public
names are imported at first use, so that errors in a recipe are reported before transformers' Trainer is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # type checkers and editors cannot follow the lazy imports of `_MODULES`
    from .arguments import DraftHeadTrainingArguments as DraftHeadTrainingArguments
    from .data.batches import PackedCollator as PackedCollator
    from .data.batches import PaddedCollator as PaddedCollator
    from .data.preparing import prepare_dataset as prepare_dataset
    from .data.vocabulary import frequent_tokens as frequent_tokens
    from .joint import JointTrainer as JointTrainer
    from .joint import JointTrainingArguments as JointTrainingArguments
    from .trainer import DraftHeadTrainer as DraftHeadTrainer
    from .unroll.unroll import PassLosses as PassLosses
    from .unroll.unroll import Unroll as Unroll
    from .unroll.unroll import unroll_losses as unroll_losses

_MODULES = {
    "arguments": ("DraftHeadTrainingArguments",),
    "data.batches": ("PackedCollator", "PaddedCollator"),
    "data.preparing": ("prepare_dataset",),
    "data.vocabulary": ("frequent_tokens",),
    "joint": ("JointTrainer", "JointTrainingArguments"),
    "trainer": ("DraftHeadTrainer",),
    "unroll.unroll": ("PassLosses", "Unroll", "unroll_losses"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value  # later look-ups do not come here again
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
