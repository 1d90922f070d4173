"""Trains the shipped heads: EAGLE, HASS, POSS-1/2/3 and a parameter-matched single head, at equal compute.

    python -m hf_specheads.trainer.shipped_pair.heads --target runs/target/final --output_dir runs/heads

Every method starts from the same EAGLE heads, trained for one pass for most of the compute (six-pass objectives trail
one-pass training for long: with equal compute from the first steps on, EAGLE reached tau 3.96, POSS-3 2.99), and then
gets the same further compute, counted in floating-point operations; so a six-pass method takes fewer steps than EAGLE
itself. Same data in the same order, same batches, same optimiser, same learning rates. Continued runs take small
batches: with so few tokens, more steps help more than quieter gradients. Runs whose folder is complete are skipped, so
the script can be called again after an interruption.
"""

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from hf_specheads import AutoDraftHead, DraftHead, DraftTreeConfig, load_heads
from hf_specheads.trainer import DraftHeadTrainer, DraftHeadTrainingArguments

from ..facts import FACTS, training_facts, write_facts
from .corpus import PackedBlocks, fingerprint, pack_tokens, read_split
from .optimizer import MatrixMomentum

DEPTH = 6
BLOCK = 512
BASE_BATCH = 8
CONTINUED_BATCH = 2
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
    """

    method: str
    passes: int
    starts_from: str | None
    options: dict
    share: float = 1.0


def poss(positions: int) -> Run:
    """POSS with `positions` draft positions per specialist."""
    options = {"num_specialists": DEPTH // positions, "positions_per_specialist": positions}
    return Run("poss", DEPTH, "eagle-long", options, share=0.4)


RUNS = {
    "eagle-base": Run("eagle", 1, None, HEAD_WIDTH),
    "eagle-long": Run("eagle", 1, "eagle-base", {}),
    "control-base": Run("eagle", 1, None, CONTROL_WIDTH),
    "control-long": Run("eagle", 1, "control-base", {}),
    "poss3": poss(3),
    "hass": Run("hass", DEPTH, "eagle-long", {}, share=0.4),
    "eagle": Run("eagle", 1, "eagle-long", {}, share=0.4),
    "poss2": poss(2),
    "poss1": poss(1),
    "control": Run("hass", DEPTH, "control-long", {}, share=0.4),
}


def flops_per_token(target: PreTrainedModel, heads: DraftHead, passes: int) -> float:
    """Floating-point operations of one training token: target forward, target logits once, and per pass the forward
    and backward of the layer and of `lm_head` (which has no weight gradient). Attention scores are left out."""
    vocabulary = target.get_output_embeddings().weight.numel()
    body = sum(p.numel() for p in target.get_decoder().layers.parameters())
    layer = heads.fc.weight.numel() + sum(p.numel() for p in heads.layers[0].parameters())
    return 2 * body + 2 * vocabulary + passes * (6 * layer + 4 * vocabulary)


def training_arguments(
    run: Run, args: argparse.Namespace, folder: Path, steps: int, batch: int
) -> DraftHeadTrainingArguments:
    """Arguments all runs share but for passes, steps and batch."""
    return DraftHeadTrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=steps,
        num_passes=run.passes,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=BASE_BATCH,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        max_grad_norm=1.0,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=steps // 4,
        eval_on_start=run.starts_from is None,
        eval_acceptance_prompts=args.eval_prompts,
        eval_max_new_tokens=64,
        save_strategy="no",
        max_length=BLOCK,
        seed=args.seed,
        data_seed=args.seed,
        use_cpu=not torch.cuda.is_available(),
    )


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
    base = None if run.starts_from is None else load_heads(args.output_dir / run.starts_from, dtype=torch.float32)
    tree = DraftTreeConfig(depth=DEPTH, top_k=args.top_k, total_tokens=args.total_tokens)
    heads = AutoDraftHead.from_target(target, run.method, from_heads=base, tree_config=tree, **run.options)
    heads.config.target["name"] = args.target_name
    eagle_step = flops_per_token(target, heads, 1)
    per_token = flops_per_token(target, heads, run.passes)
    batch = BASE_BATCH if base is None else CONTINUED_BATCH
    batches = run.share * args.eagle_steps * eagle_step / per_token * BASE_BATCH / batch
    steps = 4 * round(batches / 4)  # evaluated at each quarter
    training_args = training_arguments(run, args, folder, steps, batch)
    slower = 1.0 if base is None else 0.5  # a warm start is fine-tuned, not trained anew
    train, held_out, prompts = data
    trainer = DraftHeadTrainer(
        model=heads,
        target=target,
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        eval_prompts=prompts,
        optimizers=(MatrixMomentum(heads, slower * args.matrix_lr, slower * args.learning_rate), None),
    )
    started = time.time()
    trainer.train()
    hours = (time.time() - started) / 3600
    facts = training_facts(trainer, recipe={"run": name, **asdict(run)}, metrics=last_metrics(trainer), hours=hours)
    facts |= {
        "name": name,
        "command": f"python -m hf_specheads.trainer.shipped_pair.heads --only {name} --eagle_steps {args.eagle_steps}",
        "optimizer": {"matrix_lr": slower * args.matrix_lr, "lr": slower * args.learning_rate},
        "tokens": steps * batch * BLOCK,
        "training_flops": per_token * steps * batch * BLOCK,
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
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=sorted(RUNS), help="runs to train, default all in order")
    parser.add_argument("--eagle_steps", type=int, default=208, help="compute of every run, in EAGLE steps")
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
