"""Find the fastest draft tree, and draft vocabulary, of heads with a target on this machine; saved with the heads.

The heads then use that tree on machines of this name, type of weights and number of threads, if no other is asked for.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from ..heads.base import DraftHead
from ..tuning.vocabulary import VocabularySize
from .arguments import add_heads_arguments, add_target_arguments, load_pair
from .evaluate import read_prompts
from .generate import encode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Heads, target, prompts, what to tune, and where the heads go."""
    parser.add_argument("heads", help="draft heads: folder or Hub id")
    add_target_arguments(parser)
    add_heads_arguments(parser)
    parser.add_argument(
        "--prompts", type=Path, nargs="+", help=".jsonl or .txt files like the texts to come (default: the demo's)"
    )
    parser.add_argument("--limit", type=int, default=6, help="use only the first N prompts (default: 6)")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="times everything is timed (default: 3)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    parser.add_argument("--output", type=Path, help="folder for the tuned heads (default: where they came from)")
    parser.add_argument("--dry_run", action="store_true", help="save nothing")
    vocabulary = parser.add_argument_group("draft vocabulary (default: left as it is)")
    vocabulary.add_argument(
        "--draft-vocab", "--draft_vocab", dest="draft_vocab", type=_size, nargs="+", metavar="N",
        help="prune drafts to the N most frequent tokens; of several, the fastest; 'all' for no pruning",
    )  # fmt: skip
    vocabulary.add_argument(
        "--corpus", default="auto", metavar="FILE",
        help=".jsonl or .txt file to count tokens in (default 'auto': the prompts and what the target makes of them)",
    )  # fmt: skip


def _size(text: str) -> int | None:
    return None if text == "all" else int(text)


def run(args: argparse.Namespace) -> int:
    """Tunes, prints what was measured, and saves."""
    import torch

    from ..tuning.tune import tune

    if args.threads:
        torch.set_num_threads(args.threads)
    target, tokenizer, heads = load_pair(args)
    files = args.prompts or [Path(__file__).with_name("demo_prompts.jsonl")]
    prompts = [encode(tokenizer, target, prompt)["input_ids"] for prompt in read_prompts(files)[: args.limit]]
    if args.draft_vocab:
        _choose_vocabulary(args, target, tokenizer, heads, prompts)
    result = tune(target, heads, prompts, max_new_tokens=args.max_new_tokens, repeats=args.repeats)
    print(f"{result}\n{result.candidates} trees considered, {result.seconds:.0f} s.")
    folder = args.output or (Path(args.heads) if Path(args.heads).is_dir() else None)
    if args.dry_run:
        return 0
    if folder is None:
        raise ValueError(f"{args.heads!r} is no folder to save tuned heads in; pass --output FOLDER, or --dry_run.")
    heads.save_pretrained(folder)
    print(f"Saved in {folder} for {result.key['machine']}, {result.key['dtype']}.")
    return 0


def _choose_vocabulary(
    args: argparse.Namespace, target: Any, tokenizer: Any, heads: DraftHead, prompts: list[torch.Tensor]
) -> None:
    from ..tuning.vocabulary import tune_vocabulary

    corpus = None
    if args.corpus != "auto":
        corpus = [encode(tokenizer, target, text)["input_ids"][0] for text in read_prompts([Path(args.corpus)])]
    options = {"max_new_tokens": args.max_new_tokens, "repeats": args.repeats}
    found: list[VocabularySize] = tune_vocabulary(target, heads, prompts, args.draft_vocab, corpus, **options)
    print(f"{'draft vocabulary':<18} {'covers':>7} {'tau':>5} {'tokens/s':>9}")
    for one in found:
        size = "all" if one.size is None else str(one.size)
        print(f"{size:<18} {one.coverage:>7.1%} {one.acceptance_length:>5.2f} {one.tokens_per_second:>9.1f}")
    print()
