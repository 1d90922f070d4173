"""Trains the shipped heads: every method on the same blocks in the same order, with the same compute.

    python -m hf_specheads.trainer.shipped_pair.heads --target runs/target/final --features runs/features \\
        --output_dir runs/heads

Compute is counted in floating-point operations (the target's forward included, although the features come from a
cache, see `feature_cache.py`), in units of EAGLE steps. Methods of several detached passes (HASS, POSS) start from the
EAGLE heads of the first stage: six-pass objectives trail one-pass training for long
(`benchmarks/results/history/early_switch.json`). EAGLE itself and the control get the same two stages; methods that
cannot start from EAGLE heads get the compute of both stages in one run. Same batches, same optimiser, same learning
rates. Runs whose folder is complete are skipped, so the script can be called again after an interruption.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset
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
from .corpus import PackedBlocks, fingerprint, pack_tokens, read_split
from .feature_cache import BLOCK, CachedBlocks, stack_blocks
from .optimizer import MatrixMomentum

DEPTH = 6
BATCH = 2
VOCABULARY_BLOCKS = 2048  # training blocks that a draft vocabulary is chosen from
EAGLE_STEP_FLOPS = 31_547_709_440  # of one EAGLE step on the shipped target, see `step_flops`
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


def step_flops(trainer: DraftHeadTrainer, blocks: CachedBlocks | Subset) -> int:
    """Floating-point operations of one training step, counted; plus the target's forward where the cache saves it."""
    target = trainer.frozen_target.model
    body = sum(p.numel() for p in target.get_decoder().layers.parameters())
    batch = stack_blocks([blocks[index] for index in range(BATCH)])
    with FlopCounterMode(display=False) as counter:
        trainer.training_step(trainer.model, batch)
    trainer.model.zero_grad()
    trainer.reset_losses()
    saved = 2 * body * BATCH * BLOCK if "final_features" in batch else 0
    return saved + counter.get_total_flops()


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
        eval_max_new_tokens=64,
        save_strategy="no",
        max_length=BLOCK,
        seed=args.seed,
        data_seed=args.seed,
        use_cpu=not torch.cuda.is_available(),
        **{**COMMON, **run.training},
    )


def new_heads(
    run: Run, target: PreTrainedModel, args: argparse.Namespace, train: Sequence[dict[str, torch.Tensor]] = ()
) -> DraftHead:
    """Heads to train: random, or warm-started; a draft vocabulary is chosen from the training blocks."""
    base = None if run.starts_from is None else load_heads(args.output_dir / run.starts_from, dtype=torch.float32)
    tree = DraftTreeConfig(depth=DEPTH, top_k=args.top_k, total_tokens=args.total_tokens).replace(**run.tree)
    options = {**run.options}
    if size := options.get("draft_vocab_size"):
        options["draft_token_ids"] = frequent_tokens(train, size, target.config.vocab_size)
    heads = AutoDraftHead.from_target(target, run.method, from_heads=base, tree_config=tree, **options)
    heads.config.target = {**(heads.config.target or {}), "name": args.target_name}
    return heads


def train_run(
    name: str,
    run: Run,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: tuple[PackedBlocks, PackedBlocks, list[list[int]]],
    args: argparse.Namespace,
) -> None:
    """Trains one run and saves heads (bf16) and facts into its folder."""
    set_seed(args.seed)
    folder = args.output_dir / name
    train, held_out, prompts = data
    heads = new_heads(run, target, args, [train[index] for index in range(VOCABULARY_BLOCKS)])
    slower = 1.0 if run.starts_from is None else 0.5  # a warm start is fine-tuned, not trained anew
    cached = CachedBlocks(train, args.features, heads.feature_layers or (-1,))

    # Joint training changes the features, so it computes them; its optimiser is AdamW, which knows the adapter.
    blocks = Subset(train, cached.indices) if run.joint else cached
    rates = {"matrix_lr": slower * args.matrix_lr, "lr": slower * args.learning_rate}
    optimizer = None if run.joint else MatrixMomentum(heads, **rates)

    def trainer_of(steps: int) -> DraftHeadTrainer:
        trainer_class: type[DraftHeadTrainer] = JointTrainer if run.joint else DraftHeadTrainer
        return trainer_class(
            model=heads,
            target=target,
            args=training_arguments(run, args, folder, steps),
            train_dataset=blocks,
            eval_dataset=held_out,
            processing_class=tokenizer,
            data_collator=stack_blocks,
            eval_prompts=prompts,
            optimizers=(optimizer, None),
        )

    per_step = step_flops(trainer_of(1), blocks)
    steps = 4 * round(run.share * args.eagle_steps * args.eagle_step_flops / per_step / 4)
    trainer = trainer_of(steps)
    started = time.time()
    trainer.train()
    hours = (time.time() - started) / 3600
    trainer.run_facts = {"recipe": {"run": name, **asdict(run)}, "metrics": last_metrics(trainer), "hours": hours}
    facts = trainer.facts()
    facts |= {
        "name": name,
        "command": f"python -m hf_specheads.trainer.shipped_pair.heads --only {name} --eagle_steps {args.eagle_steps}",
        "optimizer": "adamw"
        if run.joint
        else {"matrix_lr": slower * args.matrix_lr, "lr": slower * args.learning_rate},
        "tokens": steps * BATCH * BLOCK,
        "training_flops": per_step * steps,
        "corpus_fingerprint": args.corpus_fingerprint,
    }
    for replaced in ("output_dir", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2"):
        del facts["arguments"][replaced]
    heads.to(torch.bfloat16).save_pretrained(folder)
    write_facts(facts, folder)  # last: marks the run as complete


def last_metrics(trainer: DraftHeadTrainer) -> dict[str, float]:
    """Metrics of the newest evaluation."""
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    return evaluations[-1] if evaluations else {}


def load_data(
    tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace
) -> tuple[PackedBlocks, PackedBlocks, list[list[int]]]:
    """Training blocks, held-out blocks, and prompts from the beginnings of held-out blocks."""
    texts = read_split(held_out=False)
    args.corpus_fingerprint = fingerprint(texts)
    train = pack_tokens(texts, tokenizer, BLOCK, args.seed + 1)
    held_out = pack_tokens(read_split(held_out=True), tokenizer, BLOCK, args.seed)
    prompts = [row[:128].tolist() for row in held_out[16 : 16 + args.eval_prompts]]
    return PackedBlocks(train), PackedBlocks(held_out[:8]), prompts


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of the trained target")
    parser.add_argument("--target_name", default="stdlib-target")
    parser.add_argument("--features", type=Path, required=True, help="folder written by feature_cache.py")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=sorted(RUNS), help="runs to train, default all in order")
    parser.add_argument("--eagle_steps", type=int, default=2048, help="compute of the first stage, in EAGLE steps")
    parser.add_argument("--eagle_step_flops", type=float, default=EAGLE_STEP_FLOPS)
    parser.add_argument("--matrix_lr", type=float, default=0.02)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--eval_prompts", type=int, default=10)
    parser.add_argument("--top_k", type=int, default=4)
    parser.add_argument("--total_tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    data = load_data(tokenizer, args)
    for name in args.only or RUNS:
        if not (args.output_dir / name / FACTS).exists():
            train_run(name, RUNS[name], target, tokenizer, data, args)


if __name__ == "__main__":
    main()
