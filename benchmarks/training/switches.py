"""Effects of single training switches on acceptance: POSS heads that are trained alike except for one switch.

    python -m benchmarks switches --target T --data runs/data --warm_start runs/eagle

All trainings start from the same EAGLE heads and see the same batches in the same order; each switch is trained with
several seeds. tau is measured with greedy trees on held-out prompts. The authors' trainer (arXiv 2506.03566, their
code) differs from the recipe: it clips gradients by value, counts masked scores as 0, and runs one backward per pass.
One backward per pass gives the same gradients up to rounding, so its difference shows how large a difference without
meaning can be. "Total variation" adds 1 - a to the losses; the authors' trainer has no such loss. Nothing is timed, so
the machine may be busy.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, set_seed

from hf_specheads import AutoDraftHead, DraftHead, load_heads
from hf_specheads.bootstrap import difference_interval
from hf_specheads.trainer import DraftHeadTrainer, DraftHeadTrainingArguments
from hf_specheads.trainer.data.sources import DataSource

from ..acceptance.acceptance import TREES, counts_of, generate_all, with_tree
from ..acceptance.questions import Counts, counts_as_text, counts_from, verdict
from ..results import Result, footnote, markdown_table, number
from ..setup import Inputs, add_generation_arguments, display_name, load_prompts, load_target

SOURCES = ("hf_specheads", "trainer")
RECIPE = {"max_grad_norm": 0.5, "warmup_steps": 0.01}
SWITCHES: dict[str, dict[str, Any]] = {
    "the recipe": {},
    "clipped by value": {"max_grad_norm": 0.0, "max_grad_value": 0.5},
    "not clipped": {"max_grad_norm": 0.0},
    "a backward per pass": {"backward": "per_pass"},
    "the authors' masks": {"upstream_masking": True},
    "no warm-up": {"warmup_steps": 0},
    "longer warm-up": {"warmup_steps": 0.1},
    "total variation": {"total_variation_loss_weight": 1.0},
    "all as the authors": {"max_grad_norm": 0.0, "max_grad_value": 0.5, "backward": "per_pass",
                           "upstream_masking": True, "warmup_steps": 0},
}  # fmt: skip
FIRST = next(iter(SWITCHES))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for target, data, starting heads and length of training."""
    add_generation_arguments(parser, None, prompts=["chats"], repeats=None)
    parser.add_argument("--data", required=True, help="as `train_data` of a recipe: file, folder or Hub id")
    parser.add_argument("--warm_start", default="model_cards/eagle", help="EAGLE heads that all trainings start from")
    parser.add_argument("--specialists", type=int, nargs=2, default=[2, 3], help="specialists, and positions of each")
    parser.add_argument("--switches", nargs="+", choices=list(SWITCHES), default=list(SWITCHES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--examples", type=int, default=8, help="examples per step")
    parser.add_argument("--max_length", type=int, default=256, help="longest example, in tokens")
    parser.add_argument("--learning_rate", type=float, default=3e-5)
    parser.add_argument("--tree", choices=list(TREES), default="16 nodes")
    parser.add_argument("--batch_size", type=int, default=16, help="prompts of similar length per batch")


# ---------------------------------------------------------------------- training
def train(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace, name: str, seed: int
) -> tuple[DraftHead, float]:
    """Trains POSS heads from the warm start, and returns them with their mean loss over the last tenth of the steps.
    All switches and seeds start from the same weights."""
    set_seed(0)
    count, positions = args.specialists
    heads = AutoDraftHead.from_target(
        target, "poss", from_heads=load_heads(args.warm_start, dtype=target.dtype),
        num_specialists=count, positions_per_specialist=positions,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = DraftHeadTrainer(
            model=heads,
            target=target,
            args=DraftHeadTrainingArguments(folder, **training_arguments(args, name, seed)),
            train_dataset=DataSource(args.data).load(),
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return heads.eval(), losses[-1]


def training_arguments(args: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Returns the recipe's training arguments with one switch changed."""
    common = {
        "max_steps": args.steps, "per_device_train_batch_size": args.examples, "max_length": args.max_length,
        "learning_rate": args.learning_rate, "lr_scheduler_type": "linear", "adam_beta2": 0.95, "weight_decay": 0.01,
        "feature_noise": 0.1, "seed": seed, "logging_steps": max(args.steps // 10, 1), "save_strategy": "no",
        "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "eval_acceptance_prompts": 0,
    }  # fmt: skip
    return {**common, **RECIPE, **SWITCHES[name]}


# ---------------------------------------------------------------------- measuring
def measure_one(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Inputs], args: argparse.Namespace,
    name: str, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Runs one training. Returns its loss, and tau with the counts it is computed from."""
    heads, loss = train(target, tokenizer, args, name, seed)
    heads.adaptive = False
    drafting = with_tree(heads.bind(target), args.tree, args.specialists[0] * args.specialists[1])
    counts = counts_of(generate_all(target, {"assistant_model": drafting}, prompts, args))
    tau = sum(counts[0]) / max(sum(counts[1]), 1)
    print(f"{name}, seed {seed}: loss {loss:.4f}, tau {tau:.3f}", file=sys.stderr, flush=True)
    return {"loss": loss, "acceptance_length": tau, "counts": counts_as_text(counts)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Trains every switch with every seed."""
    target, tokenizer = load_target(args)
    prompts = load_prompts(args.prompts, tokenizer, args.limit)
    measured = {
        name: [measure_one(target, tokenizer, prompts, args, name, seed) for seed in range(args.seeds)]
        for name in dict.fromkeys([FIRST, *args.switches])
    }
    named = ("steps", "examples", "max_length", "learning_rate", "specialists", "tree")
    facts = {name: getattr(args, name) for name in named}
    places = {"data": display_name(args.data), "warm_start": display_name(args.warm_start)}
    return {**facts, **places, "switches": measured}


# ---------------------------------------------------------------------- the table
def table(result: Result) -> str:
    """One row per switch: mean tau over seeds, tau of each seed, and the difference from the recipe."""
    recipe = pooled(result["switches"][FIRST])
    rows = []
    for name, seeds in result["switches"].items():
        taus = [one["acceptance_length"] for one in seeds]
        apart = difference_interval(pooled(seeds), recipe)
        told = ("", "") if name == FIRST else (str(apart), verdict(apart))
        loss = sum(one["loss"] for one in seeds) / len(seeds)
        rows.append((name, number(sum(taus) / len(taus), 3), ", ".join(number(tau, 3) for tau in taus), *told,
                     number(loss, 4)))  # fmt: skip
    header = ("POSS trained with", "tau", "tau of each seed", "difference from the recipe", "", "loss")
    return markdown_table(header, rows) + footnote(
        result, "{specialists[0]} specialists of {specialists[1]} draft positions, trained from {warm_start} for "
        "{steps} steps of {examples} x {max_length} tokens of {data}; greedy, {tree}",
        "95 % intervals over {num_prompts} prompts of every seed, paired by prompts",
    )  # fmt: skip


def pooled(seeds: Sequence[Result]) -> Counts:
    """Returns the tokens and rounds of every prompt, of all seeds one after the other."""
    counts = [counts_from(one["counts"]) for one in seeds]
    return [t for tokens, _ in counts for t in tokens], [r for _, rounds in counts for r in rounds]
