"""Pairs, which `demo`, `app` and `figures` share: a pair is a folder that holds a target and heads for it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import DTYPES, load_tokenizer, torch_dtype
from .display import note

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PREFERRED = ("poss3-longer", "poss3")


def add_pair_arguments(parser: argparse.ArgumentParser, **heads: Any) -> None:
    """Adds options for the models; `heads` are argparse options of `--heads`, such as `nargs` and `help`."""
    parser.add_argument(
        "--pair", type=Path, metavar="FOLDER", help="folder with a target and its heads (default: the shipped pair)"
    )
    parser.add_argument("--target", default="target", help="folder inside the pair, another folder, or a Hub id")
    parser.add_argument("--heads", **heads)


def add_placement_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for the dtype and device of the models."""
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type of the weights")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... or 'auto' to spread over all accelerators")


def find_pair(given: Path | None) -> Path:
    """Finds the folder of a pair: the given one, or the shipped one in the installed package or the checkout.

    Raises:
        FileNotFoundError: If the folder does not exist; the message says where it was searched.
    """
    here = Path(__file__)
    candidates = [given] if given else [here.parents[1] / "demo_pair", here.parents[2] / "model_cards"]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"the pair is not in {[str(folder) for folder in candidates]}; pass --pair FOLDER.")


def member(pair: Path | None, name: str) -> str:
    """Folder or Hub id of a model, which is a member of the pair (`None` for the shipped pair) or any other model.

    Raises:
        FileNotFoundError: If the name is neither an existing folder nor a Hub id.
    """
    if Path(name).is_dir():
        return name
    from ..publishing.card.facts import is_hub_id

    path = find_pair(pair) / name
    if not path.is_dir() and not is_hub_id(name):
        raise FileNotFoundError(f"{path} does not exist; pass a folder with a model, or a Hub id.")
    return str(path) if path.is_dir() else name


def heads_of_pair(folder: Path) -> list[str]:
    """Names of the draft heads in a pair's folder that draft for the unchanged target.

    Heads that were trained together with an adapter of the target (Medusa-2) are left out, because the adapter changes
    the text.

    Raises:
        FileNotFoundError: If there are none.
    """
    found = []
    for path in sorted(folder.glob("*/config.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        if str(config.get("model_type", "")).startswith("specheads_") and not config.get("target_adapter"):
            found.append(path.parent.name)
    if not found:
        raise FileNotFoundError(f"there are no draft heads in {folder}; name some with --heads.")
    return found


def preferred_of(names: Sequence[str]) -> str:
    """Chooses the default heads of a pair: of the shipped heads, those with the highest acceptance; else the first."""
    return next((name for name in PREFERRED if name in names), names[0])


def sources_of(pair: Path | None, names: list[str]) -> dict[str, str]:
    """Folders or Hub ids of heads, by display name.

    The display name of a folder is its last part, or the whole path as given if several share that part.
    """
    called = [Path(name).name if Path(name).is_dir() else name for name in names]
    return {
        name if called.count(short) > 1 else short: member(pair, name)
        for name, short in zip(names, called, strict=True)
    }


def load_placed_target(
    args: argparse.Namespace, heads: str = ""
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """Loads the target with the chosen dtype and device, its tokenizer, and the options for loading heads with it."""
    source = member(args.pair, args.target)
    note(args, f"Loading the target {source}{heads and f' and {heads}'} ...")
    from ..target.borrowed import BorrowedModules
    from ..target.loading import load_target

    tokenizer = load_tokenizer(source)
    options = {"dtype": torch_dtype(args.dtype), "device_map": args.device}
    target = load_target(source, **options).eval()
    return target, tokenizer, {"dtype": target.dtype, "device_map": {"": BorrowedModules.of(target).device}}
