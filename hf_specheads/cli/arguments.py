"""Arguments that several subcommands share, and loading of the models that they name."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .display import note

if TYPE_CHECKING:  # at run time these are imported inside functions, so that `--help` does not wait for them
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..heads.base import DraftHead

# Every folder with a tokenizer contains a file that matches one of these patterns.
TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
DTYPES = ("auto", "float32", "bfloat16", "float16")


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Prints descriptions as written, and adds the default to the help of options with a non-boolean default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or isinstance(action.default, bool) or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Parser whose options are written with dashes; underscores are accepted too."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"formatter_class": Formatter, **kwargs})

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        return super().parse_known_args([*map(dashed, words[:end]), *words[end:]], namespace)


def dashed(word: str) -> str:
    """Turns `--max_new_tokens=8` into `--max-new-tokens=8`; words that are not options are unchanged."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the output options that all commands share."""
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print only JSON to stdout")
    output.add_argument("--quiet", action="store_true", help="print no progress, which is shown only on a terminal")
    add_debug_argument(output, default=argparse.SUPPRESS)  # keeps a `--debug` that was given before the command


def add_debug_argument(parser: Any, default: Any = False) -> None:
    """Adds `--debug`, which all commands share."""
    parser.add_argument("--debug", action="store_true", default=default, help="show where an error came from")


def add_heads_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for loading heads: hints on the layout, and the draft tree."""
    parser.add_argument("--heads-revision", metavar="REV", help="branch, tag or commit of the heads on the Hub")
    parser.add_argument(
        "--positions-per-specialist",
        type=int,
        metavar="N",
        help="draft positions per specialist of PosS heads in their authors' layout",
    )
    parser.add_argument(
        "--method",
        choices=("mtp",),
        help="use the MTP layers in a target's own checkpoint; name the target as the heads",
    )
    parser.add_argument(
        "--anchor-slot",
        choices=("idle", "drafts"),
        help="first slot of block drafters whose files do not define it (JetSpec)",
    )
    parser.add_argument(
        "--local-files-only", action="store_true", help="read local files only, without network access"
    )
    tree = parser.add_argument_group("draft tree (default: as tuned or saved with the heads)")
    tree.add_argument("--kind", choices=("chain", "static", "dynamic", "optimal"), help="kind of tree")
    tree.add_argument("--choices", type=json.loads, help="paths of a static tree, e.g. '[[0], [1], [0, 0]]'")
    tree.add_argument("--children", choices=("top_k", "sampled"), help="how children are chosen when sampling")
    tree.add_argument("--depth", type=int, metavar="N", help="number of draft positions")
    tree.add_argument("--top-k", type=int, metavar="N", dest="tree_top_k", help="children considered per node")
    tree.add_argument("--total-tokens", type=int, metavar="N", help="nodes verified per round, the root included")
    tree.add_argument("--lookup", type=int, metavar="N", help="additional nodes, copied from the text itself")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for target and heads, their dtype and device."""
    parser.add_argument("--heads", required=True, help="draft heads: folder or Hub id")
    add_target_arguments(parser)
    add_heads_arguments(parser)


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for the target, its dtype and device."""
    parser.add_argument("--target", required=True, help="target model: folder or Hub id")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="type of the weights (default: as stored)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... or 'auto' to spread over all accelerators")


def tree_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the draft tree options that the user gave."""
    values = {"kind": args.kind, "depth": args.depth, "top_k": args.tree_top_k, "total_tokens": args.total_tokens,
              "choices": args.choices, "children": args.children, "lookup": args.lookup}  # fmt: skip
    return {name: value for name, value in values.items() if value is not None}


def torch_dtype(name: str) -> torch.dtype | str:
    """Returns the torch dtype of that name, or `"auto"` unchanged."""
    import torch

    return name if name == "auto" else getattr(torch, name)


def load_target(args: argparse.Namespace, source: str) -> PreTrainedModel:
    """Loads a target on the CPU in its stored dtype, for commands that only read its weights."""
    note(args, f"Loading the target {source} ...")
    from ..target import loading

    return loading.load_target(source, dtype="auto", local_files_only=args.local_files_only).eval()


def load_tokenizer(source: str, **options: Any) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a target.

    Args:
        source: Folder or Hub id of the target.
        **options: Passed to `from_pretrained`.

    Raises:
        FileNotFoundError: If a folder has no tokenizer; transformers' own error is less clear.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, **options)
    except (ValueError, OSError) as error:
        if not Path(source).is_dir() or any(list(Path(source).glob(pattern)) for pattern in TOKENIZER_FILES):
            raise
        raise FileNotFoundError(
            f"the folder {source!r} holds no tokenizer (neither tokenizer.json nor other tokenizer files); save the "
            "target's tokenizer there: `AutoTokenizer.from_pretrained(ORIGINAL).save_pretrained(FOLDER)`."
        ) from error


def load_heads_from(args: argparse.Namespace, source: str, **kwargs: Any) -> DraftHead:
    """Loads heads with the options that the user gave."""
    note(args, f"Loading the heads {source} ...")
    from .. import load_heads

    return load_heads(
        source,
        revision=args.heads_revision,
        local_files_only=args.local_files_only,
        positions_per_specialist=args.positions_per_specialist,
        method=args.method,
        anchor_slot=args.anchor_slot,
        **kwargs,
        **tree_overrides(args),
    )


def load_pair(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DraftHead]:
    """Loads target, tokenizer and heads, and binds the heads to the target, which checks that they fit."""
    target, tokenizer, heads = load_unbound_pair(args)
    return target, tokenizer, heads.bind(target)


def load_unbound_pair(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DraftHead]:
    """Loads target, tokenizer and heads without checking that the heads were made for the target."""
    note(args, f"Loading the target {args.target} ...")
    from ..target import loading
    from ..target.borrowed import BorrowedModules

    options = {"device_map": args.device, "local_files_only": args.local_files_only}
    hub = {"revision": args.heads_revision, "local_files_only": args.local_files_only}
    tokenizer = load_tokenizer(args.target, local_files_only=args.local_files_only)
    target = loading.load_target(args.target, dtype=torch_dtype(args.dtype), **options).eval()
    heads = load_heads_from(args, args.heads, dtype=target.dtype, device_map={"": BorrowedModules.of(target).device})
    if heads.config.target_adapter is not None:
        heads.load_target_adapter(target, args.heads, **hub)
    return target, tokenizer, heads
