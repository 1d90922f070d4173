"""Arguments several subcommands share, and loading what they name."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..heads.base import DraftHead

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_heads_arguments(parser: argparse.ArgumentParser) -> None:
    """How heads are loaded: layout hints and draft tree."""
    parser.add_argument("--heads_revision", metavar="REV", help="branch, tag or commit of the heads on the Hub")
    parser.add_argument(
        "--positions_per_specialist", type=int, metavar="N", help="for PosS heads in their authors' layout"
    )
    parser.add_argument("--local_files_only", action="store_true", help="never ask the network")
    tree = parser.add_argument_group("draft tree (default: as saved with the heads)")
    tree.add_argument("--kind", choices=("chain", "static", "dynamic", "optimal"))
    tree.add_argument("--choices", type=json.loads, help="paths of a static tree, e.g. '[[0], [1], [0, 0]]'")
    tree.add_argument("--children", choices=("top_k", "sampled"), help="how children are chosen when sampling")
    tree.add_argument("--depth", type=int, help="draft positions")
    tree.add_argument("--top_k", type=int, dest="tree_top_k", help="children considered per node")
    tree.add_argument("--total_tokens", type=int, help="nodes verified per round, the root included")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Target and heads, their type and place."""
    parser.add_argument("--heads", required=True, help="draft heads: folder or Hub id")
    add_target_arguments(parser)
    add_heads_arguments(parser)


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Target, its type and place."""
    parser.add_argument("--target", required=True, help="target model: folder or Hub id")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="type of the weights (default: as stored)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... or 'auto' to spread over all accelerators")


def tree_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Tree options the user gave."""
    values = {"kind": args.kind, "depth": args.depth, "top_k": args.tree_top_k, "total_tokens": args.total_tokens,
              "choices": args.choices, "children": args.children}  # fmt: skip
    return {name: value for name, value in values.items() if value is not None}


def torch_dtype(name: str) -> torch.dtype | str:
    """`"auto"` or the torch dtype of that name."""
    import torch

    return name if name == "auto" else getattr(torch, name)


def load_heads_from(args: argparse.Namespace, source: str, **kwargs: Any) -> DraftHead:
    """Heads as the arguments ask for them."""
    from .. import load_heads

    return load_heads(
        source,
        revision=args.heads_revision,
        local_files_only=args.local_files_only,
        positions_per_specialist=args.positions_per_specialist,
        **kwargs,
        **tree_overrides(args),
    )


def load_pair(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DraftHead]:
    """Target, tokenizer and heads, the heads bound (and thereby checked) to the target."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..target.borrowed import BorrowedModules

    options = {"device_map": args.device, "local_files_only": args.local_files_only}
    hub = {"revision": args.heads_revision, "local_files_only": args.local_files_only}
    tokenizer = AutoTokenizer.from_pretrained(args.target, local_files_only=args.local_files_only)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch_dtype(args.dtype), **options).eval()
    heads = load_heads_from(args, args.heads, dtype=target.dtype, device_map={"": BorrowedModules.of(target).device})
    if heads.config.target_adapter is not None:
        heads.load_target_adapter(target, args.heads, **hub)
    return target, tokenizer, heads.bind(target)
