"""Generate text with draft heads; it is the target's own text, only faster."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from ..tuning.turns import timed_generation
from .arguments import add_model_arguments, load_pair
from .display import marked_text, number, pos_acc_text, use_colour
from .measure import run_sample


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Models, prompt, sampling, and what to show."""
    add_model_arguments(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text to continue, or the user's message with --chat")
    prompt.add_argument("--prompt_file", type=argparse.FileType("r", encoding="utf-8"), help="file, - for stdin")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the tokenizer's chat template")
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, help="sample at this temperature (default: greedy)")
    parser.add_argument("--top_p", type=float, help="nucleus sampling")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--mark", action="store_true", help="mark accepted runs in the text")
    parser.add_argument("--compare", action="store_true", help="generate plainly as well, compare texts and speed")


def encode(
    tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel, prompt: str | list[dict[str, str]]
) -> BatchEncoding:
    """Token ids [1, T] and mask of a text, or of chat messages through the tokenizer's chat template."""
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    inputs.pop("token_type_ids", None)
    return inputs.to(target.get_input_embeddings().weight.device)


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    if args.temperature is None and args.top_p is None:
        return {"do_sample": False}
    options = {"temperature": args.temperature, "top_p": args.top_p}
    return {"do_sample": True, **{name: value for name, value in options.items() if value is not None}}


def run(args: argparse.Namespace) -> int:
    """Text on stdout, statistics on stderr; 1 if `--compare` finds a difference."""
    from transformers import TextStreamer, set_seed

    target, tokenizer, heads = load_pair(args)
    text = args.prompt if args.prompt is not None else args.prompt_file.read()
    inputs = encode(tokenizer, target, [{"role": "user", "content": text}] if args.chat else text)
    options = {"max_new_tokens": args.max_new_tokens, **_sampling(args)}
    if not (args.mark or args.compare):
        options["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    if args.mark:
        heads.adaptive = False  # plain steps in between would have no place among the marks
    set_seed(args.seed)  # the same seed gives the same tokens with and without heads
    sample = run_sample(target, heads, inputs, compare=False, **options)
    if args.compare:
        set_seed(args.seed)
        (sample.plain_token_ids,), sample.plain_seconds = timed_generation(target, inputs, **options)
    if args.mark:
        print(marked_text(sample.token_ids, sample.num_accepted, tokenizer.decode, use_colour()))
    elif args.compare:
        print(tokenizer.decode(sample.token_ids, skip_special_tokens=True))
    stats, num_tokens = sample.stats, len(sample.token_ids)
    print(
        f"\n{num_tokens} tokens in {sample.seconds:.2f} s ({num_tokens / sample.seconds:.1f}/s), "
        f"{stats.target_forwards} target forwards, acceptance_length {stats.acceptance_length:.2f}, "
        f"pos_acc {pos_acc_text(stats.pos_acc)}",
        file=sys.stderr,
    )
    if not args.compare:
        return 0
    verdict = "identical to" if sample.identical else "DIFFERENT from"
    print(f"{verdict} plain generate; speed-up {number(sample.speed_up, suffix='x')}", file=sys.stderr)
    return 0 if sample.identical else 1
