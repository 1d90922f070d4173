"""Heads pruned to the most frequent tokens: acceptance lost and time won, by size of the draft vocabulary.

    python -m benchmarks vocabulary --heads model_cards/poss3 model_cards/eagle

Tokens are counted in Python's standard library, which the shipped target was trained on, without the files that
prompts were taken from (`--corpus`: in other texts). With `--random_vocabulary V`, a random target of about 100M
parameters with V tokens is timed as well, where the projection to V logits is most of drafting: what it accepts means
nothing, only the milliseconds of a round do.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specheads import AutoDraftHead, DraftHead
from hf_specheads.draft_vocabulary import count_tokens, most_frequent
from hf_specheads.tuning.turns import take_turns

from .. import setup
from ..results import Result, column_table, draft_tree, footnote, markdown_table, millions, number, percent, same_text
from ..setup import Inputs
from ..sides import compare, plain_and, timed_in_turns

DRAFTS = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pair, prompts, sizes, and where tokens are counted."""
    setup.add_generation_arguments(parser, heads=["poss3"], prompts=["chats"])
    parser.set_defaults(limit=8)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--corpus", type=Path, nargs="+", help="text files to count tokens in")
    parser.add_argument("--random_vocabulary", type=int, default=128000, help="V of the random target, 0 for none")
    parser.add_argument("--random_sizes", type=int, nargs="+", default=[8192, 16384, 32768])


def library_files() -> list[Path]:
    """Modules of the standard library but those that prompts come from."""
    used = {entry["name"].split(":")[0] for name in ("held_out", "tuning") for entry in setup.prompt_entries(name)}
    return sorted(file for file in Path(statistics.__file__).parent.glob("*.py") if file.name not in used)


@torch.no_grad()
def draft_milliseconds(target: PreTrainedModel, heads: list[DraftHead], rows: int = 32) -> list[float]:
    """Median milliseconds of drafting one round's tree after a random context, all heads taking turns."""
    torch.manual_seed(0)
    vocab = target.config.vocab_size
    ids = torch.randint(vocab, (1, rows + 1))

    def run(index: int, ids: torch.Tensor, turn: int = 0) -> float:
        timed = heads[index].with_tree(stop_below=0.0)
        timed.adaptive, timed.profile = False, True
        options = {"max_new_tokens": 2 + timed.tree_config.depth, "do_sample": False, "eos_token_id": None}
        target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=timed, **options)
        return timed.last_stats.seconds["draft"] / timed.last_stats.rounds

    def warm_up(index: int, ids: torch.Tensor) -> None:
        run(index, ids)
        run(index, ids)

    seconds = take_turns(range(len(heads)), [ids], run, DRAFTS, warm_up)
    return [1000 * statistics.median(spent for (spent,) in repeats) for repeats in seconds.values()]


def measure_heads(
    target: PreTrainedModel, folder: str, counts: torch.Tensor, prompts: list[Inputs], args: argparse.Namespace
) -> dict[str, Any]:
    """One head in every size, and whole."""
    sizes = [*args.sizes, len(counts)]
    heads = {str(size): setup.load_bound_heads(target, folder) for size in sizes}
    for size in args.sizes:
        heads[str(size)].prune_draft_vocabulary(most_frequent(counts, size))
    found = compare(target, plain_and(heads), prompts, args.max_new_tokens, args.repeats)
    drafted = draft_milliseconds(target, list(heads.values()))
    return {
        str(size): {
            "coverage": float(counts[most_frequent(counts, size)].sum() / counts.sum()),
            "draft_milliseconds": milliseconds,
            **found[str(size)],
        }
        for size, milliseconds in zip(sizes, drafted, strict=True)
    }


def measure_random(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """Milliseconds of drafting and of a target forward, for a random target whose vocabulary outweighs its layers."""
    target = setup.random_llama(
        dtype, vocab_size=args.random_vocabulary, hidden_size=512, intermediate_size=1536, num_hidden_layers=12,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    tree = {"kind": "chain", "depth": 4}
    sizes = [size for size in args.random_sizes if size < args.random_vocabulary]
    heads = [AutoDraftHead.from_target(target, "eagle", tree_config=tree).eval() for _ in (*sizes, None)]
    generator = torch.Generator().manual_seed(1)
    for size, one in zip(sizes, heads, strict=False):
        one.prune_draft_vocabulary(torch.randperm(args.random_vocabulary, generator=generator)[:size])
    drafted = draft_milliseconds(target, heads)
    ids = torch.zeros(1, 5, dtype=torch.long)
    with torch.no_grad():
        seconds, _ = timed_in_turns({"target": lambda: target(ids)}, DRAFTS)
    return {
        "parameters": setup.count_parameters(target),
        "vocabulary": args.random_vocabulary,
        "tree": heads[0].tree_config.to_dict(),
        "target_milliseconds": 1000 * statistics.median(seconds["target"]),
        "draft_milliseconds": dict(zip(map(str, (*sizes, args.random_vocabulary)), drafted, strict=True)),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All heads, and the random target."""
    target, tokenizer = setup.load_target(args)
    prompts = setup.load_prompts(args.prompts, tokenizer, args.limit)
    files = args.corpus or library_files()
    texts = (tokenizer(file.read_text(encoding="utf-8", errors="replace"))["input_ids"] for file in files)
    counts = count_tokens(texts, target.config.vocab_size)
    return {
        **setup.settings(args, prompts),
        "counted_tokens": int(counts.sum()),
        "heads": {setup.display_name(one): measure_heads(target, one, counts, prompts, args) for one in args.heads},
        "random": measure_random(args, target.dtype) if args.random_vocabulary else None,
    }


def table(result: Result) -> str:
    """Heads by size of their draft vocabulary; the random target, where only times mean something."""
    columns = {
        "of the counted": lambda row: percent(row["coverage"]), "tau": ("acceptance_length", 2),
        "draft ms": ("draft_milliseconds", 2), "tokens/s": ("tokens_per_second", 1),
        "speed-up": ("speed_up", 2, "x"), "same text": same_text,
    }  # fmt: skip
    text = column_table(columns, result["heads"], "heads", "draft vocabulary")
    if random := result["random"]:
        times = [[size, number(spent)] for size, spent in random["draft_milliseconds"].items()]
        text += "\n" + markdown_table(["draft vocabulary", "draft ms"], times)
        text += (
            f"\nA random target of {millions(random['parameters'])} parameters and {random['vocabulary']} tokens, "
            f"{draft_tree(random['tree'])}; its own forward over 5 tokens takes "
            f"{number(random['target_milliseconds'])} ms. Acceptance means nothing there.\n"
        )
    return text + footnote(result, "{counted_tokens} tokens counted, {dtype}")
