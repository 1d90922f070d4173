"""Trains the shipped heads: every method on the same answers in the same order, with the same compute.

    python -m hf_specheads.trainer.shipped_pair.heads --target runs/target/final --answers runs/answers.jsonl \\
        --features runs/features --output_dir runs/heads

Compute is counted in floating-point operations (the target's forward included, although the features come from a
cache, see `feature_cache.py`), in units of EAGLE steps. Methods of several detached passes (HASS, POSS) start from the
EAGLE heads of the first stage: six-pass objectives trail one-pass training for long
(`benchmarks/results/history/early_switch.json`). EAGLE itself and the control get the same two stages; methods that
cannot start from EAGLE heads get the compute of both stages in one run. Same batches, same optimiser, same learning
rates. Runs whose folder is complete are skipped, so the script can be called again after an interruption.
"""

import argparse
import hashlib
import time
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from hf_specheads import AutoDraftHead, DraftHead, DraftTreeConfig, load_heads
from hf_specheads.trainer import (
    DraftHeadTrainer,
    DraftHeadTrainingArguments,
    JointTrainer,
    JointTrainingArguments,
    frequent_tokens,
)

from ..facts import FACTS, write_facts
from .answers import Answer, AnswerBlocks, read_answers
from .chat import chat_tokens, prompt_tokens
from .feature_cache import BLOCK, CachedBlocks, stack_blocks
from .optimizer import MatrixMomentum
from .tasks import FAMILIES, example_at

DEPTH = 6
BATCH = 2
VOCABULARY_BLOCKS = 2048  # training sequences that a draft vocabulary is chosen from
HELD_OUT_PER_FAMILY = 4  # chats whose losses are followed
HELD_OUT_SEED = 1  # of those and of the prompts for evaluation while training; reported numbers use others
FINAL_SHARE = 0.4  # compute of the second stage, as a share of the first
HEAD_WIDTH = {"intermediate_size": 512}
# As wide as POSS-3 is deep: fc + one layer with the parameters of fc + two layers.
CONTROL_WIDTH = {"intermediate_size": 1280}


@dataclass(frozen=True)
class Run:
    """One head to train.

    Attributes:
        method: As in `AutoDraftHead.from_target`.
        passes: Draft positions of the unroll.
        starts_from: Name of the run to warm-start from, or `None` for random weights.
        options: Fields of the heads' config.
        share: Compute of the run, as a share of `--eagle_steps`.
        training: Training arguments that differ from the common ones.
        tree: Fields of the tree used in evaluation that differ from the common one.
        joint: Train an adapter of the target too (Medusa-2); its forward is then part of every step.
    """

    method: str
    passes: int
    starts_from: str | None
    options: dict
    share: float = 1.0
    training: dict = field(default_factory=dict)
    tree: dict = field(default_factory=dict)
    joint: bool = False


def poss(positions: int) -> Run:
    """POSS with `positions` draft positions per specialist."""
    options = {"num_specialists": DEPTH // positions, "positions_per_specialist": positions}
    return Run("poss", DEPTH, "eagle-base", options, FINAL_SHARE)


# Of all methods, so that they differ in their heads alone.
COMMON = {"feature_loss_weight": 1.0, "token_loss_weight": 0.1, "top_k_loss_weight": 1.0, "pass_decay": 1.0}
# Heads that draft no features learn from the target's distribution alone.
TEACHER = {"feature_loss_weight": 0.0, "token_loss_weight": 1.0, "top_k_loss_weight": 0.0}
TEST_TIME = {**TEACHER, "pass_decay": 0.8}
ADAPTER = {"target_lora_rank": 4, "target_lora_alpha": 8.0, "learning_rate": 1.5e-3}
WHOLE = 1.0 + FINAL_SHARE
# Heads share the target's `lm_head`: with projections of their own they would be larger than the target.
SHARED = {"lm_head": "target"}
SMALL_LM = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
            "num_key_value_heads": 2}  # fmt: skip


def parallel(method: str, positions: int, **options: Any) -> Run:
    """Medusa and Hydra: one MLP per draft position, all trained at once."""
    heads = {"num_heads": positions, **SHARED, **options}
    return Run(method, positions, None, heads, WHOLE, TEACHER, {"depth": positions})


def ablation(inputs: str) -> Run:
    """EAGLE's input ablation: short runs that differ in what the heads read."""
    return Run("eagle", 1, None, {**HEAD_WIDTH, "inputs": inputs}, share=0.125)


RUNS = {
    "eagle-base": Run("eagle", 1, None, HEAD_WIDTH),
    "control-base": Run("eagle", 1, None, CONTROL_WIDTH),
    "poss3": poss(3),
    "hass": Run("hass", DEPTH, "eagle-base", {}, FINAL_SHARE),
    "eagle": Run("eagle", 1, "eagle-base", {}, FINAL_SHARE),
    "poss2": poss(2),
    "poss1": poss(1),
    "control": Run("hass", DEPTH, "control-base", {}, FINAL_SHARE),
    "poss3-lora": replace(poss(3), method="poss-lora"),
    # Three blocks per head: together the parameters of POSS-3.
    "medusa": parallel("medusa", DEPTH, num_blocks=3, tied_blocks=False),
    "medusa2": Run("medusa", DEPTH, "medusa", {}, 0.15, {**TEACHER, **ADAPTER}, joint=True),
    "hydra": parallel("hydra", 4),
    "hydra-plus": parallel("hydra", 4, head_arch="prefix-mlp", num_blocks=2, **HEAD_WIDTH),
    "draft-lm": Run("draft-lm", 1, None, SMALL_LM, WHOLE, TEACHER),
    "eagle3-base": Run("eagle3", DEPTH, None, {**HEAD_WIDTH, "draft_vocab_size": 2048}, 1.0, TEST_TIME),
    "eagle3": Run("eagle3", DEPTH, "eagle3-base", {}, FINAL_SHARE, TEST_TIME),
    "poss3-eagle3": Run("poss-eagle3", DEPTH, "eagle3-base", poss(3).options, FINAL_SHARE, TEST_TIME),
    "inputs-shifted": ablation("feature+shifted_token"),
    "inputs-unshifted": ablation("feature+token"),
    "inputs-token": ablation("token"),
    "inputs-feature": ablation("feature"),
}


def folder_of(name: str, args: argparse.Namespace) -> Path:
    """Where a run is saved; of other seeds than 0, under its own name."""
    return args.output_dir / (name if args.seed == 0 else f"{name}-seed{args.seed}")


def training_arguments(run: Run, args: argparse.Namespace, folder: Path, steps: int) -> DraftHeadTrainingArguments:
    """Arguments all runs share but for passes, steps and what their method asks for."""
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
        args: Of the command.
    """

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace):
        self.target, self.tokenizer, self.args = target, tokenizer, args
        self.train, self.held_out, self.prompts = load_data(tokenizer, args)

    @cached_property
    def budget(self) -> float:
        """Floating-point operations of a run with a share of 1: so many EAGLE steps."""
        run = RUNS["eagle-base"]
        return self.args.eagle_steps * self.step_flops(run, self.new_heads(run))

    def new_heads(self, run: Run) -> DraftHead:
        """Heads to train: random, or warm-started; a draft vocabulary is chosen from the training data."""
        args = self.args
        base = None if run.starts_from is None else load_heads(folder_of(run.starts_from, args), dtype=torch.float32)
        tree = DraftTreeConfig(depth=DEPTH, top_k=args.top_k, total_tokens=args.total_tokens).replace(**run.tree)
        options = {**run.options}
        if size := options.get("draft_vocab_size"):
            seen = [self.train[index] for index in range(min(VOCABULARY_BLOCKS, len(self.train)))]
            options["draft_token_ids"] = frequent_tokens(seen, size, self.target.config.vocab_size)
        heads = AutoDraftHead.from_target(self.target, run.method, from_heads=base, tree_config=tree, **options)
        heads.config.target = {**(heads.config.target or {}), "name": args.target_name}
        return heads

    def blocks(self, run: Run, heads: DraftHead) -> CachedBlocks | AnswerBlocks:
        """What a run trains on; joint training changes the features, so it computes them."""
        if run.joint:
            return self.train
        return CachedBlocks(self.train, self.args.features, heads.feature_layers or (-1,))

    def trainer(self, run: Run, heads: DraftHead, folder: Path, steps: int) -> DraftHeadTrainer:
        """The trainer of a run; joint training has AdamW, which knows the adapter."""
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
        """Floating-point operations of one step, counted; plus the target's forward where the cache saves it."""
        trainer = self.trainer(run, heads, self.args.output_dir / "counting", 1)
        blocks, body = self.blocks(run, heads), sum(p.numel() for p in self.target.get_decoder().layers.parameters())
        batch = stack_blocks([blocks[index] for index in range(BATCH)])
        with FlopCounterMode(display=False) as counter:
            trainer.training_step(trainer.model, batch)
        trainer.model.zero_grad()
        trainer.reset_losses()
        saved = 2 * body * BATCH * BLOCK if "final_features" in batch else 0
        return saved + counter.get_total_flops()

    def run(self, name: str) -> None:
        """Trains one run and saves heads (bf16) and facts into its folder."""
        run, args, folder = RUNS[name], self.args, folder_of(name, self.args)
        set_seed(args.seed)
        heads = self.new_heads(run)
        per_step = self.step_flops(run, heads)
        steps = 4 * max(1, round(run.share * self.budget / per_step / 4))
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
        }
        for replaced in ("output_dir", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2"):
            del facts["arguments"][replaced]
        heads.to(torch.bfloat16).save_pretrained(folder)
        write_facts(facts, folder)  # last: marks the run as complete


def learning_rates(run: Run, args: argparse.Namespace) -> dict[str, float]:
    """Of a run's optimiser; a warm start is fine-tuned, not trained anew."""
    slower = 1.0 if run.starts_from is None else 0.5
    return {"matrix_lr": slower * args.matrix_lr, "lr": slower * args.learning_rate}


def last_metrics(trainer: DraftHeadTrainer) -> dict[str, float]:
    """Metrics of the newest evaluation."""
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    return evaluations[-1] if evaluations else {}


Data = tuple[AnswerBlocks, AnswerBlocks, list[list[int]]]


def load_data(tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> Data:
    """Sequences of the target's answers, sequences of held-out chats, and held-out prompts."""
    args.answers_fingerprint = hashlib.sha256(args.answers.read_bytes()).hexdigest()[:16]
    train = AnswerBlocks(read_answers(args.answers), BLOCK, tokenizer.pad_token_id)
    asked = [
        example_at(family, index, HELD_OUT_SEED, held_out=True)
        for index in range(HELD_OUT_PER_FAMILY)
        for family in FAMILIES
    ]
    chats = [Answer(e.family, 0.0, chat_tokens(e, tokenizer)[0], len(prompt_tokens(e, tokenizer))) for e in asked]
    prompts = [prompt_tokens(example, tokenizer) for example in asked[: args.eval_prompts]]
    return train, AnswerBlocks(chats, BLOCK, tokenizer.pad_token_id), prompts


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of the trained target")
    parser.add_argument("--target_name", default="chat-target")
    parser.add_argument("--answers", type=Path, required=True, help="file written by answers.py")
    parser.add_argument("--features", type=Path, required=True, help="folder written by feature_cache.py")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=sorted(RUNS), help="runs to train, default all in order")
    parser.add_argument("--eagle_steps", type=int, default=2048, help="compute of the first stage, in EAGLE steps")
    parser.add_argument("--matrix_lr", type=float, default=0.02)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--eval_prompts", type=int, default=10)
    parser.add_argument("--top_k", type=int, default=4)
    parser.add_argument("--total_tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="other seeds go to folders of their own")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    training = HeadTraining(target, tokenizer, args)
    for name in args.only or RUNS:
        if not (folder_of(name, args) / FACTS).exists():
            training.run(name)


if __name__ == "__main__":
    main()
