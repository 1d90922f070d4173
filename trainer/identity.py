"""Identity of a run, which is written into every checkpoint and compared before a run resumes from it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any

from hf_specheads.heads.base import DraftHead

from .arguments import DraftHeadTrainingArguments

RUN_IDENTITY = "run_identity.json"
# Arguments that identify a run. All others (length, devices, logging, saving) may change on resuming.
TRAINING = (
    *("pass_reduction", "top_k", "lk_decay", "pass_decay", "feature_noise", "feature_noise_scaling"),
    *("embedding_noise", "upstream_masking", "max_length", "packing", "chat_template_kwargs", "seed", "data_seed"),
    *("optim", "optim_args", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *(
        "max_grad_norm",
        "max_grad_value",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "target_lora_rank",
    ),
    *("target_lora_alpha", "target_lora_modules", "target_loss_weight", "self_distillation"),
    *("target_learning_rate", "heads_warmup_steps"),
)
HEADS = ("method", "num_specialists", "positions_per_specialist", "hidden_size", "intermediate_size", "num_heads",
         "num_blocks", "draft_vocab_size", "feature_layers", "inputs", "lm_head")  # fmt: skip


class OtherRunError(ValueError):
    """The checkpoint belongs to another recipe than the run that should resume from it."""


def run_identity(
    heads: DraftHead,
    args: DraftHeadTrainingArguments,
    num_passes: int,
    data: object,
    custom_optimizer: str | None = None,
) -> dict[str, Any]:
    """Returns the plain values that identify a run, and their digest.

    Args:
        heads: The draft heads to train.
        args: Training arguments, completed with the method's defaults.
        num_passes: Number of draft positions.
        data: The prepared training data.
        custom_optimizer: Class name of an optimizer that was passed to the trainer.
    """
    values: dict[str, Any] = {"num_passes": num_passes}
    values |= {name: getattr(heads.config, name) for name in HEADS if hasattr(heads.config, name)}
    values |= {f"{loss}_loss_weight": weight for loss, weight in args.loss_weights.items()}
    values |= {name: getattr(args, name) for name in TRAINING if hasattr(args, name)}
    values["examples_per_step"] = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    values["data"] = data_identity(data)
    values["target"] = (heads.config.target or {}).get("fingerprint")
    if args.max_grad_value is not None:
        values["max_grad_value"] = args.max_grad_value
    if custom_optimizer is not None:
        values["optim"] = custom_optimizer
    values = json.loads(json.dumps(values, default=str, sort_keys=True))
    return {"digest": digest(values), "values": values}


def data_identity(data: object) -> str | None:
    """Returns length and digest of the first two and the last example; `None` for data of unknown length (streams)."""
    if not isinstance(data, Sized) or not hasattr(data, "__getitem__") or not len(data):
        return None
    ends = [data[index] for index in dict.fromkeys((0, 1 % len(data), len(data) - 1))]
    ids = [[int(token) for token in example["input_ids"]] for example in ends if "input_ids" in example]
    return f"{len(data)} examples, {digest(ids)}"


def digest(values: object) -> str:
    """Returns a digest of plain values, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def write_identity(folder: str | os.PathLike, identity: Mapping[str, Any]) -> None:
    """Writes the identity of a run into a checkpoint."""
    (Path(folder) / RUN_IDENTITY).write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")


def refuse_other_run(checkpoint: str | os.PathLike, identity: Mapping[str, Any]) -> None:
    """Refuses to resume from the checkpoint of another recipe.

    Raises:
        OtherRunError: naming all values that differ, old and new; also for a checkpoint without a recorded identity.
    """
    path = Path(checkpoint) / RUN_IDENTITY
    mend = "write into another output_dir, or begin anew with resume=false"
    if not path.is_file():
        raise OtherRunError(f"{checkpoint} does not say which recipe it was trained with (no {RUN_IDENTITY}); {mend}.")
    theirs = json.loads(path.read_text(encoding="utf-8"))
    if theirs["digest"] == identity["digest"]:
        return
    ours, saved = identity["values"], theirs["values"]
    names = [name for name in {**saved, **ours} if saved.get(name) != ours.get(name)]
    differences = "; ".join(f"{name} was {saved.get(name)!r} and is now {ours.get(name)!r}" for name in names)
    raise OtherRunError(f"{checkpoint} belongs to another recipe: {differences}. Give the old values, {mend}.")
