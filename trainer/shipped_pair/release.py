"""Writes the trained pair to `model_cards/` in the layout of Hub repositories, with cards from measured results.

    python -m hf_specheads.trainer.shipped_pair.release --target runs/target/final --heads runs/heads

Run it once to create the folders, measure with `benchmarks/`, and run it again to add the results to the cards.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from hf_specheads import DraftTreeConfig
from hf_specheads.publishing.card.facts import EVAL_RESULTS, TRAINING_FACTS, read_evaluations
from hf_specheads.publishing.card.render import write_card
from hf_specheads.publishing.curves import read_history
from hf_specheads.publishing.figures import draw_figures
from hf_specheads.target.adapter import ADAPTER_FOLDER

# Trained but too large to ship: POSS-1, POSS-2, the control (one layer as large as POSS-3), and Hydra.
SHIPPED = ("eagle", "hass", "poss3", "poss3-longer", "poss3-lora", "medusa", "hydra-plus", "eagle3",
           "poss3-eagle3", "dflash", "dspark", "peagle")  # fmt: skip
LIMITS = (
    "A small model trained for some hours: it shows how draft heads work and what they cost. It answers the kinds of "
    "tasks that it was trained on, and nothing else.",
)
LICENSE = "apache-2.0"
TRAINING_TEXT = (
    "Trained on chats that programs of this project write, and on the Python standard library's source (Python "
    "Software Foundation License)."
)
LANGUAGE = ["en", "code"]


def copy_model(source: Path, folder: Path) -> None:
    """Copies config, weights, tokenizer and facts, but not the optimizer state of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.json", "*.jinja", "*.safetensors"):
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    if (source / ADAPTER_FOLDER).is_dir():
        shutil.copytree(source / ADAPTER_FOLDER, folder / ADAPTER_FOLDER, dirs_exist_ok=True)


def trim_facts(folder: Path) -> None:
    """Removes all entries of the training log except evaluations, which are what readers of the card need."""
    path = folder / TRAINING_FACTS
    facts = json.loads(path.read_text(encoding="utf-8"))
    if "log_history" in facts:
        facts["log_history"] = [entry for entry in facts["log_history"] if "eval_loss" in entry]
    path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def set_tree(folder: Path, tree: dict[str, Any]) -> None:
    """Writes the measured default tree into the saved config."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tree_config"] = DraftTreeConfig().replace(**tree).to_dict()
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def evaluations(name: str, results: Path) -> list[dict[str, Any]]:
    """Returns the results of `python -m benchmarks speedup` for one draft head, one entry per prompt set; empty if it
    has not been run."""
    path = results / "speedup.json"
    if not path.exists():
        return []
    measured = json.loads(path.read_text(encoding="utf-8"))
    entries = []
    for prompts, sides in measured["prompt_sets"].items():
        side, plain = sides.get(name), sides["plain generate"]
        if side is None:
            continue
        entries.append(
            {
                "task": prompts,
                "acceptance_length": side["acceptance_length"],
                "pos_acc": side["pos_acc"],
                "speed_up": side["speed_up"],
                "tokens_per_second": side["tokens_per_second"],
                "plain_tokens_per_second": plain["tokens_per_second"],
                "identical": side["identical"],
                "tree_config": measured["trees"][name],
                "hardware": f"{measured['provenance']['processor']}, {measured['dtype']}",
            }
        )
    return entries


def release(args: argparse.Namespace) -> None:
    """Creates all folders and renders their cards."""
    target = args.output_dir / "target"
    trees = json.loads(args.trees.read_text(encoding="utf-8")) if args.trees else {}
    if args.target is not None:
        copy_model(args.target, target)
    write_card(target, license=LICENSE, target_license=TRAINING_TEXT, language=LANGUAGE, limits=[*LIMITS])
    for name in SHIPPED:
        folder = args.output_dir / name
        if args.heads is not None and (args.only is None or name in args.only):
            copy_model(args.heads / name, folder)
            trim_facts(folder)
        if tree := trees.get(name):
            set_tree(folder, tree)
        if entries := evaluations(name, args.results):
            (folder / EVAL_RESULTS).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
        method = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("method", "")
        draw_figures(folder, read_evaluations(folder / EVAL_RESULTS), read_history(folder / TRAINING_FACTS), method)
        write_card(folder, license=LICENSE, target_license=TRAINING_TEXT, language=LANGUAGE, limits=[*LIMITS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", type=Path, help="trained target; default: leave the released one")
    parser.add_argument("--heads", type=Path, help="folder of all trained heads; default: leave the released ones")
    parser.add_argument("--only", nargs="+", choices=SHIPPED, help="draft heads to copy; default: all")
    parser.add_argument("--output_dir", type=Path, default=Path("model_cards"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--trees", type=Path, help="JSON file with the default tree of every head, by its name")
    release(parser.parse_args())


if __name__ == "__main__":
    main()
