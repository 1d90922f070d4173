"""Trains draft heads from a recipe.

    python -m hf_specheads.trainer --config poss3 target=org/model output_dir=runs/poss3 learning_rate=1e-5
    accelerate launch -m hf_specheads.trainer --config my_recipe.yaml

`--config` is a YAML file or the name of a recipe that comes with the package; `key=value` changes recipe keys and
training arguments, `a.b=value` fields of a mapping (`heads.num_specialists=3 train_data.split=train[:5%]`).
Goes on from the newest checkpoint in `output_dir` unless `resume=false`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.trainer_utils import get_last_checkpoint

from hf_specheads import AutoDraftHead, load_heads

from .arguments import DraftHeadTrainingArguments
from .data import prepare_dataset
from .facts import write_facts
from .joint import JointTrainer, JointTrainingArguments
from .recipe import Recipe, RecipeError, describe, read_recipe, shipped_recipes
from .trainer import DraftHeadTrainer
from .vocabulary import frequent_tokens


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m hf_specheads.trainer", description=__doc__, formatter_class=raw)
    parser.add_argument("--config", help=f"YAML file, or one of {', '.join(shipped_recipes())}")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="changes to the recipe")
    return parser.parse_args(argv)


def training_arguments(recipe: Recipe) -> DraftHeadTrainingArguments:
    """Training arguments of a recipe; evaluation at every epoch's end unless the recipe says otherwise.

    Raises:
        RecipeError: if there is no `output_dir`.
    """
    if not recipe.training.get("output_dir"):
        raise RecipeError("the recipe does not say where to write; pass output_dir=...")
    evaluated = recipe.eval_examples > 0 or recipe.eval_data is not None
    defaults: dict[str, Any] = {"eval_strategy": "epoch" if evaluated else "no", "report_to": []}
    arguments = JointTrainingArguments if recipe.trains_target else DraftHeadTrainingArguments
    return arguments(**{**defaults, **recipe.training})


def load_datasets(recipe: Recipe) -> tuple[Any, Any]:
    """Training and evaluation data; without `eval_data`, evaluation takes the first examples of the training data."""
    train = recipe.train_data.load()
    if recipe.eval_data is not None:
        held_out = recipe.eval_data.load()
        return train, held_out.select(range(min(recipe.eval_examples or len(held_out), len(held_out))))
    if recipe.eval_examples == 0:
        return train, None
    if len(train) <= recipe.eval_examples:
        raise RecipeError(
            f"train_data has {len(train)} examples, too few to hold out eval_examples={recipe.eval_examples}; "
            "set eval_examples lower, or give eval_data."
        )
    return train.select(range(recipe.eval_examples, len(train))), train.select(range(recipe.eval_examples))


def build_trainer(recipe: Recipe) -> DraftHeadTrainer:
    """Loads target, tokenizer and data, makes the heads, and puts them into a trainer."""
    args = training_arguments(recipe)
    set_seed(args.seed)
    hub = {"revision": recipe.target_revision} if recipe.target_revision else {}
    dtype = recipe.target_dtype if recipe.target_dtype == "auto" else getattr(torch, recipe.target_dtype)
    target = AutoModelForCausalLM.from_pretrained(recipe.target, dtype=dtype, **hub)
    tokenizer = AutoTokenizer.from_pretrained(recipe.target, **hub)
    heads_dtype = getattr(torch, recipe.heads_dtype)
    base = None
    if recipe.from_heads is not None:
        base = load_heads(
            recipe.from_heads, dtype=heads_dtype, positions_per_specialist=recipe.from_positions_per_specialist
        )
        if base.config.target_adapter is not None:
            base.load_target_adapter(target)
    with args.main_process_first(desc="loading data"):
        train, held_out = load_datasets(recipe)
        options = dict(recipe.heads)
        size = options.get("draft_vocab_size")
        if size is not None and base is None and "draft_token_ids" not in options:
            train = prepare_dataset(train, tokenizer, args.max_length)
            vocab_size = target.config.get_text_config(decoder=True).vocab_size
            options["draft_token_ids"] = frequent_tokens(train, min(size, vocab_size), vocab_size)
            options["draft_vocab_size"] = len(options["draft_token_ids"])
    heads = AutoDraftHead.from_target(target, recipe.method, from_heads=base, dtype=heads_dtype, **options)
    trainer_class: type[DraftHeadTrainer] = JointTrainer if recipe.trains_target else DraftHeadTrainer
    return trainer_class(
        model=heads,
        target=target,
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        recipe = read_recipe(options.config, options.changes)
        trainer = build_trainer(recipe)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    output = str(trainer.args.output_dir)
    checkpoint = get_last_checkpoint(output) if recipe.resume and Path(output).is_dir() else None
    if trainer.is_world_process_zero():
        print(describe(trainer, recipe, checkpoint), flush=True)
    started = time.time()
    trainer.train(resume_from_checkpoint=checkpoint)
    hours = (time.time() - started) / 3600
    metrics = trainer.evaluate() if trainer.eval_dataset is not None else {}
    trainer.run_facts = {"recipe": recipe.to_dict(), "metrics": metrics, "hours": hours}
    trainer.save_model(output)  # and pushes, under push_to_hub=true
    if trainer.is_world_process_zero():
        path = write_facts(trainer.facts(), output)
        summary = ", ".join(f"{k} {v:.3f}" for k, v in metrics.items() if k in ("eval_loss", "eval_acceptance_length"))
        print(f"trained {trainer.state.global_step} steps in {hours:.3f} h{': ' if summary else ''}{summary}")
        print(f"heads and {path.name} are in {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
