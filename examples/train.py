"""Train draft heads on texts that the target writes, and measure how much more they accept afterwards.

    python examples/train.py
    python examples/train.py --target org/model --method eagle3 --prompts mine.jsonl --steps 5000

Without arguments, the script trains EAGLE heads for the target in `model_cards/` for a few minutes, offline. Useful
heads need thousands of texts, which `specheads regenerate` writes in batches or through a server (docs/training.md).
"""

import argparse
import json
import random
from pathlib import Path

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from hf_specheads import AutoDraftHead
from hf_specheads.trainer import DraftHeadTrainer, DraftHeadTrainingArguments

HERE = Path(__file__).resolve().parent

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default=str(HERE.parent / "model_cards" / "target"), help="folder or Hub id")
parser.add_argument("--method", default="eagle", help="eagle, eagle3, medusa, hydra, ... (README, Methods)")
parser.add_argument("--prompts", type=Path, default=HERE / "prompts.jsonl", help="one {'prompt': ...} a line")
parser.add_argument("--texts-per-prompt", type=int, default=8, help="texts the target writes from every prompt")
parser.add_argument("--text-tokens", type=int, default=64, help="longest text, in new tokens")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--output", type=Path, default=Path("runs/example-heads"))


def write_texts(target, tokenizer, prompts: list[str], per_prompt: int, text_tokens: int) -> list[dict]:
    """Returns rows of `input_ids` and `loss_mask`, which is 1 at tokens the target wrote; the heads learn these."""
    ends = target.generation_config.eos_token_id
    rows, ends = [], torch.tensor([] if ends is None else ends, device=target.device)
    for prompt in tqdm(prompts, desc="the target writes"):
        if tokenizer.chat_template:
            inputs = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True, return_dict=True, return_tensors="pt",
            )  # fmt: skip
        else:
            inputs = tokenizer(prompt, return_tensors="pt")
        given = inputs["input_ids"].shape[1]
        options = {"do_sample": True, "num_return_sequences": per_prompt, "max_new_tokens": text_tokens}
        for text in target.generate(**inputs.to(target.device), **options):
            stops = torch.isin(text[given:], ends).nonzero()
            end = given + int(stops[0]) + 1 if len(stops) else len(text)  # padding follows the end
            rows.append({"input_ids": text[:end].tolist(), "loss_mask": [0] * given + [1] * (end - given)})
    return rows


def main(argv: list[str] | None = None) -> None:
    args = parser.parse_args(argv)
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto").float()
    target.to("cuda" if torch.cuda.is_available() else "cpu")
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    rows = write_texts(target, tokenizer, prompts, args.texts_per_prompt, args.text_tokens)
    random.shuffle(rows)
    held_out = max(1, len(rows) // 8)

    heads = AutoDraftHead.from_target(target, args.method)
    trainer = DraftHeadTrainer(
        model=heads,
        target=target,  # frozen
        args=DraftHeadTrainingArguments(
            str(args.output),
            max_steps=args.steps,
            per_device_train_batch_size=4,
            learning_rate=1e-3,  # for a hundred steps; use 3e-5 to 1e-4 for a long training
            warmup_steps=args.steps // 10,
            logging_steps=max(1, args.steps // 10),
            save_strategy="no",
            dataloader_pin_memory=torch.cuda.is_available(),
            report_to=[],
            eval_acceptance_prompts=4,
        ),
        train_dataset=Dataset.from_list(rows[held_out:]),
        eval_dataset=Dataset.from_list(rows[:held_out]),
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_acceptance_length"]
    trainer.train()
    after = trainer.evaluate()["eval_acceptance_length"]
    trainer.save_model()
    print(f"tokens per round on held-out texts: {before:.2f} before training, {after:.2f} after {args.steps} steps")
    print(f"the heads are in {args.output}; now: python examples/use.py --target {args.target} --heads {args.output}")


if __name__ == "__main__":
    main()
