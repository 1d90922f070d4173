"""Find out why heads accept few drafts, and fix the cause if a setting can fix it.

    python examples/diagnose.py
    python examples/diagnose.py --target org/model --heads org/heads-for-it --prompts mine.jsonl

Without arguments, the script takes shipped EAGLE-3 heads and plants a mistake that real checkpoints have: it lists the
three hidden states that the heads read in reverse order. Your own heads are diagnosed as they are.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specheads import diagnose, load_heads

HERE = Path(__file__).resolve().parent
PAIR = HERE.parent / "model_cards"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default=str(PAIR / "target"), help="folder or Hub id of a language model")
parser.add_argument("--heads", help="folder or Hub id of heads made for it (default: shipped ones, a mistake planted)")
parser.add_argument("--prompts", type=Path, default=HERE / "prompts.jsonl", help="one {'prompt': ...} a line")
parser.add_argument("--max-new-tokens", type=int, default=64, help="of the target's own text, per prompt")
parser.add_argument("--output", type=Path, default=Path("runs/example-mended"))


def main(argv: list[str] | None = None) -> None:
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto").float()
    target.to("cuda" if torch.cuda.is_available() else "cpu")
    heads = load_heads(args.heads or PAIR / "eagle3", dtype=torch.float32)
    if args.heads is None:
        heads.config.feature_layers = tuple(reversed(heads.config.feature_layers))

    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    if tokenizer.chat_template:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    found = diagnose(target, heads, prompts, tokenizer=tokenizer, max_new_tokens=args.max_new_tokens)
    print(found)  # the full report; programs can use `found.to_dict()`

    if found.changes:
        found.write(args.output)  # saves the heads with the corrected setting
        print(f"\nmended by {found.changes}, saved in {args.output}; looking again:")
        mended = load_heads(args.output, dtype=torch.float32)
        print(diagnose(target, mended, prompts, tokenizer=tokenizer, max_new_tokens=args.max_new_tokens).verdict)


if __name__ == "__main__":
    main()
