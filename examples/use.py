"""Generate with draft heads: the same text as plain `generate`, in fewer forwards of the target.

    python examples/use.py
    python examples/use.py --target org/model --heads org/heads-for-it --dtype bfloat16 --prompt "Who was Ada?"

Without arguments, the script runs the pair in `model_cards/`, offline.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from hf_specheads import load_heads

PAIR = Path(__file__).resolve().parents[1] / "model_cards"
PROMPT = (
    "I want a table with topic, host, day, time, room from these sentences:\n"
    "The meeting about yoga is hosted by Elliot Sandoval on Friday at 15:40 in room MT-471.\n"
    "The meeting about insurance is hosted by Jelena Horvath on Sunday at 18:45 in room RF-730."
)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default=str(PAIR / "target"), help="folder or Hub id of a language model")
parser.add_argument("--heads", default=str(PAIR / "poss3-longer"), help="folder or Hub id of draft heads made for it")
parser.add_argument("--prompt", default=PROMPT)
parser.add_argument("--max-new-tokens", type=int, default=128)
parser.add_argument("--dtype", default="float32", help="of target and heads; in 16 bits near-ties may fall otherwise")


def main(argv: list[str] | None = None) -> None:
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype)
    target.to("cuda" if torch.cuda.is_available() else "cpu")
    heads = load_heads(args.heads, dtype=args.dtype)

    if tokenizer.chat_template:
        chat = [{"role": "user", "content": args.prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    else:
        inputs = tokenizer(args.prompt, return_tensors="pt")
    inputs = inputs.to(target.device)

    # Pass the draft heads as `assistant_model`; all other arguments of `generate` work as usual.
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    print(args.prompt, end="\n\n" if tokenizer.chat_template else "")
    text = target.generate(**inputs, assistant_model=heads, streamer=streamer, **options)
    stats = heads.last_stats
    print(f"\n{stats.acceptance_length:.2f} tokens per round (tau), {stats.target_forwards} forwards of the target")
    print("accepted at draft position 1, 2, ...:", " ".join(f"{share:.2f}" for share in stats.pos_acc))

    # Plain decoding gives the same text. A first call of each is not timed, because it includes one-time costs.
    seconds = {}
    for name, assistant in (("plain", None), ("with heads", heads)):
        target.generate(**inputs, assistant_model=assistant, **{**options, "max_new_tokens": 8})
        started = time.perf_counter()
        again = target.generate(**inputs, assistant_model=assistant, **options)
        seconds[name] = time.perf_counter() - started
        print(f"{name}: {seconds[name]:.2f} s, the same text: {torch.equal(again, text)}")
    print(f"speed-up {seconds['plain'] / seconds['with heads']:.2f}x")


if __name__ == "__main__":
    main()
