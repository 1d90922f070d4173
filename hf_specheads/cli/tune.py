"""Find the fastest draft tree, and draft vocabulary, of heads on this machine; the result is saved with the heads.

The heads then use that tree on machines with the same name, dtype of weights and number of threads, unless another
tree is requested.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import add_heads_arguments, add_target_arguments, load_pair
from .demo import prompts_for
from .display import emit, note, table
from .prompts import read_prompts, texts_of

if TYPE_CHECKING:
    from ..heads.base import DraftHead
    from ..tuning.vocabulary import VocabularySize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds options for heads, target, prompts, what to tune, and where to save."""
    parser.add_argument("heads", help="draft heads: folder or Hub id")
    add_target_arguments(parser)
    add_heads_arguments(parser)
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        help=".jsonl or .txt files with prompts like those in use (default: the demo's)",
    )
    parser.add_argument("--limit", type=int, default=6, metavar="N", help="use only the first N prompts")
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="new tokens per prompt, in every run"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="number of timed runs of everything")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's own choice)")
    parser.add_argument("--output", type=Path, help="folder for the tuned heads (default: where they came from)")
    parser.add_argument("--dry-run", action="store_true", help="save nothing")
    vocabulary = parser.add_argument_group("draft vocabulary (default: not changed)")
    vocabulary.add_argument(
        "--draft-vocab", type=_size, nargs="+", metavar="N",
        help="prune drafts to the N most frequent tokens; the fastest of several wins; 'all' for no pruning",
    )  # fmt: skip
    vocabulary.add_argument(
        "--corpus", default="auto", metavar="FILE",
        help=".jsonl or .txt file to count tokens in (default 'auto': the prompts and the target's continuations)",
    )  # fmt: skip


def _size(text: str) -> int | None:
    return None if text == "all" else int(text)


def run(args: argparse.Namespace) -> int:
    """Tunes, prints the measurements, and saves the heads."""
    folder = args.output or (Path(args.heads) if Path(args.heads).is_dir() else None)
    if folder is None and not args.dry_run:
        raise ValueError(f"{args.heads!r} is not a folder to save tuned heads in; pass --output FOLDER, or --dry-run.")
    # Prompts are read first, so that a wrong file is refused before any model is loaded.
    prompts: list[Any] = read_prompts(args.prompts) if args.prompts else []
    target, tokenizer, heads = load_pair(args)
    prompts = (texts_of(prompts, tokenizer) or prompts_for(tokenizer))[: args.limit]
    import torch

    from ..tuning.tune import tune

    if args.threads:
        torch.set_num_threads(args.threads)
    sizes = _choose_vocabulary(args, target, tokenizer, heads, prompts) if args.draft_vocab else []
    note(
        args,
        f"Timing trees on {len(prompts)} prompts, {args.repeats} times each (minutes for a large target) ...",
    )
    result = tune(
        target, heads, prompts, tokenizer=tokenizer, max_new_tokens=args.max_new_tokens, repeats=args.repeats
    )
    lines = [_vocabularies(sizes)] if sizes else []
    lines.append(f"{result}\n{result.candidates} trees considered, {result.seconds:.0f} s.")
    if not args.dry_run:
        heads.save_pretrained(folder)
        lines.append(f"Saved in {folder} for {result.key['machine']}, {result.key['dtype']}.")
    facts = {
        **result.entry(),
        "trees": [dataclasses.asdict(one) for one in result.trees],
        "draft_vocabularies": [dataclasses.asdict(one) for one in sizes],
        "seconds": result.seconds,
        "saved_in": None if args.dry_run else str(folder),
    }
    emit(args, facts, "\n".join(lines))
    return 0


def _choose_vocabulary(
    args: argparse.Namespace, target: Any, tokenizer: Any, heads: DraftHead, prompts: list[Any]
) -> list[VocabularySize]:
    from ..tuning.vocabulary import tune_vocabulary

    corpus = None if args.corpus == "auto" else texts_of(read_prompts([Path(args.corpus)]), tokenizer)
    note(args, f"Timing {len(args.draft_vocab)} draft vocabularies on {len(prompts)} prompts ...")
    options = {"tokenizer": tokenizer, "max_new_tokens": args.max_new_tokens, "repeats": args.repeats}
    return tune_vocabulary(target, heads, prompts, args.draft_vocab, corpus, **options)


def _vocabularies(found: list[VocabularySize]) -> str:
    rows = [
        ("all" if one.size is None else str(one.size), f"{one.coverage:.1%}", f"{one.acceptance_length:.2f}",
         f"{one.tokens_per_second:.1f}")
        for one in found
    ]  # fmt: skip
    return table(("draft vocabulary", "covers", "tau", "tokens/s"), rows) + "\n"
