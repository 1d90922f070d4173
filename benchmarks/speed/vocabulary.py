"""Draft heads pruned to the most frequent tokens: acceptance lost and time won, by size of the draft vocabulary.

    python -m benchmarks vocabulary --heads model_cards/poss3 model_cards/eagle

Tokens are counted in the files of Python's standard library that the shipped target was trained on, without held-out
files (`--corpus`: in other texts). In addition, a random target of about 100M parameters, most of them in its
vocabulary, is timed, because there the projection to logits is most of drafting. Its acceptance is meaningless; only
the milliseconds of a round matter.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specheads import AutoDraftHead, DraftHead
from hf_specheads.draft_vocabulary import count_tokens, most_frequent
from hf_specheads.trainer.shipped_pair.corpus import is_held_out

from .. import setup
from ..results import Result, column_table, draft_tree, footnote, markdown_table, millions, number, percent, same_text
from ..setup import Inputs
from ..sides import TO_THE_END, compare, plain_and, timed_in_turns

# the last size is the whole vocabulary
RANDOM_SIZES, CHAIN = (8192, 16384, 32768, 128000), {"kind": "chain", "depth": 4}
PROFILED_TOKENS, FORWARDS = 32, 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, prompts, vocabulary sizes, and texts to count tokens in."""
    setup.add_generation_arguments(parser, heads=["poss3"], prompts=["chats"])
    parser.set_defaults(limit=8)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--corpus", type=Path, nargs="+", help="text files to count tokens in")


def library_files() -> list[Path]:
    """Returns modules of the standard library that the shipped target was trained on."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for path in root.glob("*.py") if not is_held_out(path, root))


def draft_milliseconds(target: PreTrainedModel, heads: dict[str, DraftHead], prompts: list[Inputs]) -> dict[str, Any]:
    """Returns the mean milliseconds of drafting in a round by heads. The heads take turns and draft in every round."""
    timed = {name: one.with_tree(stop_below=0.0) for name, one in heads.items()}
    for one in timed.values():
        one.adaptive, one.profile = False, True
    found = compare(target, plain_and(timed, **TO_THE_END), prompts, PROFILED_TOKENS, repeats=1)
    return {name: found[name]["draft_milliseconds"] for name in heads}


def measure_heads(
    target: PreTrainedModel, folder: str, counts: torch.Tensor, prompts: list[Inputs], args: argparse.Namespace
) -> dict[str, Any]:
    """Measures one head at every size of the draft vocabulary, and with the whole vocabulary."""
    kept = {str(size): most_frequent(counts, size) for size in sorted(args.sizes)} | {str(len(counts)): None}
    heads = {size: setup.load_bound_heads(target, folder).prune_draft_vocabulary(ids) for size, ids in kept.items()}
    covered = {size: 1.0 if ids is None else float(counts[ids].sum() / counts.sum()) for size, ids in kept.items()}
    found = compare(target, plain_and(heads), prompts, args.max_new_tokens, args.repeats)
    drafted = draft_milliseconds(target, heads, prompts[:1])
    return {size: {"coverage": covered[size], "draft_milliseconds": drafted[size], **found[size]} for size in kept}


def measure_random(dtype: torch.dtype) -> dict[str, Any]:
    """Measures drafting and a target forward, in milliseconds, for a random target whose vocabulary outweighs its
    layers."""
    vocabulary = RANDOM_SIZES[-1]
    target = setup.random_llama(
        dtype, vocab_size=vocabulary, hidden_size=512, intermediate_size=1536, num_hidden_layers=12,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    generator, heads = torch.Generator().manual_seed(1), {}
    for size in RANDOM_SIZES:
        heads[str(size)] = one = AutoDraftHead.from_target(target, "eagle", tree_config=CHAIN).eval()
        if size < vocabulary:
            one.prune_draft_vocabulary(torch.randperm(vocabulary, generator=generator)[:size])
    with torch.no_grad():
        seconds, _ = timed_in_turns({"target": lambda: target(torch.zeros(1, 5, dtype=torch.long))}, FORWARDS)
    return {
        "parameters": target.num_parameters(),
        "vocabulary": vocabulary,
        "tree": one.tree_config.to_dict(),
        "target_milliseconds": 1000 * statistics.median(seconds["target"]),
        "draft_milliseconds": draft_milliseconds(target, heads, setup.random_prompts(1, "cpu")),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all heads, and the random target."""
    target, tokenizer = setup.load_target(args)
    prompts = setup.load_prompts(args.prompts, tokenizer, args.limit)
    files = args.corpus or library_files()
    texts = (tokenizer(file.read_text(encoding="utf-8", errors="replace"))["input_ids"] for file in files)
    counts = count_tokens(texts, target.config.vocab_size)
    return {
        "counted_tokens": int(counts.sum()),
        "heads": {setup.display_name(one): measure_heads(target, one, counts, prompts, args) for one in args.heads},
        "random": measure_random(target.dtype),
    }


def table(result: Result) -> str:
    """Heads by size of their draft vocabulary, then the random target, for which only times are meaningful."""
    columns = {
        "share of counted tokens": lambda row: percent(row["coverage"]), "tau": ("acceptance_length", 2),
        "draft ms per round": ("draft_milliseconds", 2), "tokens/s": ("tokens_per_second", 1),
        "speed-up": ("speed_up", 2, "x"), "same text": same_text,
    }  # fmt: skip
    random = result["random"]
    times = [[size, number(spent)] for size, spent in random["draft_milliseconds"].items()]
    told = (
        f"The last table is for a random target of {millions(random['parameters'])} parameters and "
        f"{random['vocabulary']} tokens, {draft_tree(random['tree'])}. A forward of this target over 5 tokens takes "
        f"{number(random['target_milliseconds'])} ms. Its acceptance is meaningless.\n"
    )
    tables = (
        column_table(columns, result["heads"], "heads", "draft vocabulary"),
        markdown_table(["draft vocabulary", "draft ms per round"], times),
    )
    return "\n".join([*tables, told]) + footnote(result, "{counted_tokens} tokens counted, {dtype}")
