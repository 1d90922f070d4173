"""Generate text with draft heads; the text is the target's own, only faster."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .arguments import add_model_arguments, load_pair
from .display import emit, marked_text, note, number, plain_steps_text, pos_acc_text, use_colour
from .measure import Sample, Summary, run_sample

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..diagnosis.difference import Difference
    from ..heads.base import DraftHead

AT_A_TIE = (
    "The texts differ where two tokens are so close that rounding decides between them. Generated again, with other "
    "draft trees, they were the same."
)
NOT_AGAIN = (
    "The texts differ by more than rounding, but were the same when they were generated again. `specheads diff` "
    "compares texts for which heads draft in every round."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for models, prompt, sampling and output."""
    add_model_arguments(parser)
    add_prompt_argument(parser)
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="maximum number of new tokens")
    parser.add_argument("--temperature", type=float, help="sample at this temperature (default: greedy)")
    parser.add_argument("--top-p", type=float, help="sample from the smallest set of tokens with this probability")
    parser.add_argument("--seed", type=int, default=0, help="seed for sampling")
    parser.add_argument("--mark", action="store_true", help="mark accepted runs in the text")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also generate plainly, compare the texts, and explain a difference",
    )


def add_prompt_argument(parser: argparse.ArgumentParser) -> None:
    """Adds options for a prompt, given as text or in a file."""
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text to continue, or the user's message with --chat")
    prompt.add_argument("--prompt-file", metavar="FILE", help="file that holds the prompt; - for stdin")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the tokenizer's chat template")


def encode(
    tokenizer: PreTrainedTokenizerBase, target: PreTrainedModel, prompt: str | list[dict[str, str]]
) -> dict[str, torch.Tensor]:
    """Token ids [1, T] and mask of a text, or of chat messages rendered by the tokenizer's chat template."""
    from ..texts import token_ids_of

    ids = token_ids_of(prompt, tokenizer)[None].to(target.get_input_embeddings().weight.device)
    return {"input_ids": ids, "attention_mask": ids.new_ones(ids.shape)}


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    if args.temperature is None and args.top_p is None:
        return {"do_sample": False}
    options = {"temperature": args.temperature, "top_p": args.top_p}
    return {"do_sample": True, **{name: value for name, value in options.items() if value is not None}}


def read_prompt(args: argparse.Namespace) -> str:
    """Reads the text of `--prompt` or `--prompt-file` as UTF-8, whatever the encoding of arguments and stdin."""
    if args.prompt is None and args.prompt_file != "-":
        return Path(args.prompt_file).read_text(encoding="utf-8")
    text = sys.stdin.read() if args.prompt is None else args.prompt
    # Python keeps bytes that the locale cannot decode as surrogates, which tokenizers do not accept.
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def run(args: argparse.Namespace) -> int:
    """Prints the text to stdout and statistics to stderr; returns 1 if `--compare` finds a difference but no tie."""
    text = read_prompt(args)
    target, tokenizer, heads = load_pair(args)
    from transformers import TextStreamer

    inputs = encode(tokenizer, target, [{"role": "user", "content": text}] if args.chat else text)
    options = {"max_new_tokens": args.max_new_tokens, **_sampling(args)}
    streams = not (args.mark or args.compare or args.json)
    if streams:
        options["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    note(args, "Generating ...")
    # The same seed gives the same tokens with and without heads.
    sample = run_sample(target, heads, inputs, compare=args.compare, seed=args.seed, **options)
    difference, at_a_tie = None, False
    if sample.identical is False and not options["do_sample"]:
        note(args, "The texts differ; looking for the reason ...")
        difference, at_a_tie = _explained(sample, target, inputs, heads, tokenizer, options)
    text = tokenizer.decode(sample.token_ids, skip_special_tokens=True)
    shown = marked_text(sample.token_ids, sample.steps, tokenizer.decode, use_colour()) if args.mark else text
    if not streams:
        why = {} if difference is None else {"difference": difference.to_dict(), "at_a_tie": at_a_tie}
        emit(args, {**Summary([sample]).to_dict(), "text": text, "token_ids": sample.token_ids, **why}, shown)
    print(_statistics(sample), file=sys.stderr)
    if difference is not None:
        same_again = difference.verdict == "same"
        print(f"\n{(AT_A_TIE if at_a_tie else NOT_AGAIN) if same_again else difference}", file=sys.stderr)
    return int(sample.identical is False and not at_a_tie)


def _explained(
    sample: Sample,
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    heads: DraftHead,
    tokenizer: PreTrainedTokenizerBase,
    options: dict[str, Any],
) -> tuple[Difference, bool]:
    """Generates both texts again to explain why they differ. Also tells whether rounding decides where they do.

    The texts may be the same this time: which trees are drafted depends on measured times, and every number of nodes
    rounds differently. Then the tokens of the sample are judged.
    """
    from ..diagnosis.difference import explain_difference, part_at_a_tie

    difference = explain_difference(target, inputs, heads, tokenizer=tokenizer, **options)
    if difference.verdict != "same":
        return difference, difference.verdict == "tie"
    texts = sample.token_ids, cast(list[int], sample.plain_token_ids)
    nodes = heads.tree_config.most_nodes
    return difference, part_at_a_tie(target, inputs["input_ids"], *texts, nodes=nodes, **options)


def _statistics(sample: Sample) -> str:
    """Statistics of the generation, and its comparison to plain generation if there was one."""
    stats, num_tokens = sample.stats, len(sample.token_ids)
    because = [stats.plain_because] if stats.plain_because else []
    text = (
        f"\n{num_tokens} tokens in {sample.seconds:.2f} s ({num_tokens / sample.seconds:.1f}/s), "
        f"{stats.target_forwards} target forwards, tokens_per_forward {stats.tokens_per_forward:.2f}, "
        f"acceptance_length {stats.acceptance_length:.2f}, pos_acc {pos_acc_text(stats.pos_acc)}\n"
        f"plain steps {plain_steps_text(stats.plain_steps, because)}"
    )
    if sample.identical is None:
        return text
    verdict = "identical to" if sample.identical else "DIFFERENT from"
    return f"{text}\n{verdict} plain generate; speed-up {number(sample.speed_up, suffix='x')}"
