"""Trains draft heads from a recipe.

    specheads train --config poss3 target=org/model output_dir=runs/poss3 learning_rate=1e-5
    accelerate launch -m hf_specheads.trainer --config my_recipe.yaml

`--config` is a YAML file or the name of a recipe that comes with the package. `key=value` overrides recipe keys and
training arguments, `a.b=value` fields of a mapping (`heads.num_specialists=3 train_data.split=train[:5%]`).
Training resumes from the newest checkpoint in `output_dir` unless `resume=false`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .commands import add_output_options, failed
from .recipe import Recipe, read_recipe, shipped_recipes

if TYPE_CHECKING:
    from .trainer import DraftHeadTrainer


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("specheads train", description=__doc__, formatter_class=raw)
    parser.add_argument("--config", metavar="RECIPE", help=f"YAML file, or one of {', '.join(shipped_recipes())}")
    add_output_options(parser, "facts", "show no progress bars and no log of the steps")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="changes to the recipe")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the recipe, trains, and writes draft heads and facts.

    Returns:
        The exit code: 0; 2, with one line on stderr, for errors before the first step; 130 if interrupted.
    """
    options = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        return run(options)
    except KeyboardInterrupt:
        said = "the same command resumes from the newest checkpoint in its output_dir, or starts over if there is none"
        print(f"stopped; {said}", file=sys.stderr)
        return 130


def run(options: argparse.Namespace) -> int:
    """Does the work of [`main`]; lets `KeyboardInterrupt` pass."""
    try:
        recipe = read_recipe(options.config, options.changes)
        if options.quiet:
            hide_progress(recipe)
        if sys.stderr.isatty() and not options.quiet:
            data = ", ".join(source.path for source in recipe.train_sources)
            print(f"Loading {data} and {recipe.target} ...", file=sys.stderr, flush=True)
        from .building import build_trainer

        with redirect_stdout(sys.stderr if options.json else sys.stdout):
            trainer = build_trainer(recipe)
            checkpoint = newest_checkpoint(trainer, recipe)
    except Exception as error:  # libraries that load models and data raise errors of many classes
        return failed("train", options, error)
    if options.quiet:
        from transformers import PrinterCallback

        trainer.remove_callback(PrinterCallback)
    try:
        with redirect_stdout(sys.stderr if options.json else sys.stdout):
            facts = train(trainer, recipe, checkpoint)
    except Exception as error:  # errors of optimizer, scheduler or memory appear only when training starts
        if trainer.state.global_step > 0:
            raise
        return failed("train", options, error)
    if options.json and facts is not None:
        print(json.dumps(facts, default=str))
    return 0


def hide_progress(recipe: Recipe) -> None:
    """Switches off the progress bars of loading, tokenizing and training."""
    import datasets
    from transformers.utils import logging

    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    recipe.training["disable_tqdm"] = True


def newest_checkpoint(trainer: DraftHeadTrainer, recipe: Recipe) -> str | None:
    """Returns the checkpoint to resume from, `None` to start from scratch.

    Raises:
        OtherRunError: for a checkpoint of another recipe.
    """
    from transformers.trainer_utils import get_last_checkpoint

    output = str(trainer.args.output_dir)
    checkpoint = get_last_checkpoint(output) if recipe.resume and Path(output).is_dir() else None
    if checkpoint is not None:
        trainer.refuse_checkpoint(checkpoint)
    return checkpoint


def train(trainer: DraftHeadTrainer, recipe: Recipe, checkpoint: str | None = None) -> dict[str, Any] | None:
    """Trains, from a checkpoint if there is one, and writes draft heads and facts; returns the facts on the main
    process, `None` on the others."""
    from .building import describe
    from .facts import write_facts

    output = str(trainer.args.output_dir)
    if trainer.is_world_process_zero():
        print(describe(trainer, recipe, checkpoint), flush=True)
    started = time.time()
    trainer.train(resume_from_checkpoint=checkpoint)
    hours = (time.time() - started) / 3600
    metrics = final_metrics(trainer)
    trainer.run_facts = {"recipe": recipe.to_dict(), "metrics": metrics, "hours": hours}
    trainer.save_model(output)  # also pushes under push_to_hub=true
    if not trainer.is_world_process_zero():
        return None
    facts = trainer.facts()
    path = write_facts(facts, output)
    summary = ", ".join(f"{k} {v:.3f}" for k, v in metrics.items() if k in ("eval_loss", "eval_acceptance_length"))
    print(f"trained {trainer.state.global_step} steps in {hours:.3f} h{': ' if summary else ''}{summary}")
    print(f"heads and {path.name} are in {output}")
    return facts


def final_metrics(trainer: DraftHeadTrainer) -> dict[str, float]:
    """Returns the metrics of the final draft heads: those of an evaluation at the last step (epoch-wise evaluation has
    one), else of an evaluation now; empty without evaluation data."""
    if trainer.eval_dataset is None:
        return {}
    state = trainer.state
    newest: dict[str, float] = next((entry for entry in reversed(state.log_history) if "eval_loss" in entry), {})
    if newest.get("step") != state.global_step or trainer.args.load_best_model_at_end:
        return trainer.evaluate()
    return {name: value for name, value in newest.items() if name != "step"}


if __name__ == "__main__":
    sys.exit(main())
