"""What `demo`, `app` and `figures` share: a folder that holds a target and heads for it."""

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
    """Which models; `heads` says how many there may be and which by default."""
    parser.add_argument(
        "--pair", type=Path, metavar="FOLDER", help="with target and heads (default: the shipped pair)"
    )
    parser.add_argument("--target", default="target", help="folder inside the pair's, another folder, or a Hub id")
    parser.add_argument("--heads", **heads)


def add_placement_arguments(parser: argparse.ArgumentParser) -> None:
    """What the models are loaded as, and where."""
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type of the weights")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... or 'auto' to spread over all accelerators")


def find_pair(given: Path | None) -> Path:
    """The folder of the shipped pair: as given, as installed with the package, or in the checkout it runs from.

    Raises:
        FileNotFoundError: saying where it looked.
    """
    here = Path(__file__)
    candidates = [given] if given else [here.parents[1] / "demo_pair", here.parents[2] / "model_cards"]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"the pair is not in {[str(folder) for folder in candidates]}; pass --pair FOLDER.")


def member(pair: Path | None, name: str) -> str:
    """A model of the pair (`None` for the shipped one), or any other.

    Raises:
        FileNotFoundError: for a folder that does not exist.
    """
    if Path(name).is_dir():
        return name
    from ..publishing.card.facts import is_hub_id

    path = find_pair(pair) / name
    if not path.is_dir() and not is_hub_id(name):
        raise FileNotFoundError(f"{path} does not exist; pass a folder with a model, or a Hub id.")
    return str(path) if path.is_dir() else name


def heads_of_pair(folder: Path) -> list[str]:
    """Names of the draft heads in a pair's folder that serve the target as it is: those trained together with an
    adapter of the target (Medusa-2) change its text, and are left out.

    Raises:
        FileNotFoundError: if there are none.
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
    """Of the heads of a pair those that are shown where nobody chose: of the shipped ones, those that accept most."""
    return next((name for name in PREFERRED if name in names), names[0])


def sources_of(pair: Path | None, names: list[str]) -> dict[str, str]:
    """Folders or Hub ids of heads, by what they are called: folders by their last name, or as they are given where
    several share it."""
    called = [Path(name).name if Path(name).is_dir() else name for name in names]
    return {
        name if called.count(short) > 1 else short: member(pair, name)
        for name, short in zip(names, called, strict=True)
    }


def load_placed_target(
    args: argparse.Namespace, heads: str = ""
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict[str, Any]]:
    """The target as the arguments place it, its tokenizer, and with which options heads are loaded beside it."""
    source = member(args.pair, args.target)
    note(args, f"Loading the target {source}{heads and f' and {heads}'} ...")
    from ..target.borrowed import BorrowedModules
    from ..target.loading import load_target

    tokenizer = load_tokenizer(source)
    options = {"dtype": torch_dtype(args.dtype), "device_map": args.device}
    target = load_target(source, **options).eval()
    return target, tokenizer, {"dtype": target.dtype, "device_map": {"": BorrowedModules.of(target).device}}
