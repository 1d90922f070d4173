"""Training of draft heads: the multi-position unroll, its losses, and a `transformers.Trainer` around them.

Installed as `hf_specheads.trainer`; run as `python -m hf_specheads.trainer --config recipe.yaml key=value ...`.
"""

from .arguments import DraftHeadTrainingArguments
from .data import PackedCollator, PaddedCollator, prepare_dataset
from .joint import JointTrainer, JointTrainingArguments
from .trainer import DraftHeadTrainer
from .unroll import PassLosses, Unroll, unroll_losses
from .vocabulary import frequent_tokens

__all__ = [
    "DraftHeadTrainer",
    "DraftHeadTrainingArguments",
    "JointTrainer",
    "JointTrainingArguments",
    "PackedCollator",
    "PaddedCollator",
    "PassLosses",
    "Unroll",
    "frequent_tokens",
    "prepare_dataset",
    "unroll_losses",
]
