"""Measure heads and publish them: weights, a model card with the measurements, and code that loads them.

    python examples/publish.py
    python examples/publish.py --target org/model --heads runs/heads --repository you/heads --license apache-2.0

Without `--repository`, everything is written to a folder and nothing is uploaded. With it, the same files are uploaded
to the Hub (run `hf auth login` first). The script runs the shell commands `specheads eval` and `specheads push`.
"""

import argparse
import json
from contextlib import redirect_stdout
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specheads.cli import main as specheads

HERE = Path(__file__).resolve().parent
PAIR = HERE.parent / "model_cards"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default=str(PAIR / "target"), help="folder or Hub id of a language model")
parser.add_argument("--heads", default=str(PAIR / "poss3-longer"), help="folder or Hub id of draft heads made for it")
parser.add_argument("--prompts", type=Path, default=HERE / "prompts.jsonl", help="one {'prompt': ...} a line")
parser.add_argument("--max-new-tokens", type=int, default=64, help="per prompt; a hundred prompts of 256 for a card")
parser.add_argument("--dtype", default="float32", help="of target and heads; in 16 bits near-ties may fall otherwise")
parser.add_argument("--repository", help="Hub id to upload to (default: a folder, nothing is uploaded)")
parser.add_argument("--license", default="apache-2.0", help="of these weights")
parser.add_argument("--output", type=Path, default=Path("runs/example-repository"))


def main(argv: list[str] | None = None) -> None:
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    args.output.mkdir(parents=True, exist_ok=True)

    # Write the prompts as `specheads eval` reads them: as `messages` if the target has a chat template.
    entries = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    if tokenizer.chat_template:
        entries = [{"messages": [{"role": "user", "content": entry["prompt"]}]} for entry in entries]
    prompts, results = args.output / "prompts.jsonl", args.output / "measured.json"
    prompts.write_text("\n".join(map(json.dumps, entries)), encoding="utf-8")

    # Measure acceptance and speed-up, and check that every text equals that of plain `generate`.
    tokens = str(args.max_new_tokens)
    with results.open("w", encoding="utf-8") as stream, redirect_stdout(stream):
        specheads(["eval", "--target", args.target, "--heads", args.heads, "--prompts", str(prompts),
                   "--max-new-tokens", tokens, "--dtype", args.dtype, "--json"])  # fmt: skip
    measured = json.loads(results.read_text(encoding="utf-8"))
    print(f"tau {measured['acceptance_length']:.2f}, {measured['speed_up']:.2f}x, same texts: {measured['identical']}")

    folder = args.output / "heads"
    where = [args.repository] if args.repository else ["--to-folder", str(folder), "--overwrite"]
    options = ["--results", str(results), "--license", args.license, "--custom-generate"]
    specheads(["push", args.heads, *where, *options])

    # Anyone who has the package installed can now generate with the repository, without importing the package.
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype)
    inputs = tokenizer("def add(a, b):", return_tensors="pt")
    source = {"custom_generate": args.repository or str(folder), "trust_remote_code": True}
    text = target.generate(**inputs, **source, max_new_tokens=32, do_sample=False)
    print(tokenizer.decode(text[0]))


if __name__ == "__main__":
    main()
