"""Trains the shipped draft heads: every method on the same answers in the same order, with the same compute.

    python -m hf_specheads.trainer.shipped_pair.heads --target runs/target/final --answers runs/answers.jsonl \\
        --features runs/features --output_dir runs/heads

The runs are defined in `runs.py`. Compute is counted in floating-point operations and includes the target's forward,
although features come from a cache (see `feature_cache.py`). Batches, optimizer and learning rates are the same. Runs
whose folder is complete are skipped, so the script can be called again after an interruption, and several calls may
train different runs at the same time. `--only studies` trains the runs behind the studies in `docs/findings.md`.
"""

import argparse
import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from hf_specheads import AutoDraftHead, DraftHead, DraftTreeConfig, load_heads
from hf_specheads.trainer import (
    DraftHeadTrainer,
    DraftHeadTrainingArguments,
    JointTrainer,
    JointTrainingArguments,
    frequent_tokens,
)

from ..devices.utilisation import count_operations
from ..facts import FACTS, write_facts
from .answers import AnswerBlocks, corpus_answer, read_answers
from .chat import prompt_tokens
from .costs import read_costs
from .feature_cache import BLOCK, CachedBlocks, cached_layers, stack_blocks
from .optimizer import MatrixMomentum
from .runs import COMMON, DEPTH, RELEASED, RUNS, STUDIES, Run
from .tasks import FAMILIES, example_at

BATCH = 2
VOCABULARY_BLOCKS = 2048  # training sequences that a draft vocabulary is chosen from
HELD_OUT_PER_FAMILY = 4  # held-out chats per family that evaluations during training use
HELD_OUT_SEED = 1  # seed of chats and prompts for evaluations during training; reported numbers use other chats


def folder_of(name: str, args: argparse.Namespace) -> Path:
    """Returns the folder of a run; its name includes the seed unless the seed is 0."""
    return args.output_dir / (name if args.seed == 0 else f"{name}-seed{args.seed}")


def training_arguments(run: Run, args: argparse.Namespace, folder: Path, steps: int) -> DraftHeadTrainingArguments:
    """Returns the training arguments of a run; runs differ only in passes, steps and options of their method."""
    arguments = JointTrainingArguments if run.joint else DraftHeadTrainingArguments
    return arguments(
        output_dir=str(folder / "run"),
        max_steps=steps,
        num_passes=run.passes,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=8,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        max_grad_norm=1.0,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=max(steps // 4, 1),
        eval_on_start=run.starts_from is None,
        eval_acceptance_prompts=args.eval_prompts,
        eval_max_new_tokens=96,
        save_strategy="no",
        max_length=BLOCK,
        seed=args.seed,
        data_seed=args.seed,
        use_cpu=not torch.cuda.is_available(),
        **{**COMMON, **run.training},
    )


class HeadTraining:
    """Trains runs for one target on the same data.

    Args:
        target: The target, fp32.
        tokenizer: Its tokenizer.
        args: Arguments of the command line.
    """

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace):
        self.target, self.tokenizer, self.args = target, tokenizer, args
        self.train, self.held_out, self.prompts = load_data(tokenizer, args)
        corpus = [] if args.corpus_answers is None else read_answers(args.corpus_answers)
        self.corpus = AnswerBlocks(corpus, BLOCK, tokenizer.pad_token_id)

    @cached_property
    def budget(self) -> float:
        """Floating-point operations of a run with a share of 1, that is, of `--eagle_steps` EAGLE steps."""
        run = RUNS["eagle-base"]
        return self.args.eagle_steps * self.step_flops(run, self.new_heads(run))

    def new_heads(self, run: Run) -> DraftHead:
        """Creates the draft heads of a run, from random weights or from an earlier run. If the run has a draft
        vocabulary, it is chosen from the training data."""
        args = self.args
        base = None if run.starts_from is None else load_heads(folder_of(run.starts_from, args), dtype=torch.float32)
        tree = DraftTreeConfig(depth=DEPTH, top_k=args.top_k, total_tokens=args.total_tokens).replace(**run.tree)
        options = {**run.options}
        if "block_size" in options:  # block drafters read the same layers as EAGLE-3, because these are in the cache
            options["feature_layers"] = cached_layers(self.target.config.num_hidden_layers)[:-1]
        if size := options.get("draft_vocab_size"):
            seen = [self.train[index] for index in range(min(VOCABULARY_BLOCKS, len(self.train)))]
            options["draft_token_ids"] = frequent_tokens(seen, size, self.target.config.vocab_size)
        heads = AutoDraftHead.from_target(self.target, run.method, from_heads=base, tree_config=tree, **options)
        heads.config.target = {**(heads.config.target or {}), "name": args.target_name}
        return heads

    def blocks(self, run: Run, heads: DraftHead) -> CachedBlocks | AnswerBlocks:
        """Returns the training data of a run. Joint training changes the features, so it does not use cached ones."""
        if run.joint:
            return self.train
        layers = heads.feature_layers or (-1,)
        if run.on_corpus:
            return CachedBlocks(self.corpus, self.args.corpus_features, layers)
        return CachedBlocks(self.train, self.args.features, layers)

    def trainer(self, run: Run, heads: DraftHead, folder: Path, steps: int) -> DraftHeadTrainer:
        """Builds the trainer of a run. Joint training uses AdamW, because `MatrixMomentum` does not know the
        adapter."""
        trainer_class: type[DraftHeadTrainer] = JointTrainer if run.joint else DraftHeadTrainer
        rates = learning_rates(run, self.args)
        optimizer = None if run.joint else MatrixMomentum(heads, rates["matrix_lr"], rates["lr"])
        return trainer_class(
            model=heads,
            target=self.target,
            args=training_arguments(run, self.args, folder, steps),
            train_dataset=self.blocks(run, heads),
            eval_dataset=self.held_out,
            processing_class=self.tokenizer,
            data_collator=stack_blocks,
            eval_prompts=self.prompts,
            optimizers=(optimizer, None),
        )

    def step_flops(self, run: Run, heads: DraftHead) -> int:
        """Counts the floating-point operations of one step, and adds the target's forward if the cache replaces it."""
        trainer = self.trainer(run, heads, self.args.output_dir / "counting", 1)
        blocks, body = self.blocks(run, heads), sum(p.numel() for p in self.target.get_decoder().layers.parameters())
        batch = stack_blocks([blocks[index] for index in range(BATCH)])
        _, counted = count_operations(lambda: trainer.training_step(trainer.model, batch))
        trainer.model.zero_grad()
        trainer.reset_losses()
        saved = 2 * body * BATCH * BLOCK if "final_features" in batch else 0
        return saved + counted

    def run(self, name: str) -> None:
        """Trains one run and saves draft heads (bf16) and facts into its folder."""
        run, args, folder = RUNS[name], self.args, folder_of(name, self.args)
        set_seed(args.seed)
        heads = self.new_heads(run)
        per_step = self.step_flops(run, heads)
        whole = args.eagle_steps if run.equal_steps else self.budget / per_step
        steps = 4 * max(1, round(run.share * whole / 4))
        trainer = self.trainer(run, heads, folder, steps)
        started = time.time()
        trainer.train()
        hours = (time.time() - started) / 3600
        trainer.run_facts = {"recipe": {"run": name, **asdict(run)}, "metrics": last_metrics(trainer), "hours": hours}
        command = "python -m hf_specheads.trainer.shipped_pair.heads"
        facts = trainer.facts() | {
            "name": name,
            "command": f"{command} --only {name} --eagle_steps {args.eagle_steps} --seed {args.seed}",
            "optimizer": "adamw" if run.joint else learning_rates(run, args),
            "tokens": steps * BATCH * BLOCK,
            "training_flops": per_step * steps,
            "answers_fingerprint": args.answers_fingerprint,
            "data": data_costs(args),
        }
        for replaced in ("output_dir", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2"):
            del facts["arguments"][replaced]
        heads.to(torch.bfloat16).save_pretrained(folder)
        write_facts(facts, folder)  # must come last, because it marks the run as complete


def data_costs(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Returns the costs of the answers and of their features, where known."""
    return {
        name: spent for name, path in (("answers", args.answers), ("features", args.features))
        if (spent := read_costs(path)) is not None
    }  # fmt: skip


def learning_rates(run: Run, args: argparse.Namespace) -> dict[str, float]:
    """Returns the learning rates of a run; they are halved for runs that start from trained draft heads."""
    slower = 1.0 if run.starts_from is None else 0.5
    return {"matrix_lr": slower * args.matrix_lr, "lr": slower * args.learning_rate}


def last_metrics(trainer: DraftHeadTrainer) -> dict[str, float]:
    """Returns the metrics of the latest evaluation."""
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    return evaluations[-1] if evaluations else {}


Data = tuple[AnswerBlocks, AnswerBlocks, list[list[int]]]


def load_data(tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> Data:
    """Loads sequences of the target's answers, sequences of held-out chats, and held-out prompts."""
    args.answers_fingerprint = hashlib.sha256(args.answers.read_bytes()).hexdigest()[:16]
    train = AnswerBlocks(read_answers(args.answers), BLOCK, tokenizer.pad_token_id)
    asked = [
        example_at(family, index, HELD_OUT_SEED, held_out=True)
        for index in range(HELD_OUT_PER_FAMILY)
        for family in FAMILIES
    ]
    chats = [corpus_answer(example, tokenizer) for example in asked]
    prompts = [prompt_tokens(example, tokenizer) for example in asked[: args.eval_prompts]]
    return train, AnswerBlocks(chats, BLOCK, tokenizer.pad_token_id), prompts


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of the trained target")
    parser.add_argument("--target_name", default="chat-target")
    parser.add_argument("--answers", type=Path, required=True, help="file written by answers.py")
    parser.add_argument("--features", type=Path, required=True, help="folder written by feature_cache.py")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument(
        "--corpus_answers", type=Path, help="for runs on the corpus: file written by `answers.py --from_corpus`"
    )
    parser.add_argument("--corpus_features", type=Path, help="folder with features of --corpus_answers")
    parser.add_argument(
        "--only",
        nargs="+",
        default=["released"],
        metavar="RUN",
        help="`released`, `studies`, or names of runs; default: those that are released",
    )
    parser.add_argument("--eagle_steps", type=int, default=2048, help="compute of the first stage, in EAGLE steps")
    parser.add_argument("--matrix_lr", type=float, default=0.02)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--eval_prompts", type=int, default=10)
    parser.add_argument("--top_k", type=int, default=4)
    parser.add_argument("--total_tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="runs with a seed other than 0 go to separate folders")
    args = parser.parse_args()
    args.only = chosen_runs(args.only)
    if args.corpus_answers is None and any(RUNS[name].on_corpus for name in args.only):
        parser.error("runs on the corpus want --corpus_answers and --corpus_features.")
    return args


def chosen_runs(names: Sequence[str]) -> list[str]:
    """Returns names of runs in the given order, with `released` and `studies` expanded.

    Raises:
        SystemExit: for an unknown run.
    """
    groups = {"released": list(RELEASED), "studies": list(STUDIES)}
    if unknown := [name for name in names if name not in groups and name not in RUNS]:
        raise SystemExit(f"there is no run {unknown[0]!r}; choose from {', '.join([*groups, *RUNS])}.")
    return list(dict.fromkeys(run for name in names for run in groups.get(name, [name])))


def main() -> None:
    args = parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    training = HeadTraining(target, tokenizer, args)
    for name in args.only:
        if not (folder_of(name, args) / FACTS).exists():
            training.run(name)


if __name__ == "__main__":
    main()
