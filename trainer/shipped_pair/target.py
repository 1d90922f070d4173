"""Trains the shipped target: a byte-level BPE tokenizer and a deep, narrow Llama on standard-library source.

    python -m hf_specheads.trainer.shipped_pair.target --output_dir runs/target --max_steps 800

Resumes from the newest checkpoint in the output folder when there is one.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from .corpus import PackedBlocks, fingerprint, pack_tokens, read_split
from .optimizer import MatrixMomentum

END_OF_TEXT = "<|endoftext|>"
FACTS = "training_facts.json"


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `texts`; one special token serves as beginning, end and padding."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocab_size=vocab_size, min_frequency=2, special_tokens=[END_OF_TEXT], show_progress=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=2048,
    )


def build_target(tokenizer: PreTrainedTokenizerFast, num_hidden_layers: int = 24) -> LlamaForCausalLM:
    """A randomly initialised target: 24 layers of width 256, because speculation pays where one draft layer is
    cheap next to the target's many; a small vocabulary, because drafting cost is mostly the `lm_head`."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def earlier_tokens(init_from: Path | None) -> int:
    """Training tokens of the target a run continues from."""
    facts = init_from / FACTS if init_from is not None else None
    return json.loads(facts.read_text())["tokens_seen"] if facts is not None and facts.exists() else 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--max_steps", type=int, default=800)
    parser.add_argument("--num_hidden_layers", type=int, default=24, help="2 gives a small assistant to compare with")
    parser.add_argument("--init_from", type=Path, help="trained target to continue from, with its tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer to use instead of training one")
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--block_size", type=int, default=512)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--matrix_lr", type=float, default=0.02)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="torch.compile the target: about 1.25x on a CPU")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    set_seed(args.seed)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    train_texts, held_out_texts = read_split(held_out=False), read_split(held_out=True)

    tokenizer_folder = args.init_from or args.tokenizer or args.output_dir / "tokenizer"
    if tokenizer_folder.exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    else:
        tokenizer = train_tokenizer(train_texts, args.vocab_size)
        tokenizer.save_pretrained(tokenizer_folder)
    train_blocks = pack_tokens(train_texts, tokenizer, args.block_size, args.seed)
    held_out_blocks = pack_tokens(held_out_texts, tokenizer, args.block_size, args.seed)[:64]

    if args.init_from is None:
        target = build_target(tokenizer, args.num_hidden_layers)
    else:
        target = LlamaForCausalLM.from_pretrained(args.init_from, dtype=torch.float32)
    trainer = Trainer(
        model=target,
        args=TrainingArguments(
            output_dir=str(args.output_dir),
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=args.batch_size,
            lr_scheduler_type="cosine",
            warmup_steps=30,
            max_grad_norm=1.0,
            logging_steps=20,
            eval_strategy="steps",
            eval_steps=200,
            save_steps=200,
            save_total_limit=2,
            seed=args.seed,
            use_cpu=not torch.cuda.is_available(),
            torch_compile=args.compile,
        ),
        train_dataset=PackedBlocks(train_blocks),
        eval_dataset=PackedBlocks(held_out_blocks),
        optimizers=(MatrixMomentum(target, args.matrix_lr, args.learning_rate), None),
    )
    started = time.time()
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(args.output_dir)))
    facts = {
        "corpus_fingerprint": fingerprint(train_texts),
        "train_tokens": train_blocks.numel(),
        "tokens_seen": args.max_steps * args.batch_size * args.block_size + earlier_tokens(args.init_from),
        "hours": round((time.time() - started) / 3600, 3),
        "held_out": trainer.evaluate(),
        "arguments": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
    }
    final = args.output_dir / "final"
    target.to(torch.bfloat16)  # type: ignore[arg-type]  # transformers wraps `nn.Module.to`, which hides its `self`
    target.save_pretrained(final)
    tokenizer.save_pretrained(final)
    (final / FACTS).write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
