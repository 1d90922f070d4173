"""Trains the shipped target: byte-level BPE and a deep, narrow Llama, on chats and the standard library's source.

    python -m hf_specheads.trainer.shipped_pair.target --output_dir runs/target --max_steps 4100 --minutes 90

The script resumes from the newest checkpoint in the output folder if there is one, so that a long training can be
divided into calls of some minutes each with the same arguments. Each call saves the current model in `final`, with its
share of right answers on held-out chats.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from .chat import END_OF_TEXT, TURN_END
from .corpus import fingerprint, read_split
from .mixture import IGNORED, MixtureBlocks, text_stream
from .optimizer import MatrixMomentum
from .right_answers import right_answers, shares
from .tokenizer import VOCABULARY, refuse_unlearnable_words, train_tokenizer, training_texts

FACTS = "training_facts.json"


class TimeLimit(TrainerCallback):
    """Saves a checkpoint and ends the call after some minutes."""

    def __init__(self, minutes: float):
        self.ends_at = time.monotonic() + 60 * minutes

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if time.monotonic() >= self.ends_at:
            control.should_save = control.should_training_stop = True
        return control


class ChatTrainer(Trainer):
    """A Trainer that computes logits only at labels, because most of a block is prompts, and the `lm_head` costs as
    much as four layers."""

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        target: LlamaForCausalLM = self.accelerator.unwrap_model(model)
        rows = inputs["labels"][:, 1:] != IGNORED
        hidden = target.model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"]).last_hidden_state
        logits = target.lm_head(hidden[:, :-1][rows]).float()
        loss = torch.nn.functional.cross_entropy(logits, inputs["labels"][:, 1:][rows], reduction="sum")
        loss = loss / (rows.sum() if num_items_in_batch is None else num_items_in_batch)
        return (loss, {"loss": loss}) if return_outputs else loss


def build_target(tokenizer: PreTrainedTokenizerFast, num_hidden_layers: int = 16) -> LlamaForCausalLM:
    """Builds a randomly initialised target. It has many layers of width 256, because speculation pays if one draft
    layer is cheap compared with the target, and a small vocabulary, because drafting mostly costs the `lm_head`."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=448,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT]),
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def with_tokenizer(
    target: LlamaForCausalLM, theirs: PreTrainedTokenizerBase, ours: PreTrainedTokenizerBase
) -> LlamaForCausalLM:
    """Adapts a trained target to another tokenizer. A token that `theirs` lacks gets the mean embedding of the tokens
    that `theirs` splits its text into.

    Args:
        target: The trained target, fp32, with a tied `lm_head`.
        theirs: Current tokenizer of the target.
        ours: New tokenizer of the target.
    """
    known, vocabulary = theirs.get_vocab(), ours.get_vocab()
    old = target.get_input_embeddings().weight.detach().clone()
    rows = torch.empty(len(ours), old.shape[1])
    for token, index in vocabulary.items():
        same = [known[token]] if token in known else theirs(ours.decode([index]))["input_ids"]
        rows[index] = old[same].mean(dim=0)
    target.resize_token_embeddings(len(ours), mean_resizing=False)
    with torch.no_grad():
        target.get_input_embeddings().weight.copy_(rows)
    config = build_target(ours, 1).config
    target.config.update({"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id})
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = (
        config.eos_token_id,
        config.pad_token_id,
    )
    return target


def earlier_facts(folder: Path | None) -> dict[str, Any]:
    """Reads the facts of an earlier target; empty if there are none."""
    facts = folder / FACTS if folder is not None else None
    return json.loads(facts.read_text(encoding="utf-8")) if facts is not None and facts.exists() else {}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--max_steps", type=int, default=4100, help="steps of the whole training, over all calls")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="time limit of this call; call again to continue"
    )
    parser.add_argument("--num_hidden_layers", type=int, default=16, help="2 gives a small assistant to compare with")
    parser.add_argument("--init_from", type=Path, help="trained target to continue from")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer to use instead of --init_from's or a new one")
    parser.add_argument("--vocab_size", type=int, default=VOCABULARY)
    parser.add_argument("--block_size", type=int, default=352)
    parser.add_argument("--batch_size", type=int, default=14)
    parser.add_argument("--matrix_lr", type=float, default=0.012)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--weight_decay", type=float, default=0.05, help="weight decay of the matrices")
    parser.add_argument("--decay_share", type=float, default=0.8, help="final share of the steps, with falling rates")
    parser.add_argument("--text_share", type=float, default=0.03, help="share of blocks of library text only")
    parser.add_argument("--sheet_share", type=float, default=0.2, help="share of blocks of exercises")
    parser.add_argument("--save_steps", type=int, default=200, help="steps between checkpoints and evaluations")
    parser.add_argument("--workers", type=int, default=0, help="processes that write chats; 0: the main process")
    parser.add_argument("--answers_per_family", type=int, default=20, help="held-out chats to answer; 0: none")
    parser.add_argument("--bf16", action="store_true", help="weights and forwards in bf16, updates in fp32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="torch.compile the layers: 2x on a CPU in bf16")
    return parser.parse_args()


def load_tokenizer(args: argparse.Namespace, texts: list[str]) -> PreTrainedTokenizerFast:
    """Loads the tokenizer given by the arguments or trained by an earlier call; else trains a new one."""
    folder = args.tokenizer or args.init_from or args.output_dir / "tokenizer"
    if folder.exists():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = train_tokenizer(training_texts(texts), args.vocab_size)
    refuse_unlearnable_words(tokenizer)
    tokenizer.save_pretrained(folder)
    return tokenizer


def build_trainer(
    args: argparse.Namespace, target: LlamaForCausalLM, train_blocks: MixtureBlocks, held_out_blocks: MixtureBlocks
) -> Trainer:
    """Builds the Trainer of one call."""
    return ChatTrainer(
        model=target,
        args=TrainingArguments(
            output_dir=str(args.output_dir),
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=args.batch_size,
            lr_scheduler_type="warmup_stable_decay",  # a run can be shortened by a later call with fewer `--max_steps`
            lr_scheduler_kwargs={"num_decay_steps": int(args.max_steps * args.decay_share)},
            warmup_steps=30,
            max_grad_norm=1.0,
            logging_steps=20,
            eval_strategy="steps",
            eval_steps=args.save_steps,
            save_steps=args.save_steps,
            save_total_limit=2,
            seed=args.seed,
            dataloader_num_workers=args.workers,
            use_cpu=not torch.cuda.is_available(),
            prediction_loss_only=True,
        ),
        train_dataset=train_blocks,
        eval_dataset=held_out_blocks,
        optimizers=(MatrixMomentum(target, args.matrix_lr, args.learning_rate, weight_decay=args.weight_decay), None),
        callbacks=[TimeLimit(args.minutes)],
    )


def answered(folder: Path, tokenizer: PreTrainedTokenizerFast, per_family: int) -> dict[str, Any]:
    """Measures the share of right answers of the saved target on held-out chats, greedy and at temperature 1."""
    if not per_family:
        return {}
    target = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    target.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    return {
        f"temperature {temperature:g}": shares(right_answers(target, tokenizer, per_family, temperature))
        for temperature in (0.0, 1.0)
    }


def main() -> None:
    args = parse_args()
    set_seed(args.seed)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    train_texts, held_out_texts = read_split(held_out=False), read_split(held_out=True)
    tokenizer = load_tokenizer(args, train_texts)
    stream, held_out_stream = text_stream(train_texts, tokenizer), text_stream(held_out_texts, tokenizer)
    kinds = {"text_share": args.text_share, "sheet_share": args.sheet_share}
    blocks = {"block_size": args.block_size, "seed": args.seed, **kinds}
    train_blocks = MixtureBlocks(tokenizer, stream, num_blocks=args.max_steps * args.batch_size, **blocks)
    held_out_blocks = MixtureBlocks(tokenizer, held_out_stream, num_blocks=64, held_out=True, **blocks)
    if args.init_from is None:
        target = build_target(tokenizer, args.num_hidden_layers)
    else:
        target = LlamaForCausalLM.from_pretrained(args.init_from, dtype=torch.float32)
        if args.tokenizer is not None:
            theirs = PreTrainedTokenizerFast.from_pretrained(args.init_from)
            target = with_tokenizer(target, theirs, tokenizer)
    target.set_attn_implementation("eager")  # fuses when compiled, and its backward is 2x faster than sdpa's on a CPU
    target.config.use_cache = False
    if args.bf16:
        target.to(torch.bfloat16)  # type: ignore[arg-type]
    if args.compile:
        target.model.compile()
    trainer = build_trainer(args, target, train_blocks, held_out_blocks)
    final, before = args.output_dir / "final", earlier_facts(args.init_from)
    started, checkpoint = time.time(), get_last_checkpoint(str(args.output_dir))
    hours = earlier_facts(final).get("hours", 0.0) if checkpoint is not None else before.get("hours", 0.0)
    trainer.train(resume_from_checkpoint=checkpoint)
    steps = trainer.state.global_step
    hours += (time.time() - started) / 3600
    held_out = trainer.evaluate()
    target.to(torch.bfloat16)  # type: ignore[arg-type]  # transformers wraps `nn.Module.to`, which hides its `self`
    target.config.use_cache = True  # was switched off for training
    target.save_pretrained(final)
    tokenizer.save_pretrained(final)
    facts = {
        "corpus_fingerprint": fingerprint(train_texts),
        "steps": steps,
        "tokens_seen": steps * args.batch_size * args.block_size + before.get("tokens_seen", 0),
        "flops": trainer.state.total_flos + before.get("flops", 0),
        "hours": round(hours, 3),
        "held_out_loss": held_out["eval_loss"],
        "right_answers": answered(final, tokenizer, args.answers_per_family),
        "arguments": {k: v for k, v in vars(args).items() if not isinstance(v, Path) and v != float("inf")},
    }
    (final / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
