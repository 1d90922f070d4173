r"""A target unrelated to the shipped pair: another family, tokenizer and kind of text.

    python -m benchmarks.targets.foreign --output runs/foreign --minutes 20

This command trains a small Qwen3 on the source of Python's standard library. It also writes the texts that heads are
trained on (`texts.jsonl`) and prompts (`prompts.jsonl`, excerpts of held-out files, and `long_prompts.jsonl`,
beginnings of long ones). The heads of the committed tables are then trained with

    training="target=runs/foreign train_data=runs/foreign/texts.jsonl max_length=256 per_device_train_batch_size=8 \
        lr_scheduler_type=constant eval_examples=32 bf16=false"
    for run in "6 0" "60 5" "400 20"; do set -- $run
        specheads train --config eagle $training output_dir=runs/foreign_eagle$1 max_steps=$1 warmup_steps=$2 \
            learning_rate=1e-3
    done
    specheads train --config poss3 $training output_dir=runs/foreign_poss from_heads=runs/foreign_eagle400 \
        max_steps=250 warmup_steps=10 learning_rate=3e-4

and measured by `python -m benchmarks default --target runs/foreign ...`, as the tables say.

In that time the target learns little. It is certain where code repeats itself and uncertain elsewhere, like targets
whose text heads cannot predict for long.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_specheads.trainer.shipped_pair.corpus import read_split
from hf_specheads.trainer.shipped_pair.target import TimeLimit

END = "<|endoftext|>"
VOCABULARY, LENGTH = 8192, 256
PROMPT_TOKENS, PROMPTS = (48, 160), 64
LONG_TOKENS, LONG_PROMPTS = 3968, 8


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Trains byte-level BPE on the texts."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token=END, pad_token=END)


def build_target(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """Makes a target with random weights: eight layers with query and key norms, whose attention heads together match
    the hidden size."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def blocks(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, torch.Tensor]]:
    """Makes training rows of one length from the concatenated files."""
    encoded = tokenizer([text + END for text in texts])["input_ids"]
    stream = torch.tensor(list(itertools.chain.from_iterable(encoded)))
    rows = stream[: len(stream) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def pieces(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, tokens: int) -> Iterator[str]:
    """Yields pieces of texts of about `tokens` tokens, cut at ends of lines."""
    for text in texts:
        piece: list[str] = []
        length = 0
        for line in text.splitlines(keepends=True):
            piece.append(line)
            length += len(tokenizer(line)["input_ids"])
            if length >= tokens:
                yield "".join(piece)
                piece, length = [], 0


def prompts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns excerpts of held-out files, of different lengths, spread over the files."""
    found: list[str] = []
    for place, text in enumerate(texts):
        tokens = PROMPT_TOKENS[0] + (37 * place) % (PROMPT_TOKENS[1] - PROMPT_TOKENS[0])
        found += itertools.islice(pieces([text], tokenizer, tokens), 1, 8, 3)
    return [text.rstrip() for text in found[:PROMPTS]]


def long_prompts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the beginnings of held-out files that have at least LONG_TOKENS tokens."""
    found = (next(pieces([text], tokenizer, LONG_TOKENS), None) for text in texts)
    return list(itertools.islice(filter(None, found), LONG_PROMPTS))


def write_rows(path: Path, column: str, texts: Sequence[str]) -> None:
    """Writes one JSON object per line."""
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.targets.foreign", description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20.0, help="minutes of training")
    parser.add_argument("--max_steps", type=int, default=1500)
    parser.add_argument("--bf16", action="store_true", help="train in bf16, for processors that compute faster in it")
    args = parser.parse_args()
    set_seed(0)
    texts = read_split(held_out=False)
    tokenizer = train_tokenizer(texts)
    target = build_target(tokenizer)
    rows = blocks(texts, tokenizer)
    print(f"{target.num_parameters() / 1e6:.1f} M parameters, {len(rows)} rows of {LENGTH} tokens", file=sys.stderr)
    options = TrainingArguments(
        str(args.output / "training"), max_steps=args.max_steps, per_device_train_batch_size=16, learning_rate=2e-3,
        lr_scheduler_type="cosine", warmup_steps=50, weight_decay=0.1, adam_beta2=0.95, logging_steps=25,
        save_strategy="no", report_to=[], use_cpu=True, bf16=args.bf16, dataloader_pin_memory=False,
    )  # fmt: skip
    Trainer(target, options, train_dataset=rows, callbacks=[TimeLimit(args.minutes)]).train()
    target.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    write_rows(args.output / "texts.jsonl", "text", list(pieces(texts, tokenizer, LENGTH - 8)))
    held_out = read_split(held_out=True)
    write_rows(args.output / "prompts.jsonl", "prompt", prompts(held_out, tokenizer))
    write_rows(args.output / "long_prompts.jsonl", "prompt", long_prompts(held_out, tokenizer))


if __name__ == "__main__":
    main()
