"""Show what draft heads are: method, sizes, draft tree, target; every tensor is checked on the way."""

from __future__ import annotations

import argparse
import json
import logging
from typing import TYPE_CHECKING, Any

from .arguments import add_heads_arguments, load_heads_from

if TYPE_CHECKING:
    from ..modeling import DraftHead


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The heads, and the form of the answer."""
    parser.add_argument("heads", help="folder or Hub id")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_heads_arguments(parser)


def describe(heads: DraftHead) -> dict[str, Any]:
    """Facts about loaded heads, as plain values."""
    config = heads.config
    target = dict(config.target or {})
    fingerprint = target.pop("fingerprint", None)
    return {
        "class": type(heads).__name__,
        "method": config.method,
        "parameters": sum(parameter.numel() for parameter in heads.parameters()),
        "dtype": str(heads.dtype).removeprefix("torch."),
        "num_specialists": getattr(config, "num_specialists", 1),
        "positions_per_specialist": getattr(config, "positions_per_specialist", None),
        "trained_positions": getattr(config, "trained_positions", None),
        "sizes": {
            name: getattr(config, name, None)
            for name in ("vocab_size", "feature_size", "embedding_size", "hidden_size", "intermediate_size",
                         "num_attention_heads", "num_key_value_heads", "head_dim", "fc_bias", "attention_bias")
        },
        "rope_parameters": getattr(config, "rope_parameters", None),
        "tree_config": heads.tree_config.to_dict(),
        "target": {**target, "fingerprint": "stored" if fingerprint else "not stored"},
    }  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Loads the heads, so damage of any kind is an error, and prints the facts."""
    logging.getLogger("hf_specheads.hub").setLevel(logging.INFO)
    facts = describe(load_heads_from(args, args.heads))
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key}={item}" for key, item in value.items() if item is not None)
        print(f"{name:<26} {value if value is not None else '-'}")
    return 0
