"""Find the draft tree that gives the most tokens per second on this machine, and save it with the heads.

    python examples/tune.py
    python examples/tune.py --target org/model --heads org/heads-for-it --dtype bfloat16 --prompts mine.jsonl

The fastest tree depends on heads, target, texts and machine, so it has to be measured. Trees are first compared by
replaying recorded drafts; the best ones are then timed against each other and plain generation (docs/tuning.md).
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specheads import load_heads

HERE = Path(__file__).resolve().parent
PAIR = HERE.parent / "model_cards"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default=str(PAIR / "target"), help="folder or Hub id of a language model")
parser.add_argument("--heads", default=str(PAIR / "poss3-longer"), help="folder or Hub id of draft heads made for it")
parser.add_argument("--prompts", type=Path, default=HERE / "prompts.jsonl", help="one {'prompt': ...} a line")
parser.add_argument("--max-new-tokens", type=int, default=48, help="per prompt, in every run")
parser.add_argument("--repeats", type=int, default=2, help="times everything is timed")
parser.add_argument("--dtype", default="float32", help="of target and heads, as they will be used")
parser.add_argument("--output", type=Path, default=Path("runs/example-tuned"))


def main(argv: list[str] | None = None) -> None:
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype)
    target.to("cuda" if torch.cuda.is_available() else "cpu")
    heads = load_heads(args.heads, dtype=args.dtype)

    # Use prompts like those you will generate from: strings, or chats if the target has a chat template.
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    if tokenizer.chat_template:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]

    print("before:", heads.with_tree().tree_config)
    options = {"max_new_tokens": args.max_new_tokens, "repeats": args.repeats}
    result = heads.tune(target, prompts, tokenizer=tokenizer, **options)
    print(result)
    print(f"{result.candidates} trees considered, {result.seconds:.0f} s; {result.speed_up:.2f}x plain generation")

    # The tree is used only on this machine with this dtype and number of threads; elsewhere heads draft as before.
    heads.save_pretrained(args.output)
    again = load_heads(args.output, dtype=args.dtype).bind(target)
    print(f"saved in {args.output}; loaded again they draft", again.tree_config)


if __name__ == "__main__":
    main()
