"""Training defaults of each method: loss weights, their decay over draft positions, and draft positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerState

from hf_specheads.heads.base import DraftHead

from .arguments import DraftHeadTrainingArguments
from .unroll.losses import LOSSES


@dataclass(frozen=True)
class MethodDefaults:
    """Training defaults of a method.

    Attributes:
        losses: Weights by name of loss; losses that are not listed have weight 0.
        pass_decay: Factor of the losses from one draft position to the next.
        num_passes: Number of draft positions; `None` for `DraftHead.default_passes`.
    """

    losses: Mapping[str, float] = field(default_factory=dict)
    pass_decay: float = 1.0
    num_passes: int | None = None


FEATURE_AND_TOKEN = {"feature": 1.0, "token": 0.1}
DEFAULTS: dict[str, MethodDefaults] = {
    "eagle": MethodDefaults(FEATURE_AND_TOKEN),  # arXiv 2401.15077, 3.2
    "hass": MethodDefaults({**FEATURE_AND_TOKEN, "top_k": 1.0}, num_passes=3),  # arXiv 2408.15766, 3
    "poss": MethodDefaults(FEATURE_AND_TOKEN),  # arXiv 2506.03566
    "poss-lora": MethodDefaults(FEATURE_AND_TOKEN),
    "eagle3": MethodDefaults({"token": 1.0}, pass_decay=0.8),  # arXiv 2503.01840
    "poss-eagle3": MethodDefaults({"token": 1.0}),
    "peagle": MethodDefaults({"token": 1.0}, num_passes=5),  # arXiv 2602.01469
    "mtp": MethodDefaults({"token": 1.0}, num_passes=3),
    "medusa": MethodDefaults({"next_token": 1.0}, pass_decay=0.8),  # arXiv 2401.10774, 2.2.1
    "hydra": MethodDefaults({"next_token": 1.0}),  # arXiv 2402.05109
    "dflash": MethodDefaults({"next_token": 1.0}, pass_decay=0.8669),  # arXiv 2602.06036: exp(-1/7), blocks of 16
    # arXiv 2607.05147: 0.1 cross-entropy + 0.9 sum |p - q|, which is 1.8 total variation; decay exp(-1/4) per position
    "dspark": MethodDefaults({"next_token": 0.1, "total_variation": 1.8, "confidence": 1.0}, pass_decay=0.7788),
    "dflash2": MethodDefaults({"next_token": 1.0, "selector": 0.5}, pass_decay=0.7788),  # exp(-1/4), blocks of 8
    "domino": MethodDefaults({"next_token": 1.0, "base": 1.0}, pass_decay=0.8669),  # arXiv 2605.29707; exp(-1/7)
    "jetspec": MethodDefaults({"token": 1.0}),  # arXiv 2606.18394
    "draft-lm": MethodDefaults({"token": 1.0}),
}
HYDRA_PLUS = MethodDefaults({"token": 1.0})  # the "teacher loss" of Hydra's paper
MEDUSA_2 = MethodDefaults({"next_token": 0.2}, pass_decay=0.8)  # arXiv 2401.10774, 2.2.2


def method_defaults(heads: DraftHead, joint: bool = False) -> MethodDefaults:
    """Returns the training defaults of draft heads; a method without an entry trains the token loss alone.

    Args:
        heads: The draft heads to train.
        joint: Whether an adapter of the target is trained too.
    """
    if heads.config.method == "hydra" and getattr(heads.config, "head_arch", None) == "prefix-mlp":
        return HYDRA_PLUS
    if heads.config.method == "medusa" and joint:
        return MEDUSA_2
    return DEFAULTS.get(heads.config.method, MethodDefaults({"token": 1.0}))


def progress_of(state: TrainerState) -> float:
    """Returns the share, 0 to 1, of the training steps that are done; 1 outside of training."""
    return min(state.global_step / state.max_steps, 1.0) if state.max_steps > 0 else 1.0


def complete_arguments(args: DraftHeadTrainingArguments, heads: DraftHead, joint: bool = False) -> None:
    """Fills arguments that are `None` with the method's defaults, in place.

    Each loss weight that the user gave replaces the method's weight of that loss; all other losses keep theirs.

    Raises:
        ValueError: if all loss weights are 0.
    """
    defaults = method_defaults(heads, joint)
    values: dict[str, Any] = {f"{loss}_loss_weight": defaults.losses.get(loss, 0.0) for loss in LOSSES}
    values["pass_decay"] = defaults.pass_decay
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.num_passes is None:
        args.num_passes = getattr(heads.config, "trained_positions", None) or defaults.num_passes
    if not any(args.loss_weights.values()):
        names = ", ".join(f"`{loss}_loss_weight`" for loss in LOSSES)
        raise ValueError(f"all of {names} are 0, so nothing would be trained; set at least one above 0.")


def resolve_num_passes(heads: DraftHead, args: DraftHeadTrainingArguments) -> int:
    """Returns the number of draft positions to train: `args.num_passes`, else `DraftHead.default_passes`.

    Raises:
        ValueError: if the draft heads cannot be trained with that number, for example because a specialist would have
            no position, or if their draft vocabulary is pruned.
    """
    passes = args.num_passes or heads.default_passes
    if problem := heads.passes_problem(passes):
        raise ValueError(f"num_passes={passes} {problem}")
    if heads.pruned_token_ids is not None:
        raise ValueError(
            f"these heads are pruned to {heads.config.pruned_vocab_size} tokens, which serves drafting only; call "
            "`heads.prune_draft_vocabulary(None)` to train them, and prune them again afterwards."
        )
    return passes
