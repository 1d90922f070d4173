"""Describe draft heads: layout, method, sizes, target, what is assumed, and which arguments `load_heads` needs.

Only config.json and the headers of safetensors files are read (a few KiB), from a folder or a Hub repository.
`--check` (or `--download`) loads all weights, downloading those of a repository, and checks every tensor.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.headers import glance_at
from ..checkpoints.layouts.titles import OURS, TITLES
from ..registration import MODEL_TYPES
from .arguments import add_heads_arguments, load_heads_from
from .display import emit, note

if TYPE_CHECKING:
    from ..checkpoints.headers import Glance
    from ..checkpoints.look import Look
    from ..checkpoints.read import StoredHeads
    from ..heads.base import DraftHead

SIZES = ("vocab_size", "feature_size", "embedding_size", "hidden_size", "intermediate_size", "num_attention_heads",
         "num_key_value_heads", "head_dim", "num_heads", "num_blocks", "fc_bias", "attention_bias",
         "feature_layers")  # fmt: skip
# Fields of a config.json that hint at the method if the weights cannot be read.
HINTS = ("architectures", "model_type", "hydra_num_heads", "medusa_num_heads", "draft_vocab_size",
         "speculators_model_type", "base_model_name_or_path")  # fmt: skip
VALUES = "values (NaN, damage)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for the heads, and whether to load all weights."""
    parser.add_argument("heads", help="folder or Hub id")
    parser.add_argument("--check", "--download", action="store_true", dest="load",
                        help="load all weights, downloading a repository's, and check every tensor")  # fmt: skip
    add_heads_arguments(parser)


def describe(heads: DraftHead) -> dict[str, Any]:
    """Describes loaded heads, as plain values."""
    state = {key: tensor for key, tensor in heads.state_dict().items() if key not in heads.all_tied_weights_keys}
    facts = _facts(heads.config, type(heads).__name__, *_numbers(state))
    return facts if heads._chosen_tree is None else facts | {"tree_config": heads.tree_config.to_dict()}


def _numbers(tensors: dict[str, Any]) -> tuple[int, str]:
    """Number of floating-point weights, and the dtype of most of them."""
    from ..checkpoints.tensors import usual_dtype

    counted = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    return counted, str(usual_dtype(tensors)).removeprefix("torch.")


def _facts(config: Any, head_class: str, parameters: int, dtype: str) -> dict[str, Any]:
    """Facts from the config, which is either a loaded one or one with the fields of the file."""
    target = dict(config.target or {})
    fingerprint = "stored" if target.pop("fingerprint", None) else "not stored"
    drafted = getattr(config, "draft_vocab_size", None) or config.pruned_vocab_size
    return {
        "class": head_class,
        "method": config.method,
        "parameters": parameters,
        "dtype": dtype,
        "num_specialists": getattr(config, "num_specialists", 1),
        "positions_per_specialist": getattr(config, "positions_per_specialist", None),
        "trained_positions": getattr(config, "trained_positions", None),
        "draft_vocabulary": f"{drafted} of {config.vocab_size} tokens" if drafted else "the target's",
        "sizes": {name: getattr(config, name, None) for name in SIZES},
        "rope_parameters": getattr(config, "rope_parameters", None),
        "tree_config": "the default of the device" if config.tree_config is None else dict(config.tree_config),
        "tuned_on": [f"{entry['machine']}, {entry['dtype']}" for entry in config.tuned or ()],
        "target": {**target, "fingerprint": fingerprint},
    }


def describe_look(look: Look) -> dict[str, Any]:
    """Describes heads of which only headers were read, as plain values."""
    from ..heads.auto import HEADS

    found, files = look.found, {name: f"{size:,} bytes" for name, size in look.sizes.items()}
    if found is None:
        return {
            "layout": "not known without the weights: pickled files have no header; --download reads and checks them",
            "files": files,
            "config.json": {name: look.raw_config[name] for name in HINTS if name in look.raw_config},
        }
    facts = _facts(found.config, HEADS[found.config.model_type].__name__, *_numbers(found.tensors))
    if look.needed:
        facts |= dict.fromkeys((*look.needed, "trained_positions"))
    return {
        "layout": TITLES[found.layout], **facts, "files": files, "assumed": list(found.notes),
        "load_heads_needs": [f"{name}=..." for name in look.needed], "checked": _unchecked(found),
    }  # fmt: skip


def describe_glance(found: Glance) -> dict[str, Any]:
    """Describes heads in our own layout from the first bytes of their files, as plain values."""
    return {
        "layout": TITLES[OURS], **_facts(found.config, found.head_class, found.parameters, found.dtype),
        "files": {name: f"{size:,} bytes" for name, size in found.sizes.items()}, "assumed": list(found.notes),
        "load_heads_needs": [], "checked": f"the header; only with --check: whether it fits config.json, {VALUES}",
    }  # fmt: skip


def _unchecked(found: StoredHeads) -> str:
    """Says what was checked, and what headers leave open."""
    if not any(tensor.is_meta for tensor in found.tensors.values()):
        return "all tensors"
    open_questions = [VALUES, "the fingerprint of the target" if found.layout != "specheads" else None]
    if getattr(found.config, "num_blocks", 1) > 1 and found.layout != "specheads":
        open_questions.append("whether repeated blocks are equal")
    return f"names, shapes and types; only with --check: {', '.join(filter(None, open_questions))}"


def run(args: argparse.Namespace) -> int:
    """Prints the facts. With `--check`, loads the heads first, so that any damage is an error."""
    note(args, f"Looking at {args.heads} ...")
    loaded = {**describe(load_heads_from(args, args.heads)), "checked": "all tensors"} if args.load else {}
    facts = _looked_at(args) | loaded
    emit(args, facts, "\n".join(f"{name:<26} {_line(value)}" for name, value in facts.items()))
    return 0


def _looked_at(args: argparse.Namespace) -> dict[str, Any]:
    """Facts from headers. For heads in this package's own layout, torch and transformers are not imported."""
    if not args.load and args.positions_per_specialist is None and Path(args.heads).is_dir():
        found = glance_at(Path(args.heads), MODEL_TYPES)
        if found is not None:
            return describe_glance(found)
    from ..checkpoints.look import look_at

    return describe_look(
        look_at(
            args.heads,
            revision=args.heads_revision,
            local_files_only=args.local_files_only,
            positions_per_specialist=args.positions_per_specialist,
            download=args.load,
        )
    )


def _line(value: Any) -> Any:
    """Formats a value on one line; of `choices`, only the number of paths is shown."""
    if isinstance(value, dict):
        items = {key: f"{len(item)} paths" if key == "choices" and item else item for key, item in value.items()}
        value = ", ".join(f"{key}={item}" for key, item in items.items() if item is not None)
    elif isinstance(value, list):
        value = "; ".join(str(item) for item in value)
    return "-" if value in (None, "") else value
