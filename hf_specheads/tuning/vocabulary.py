"""Measuring how many of the most frequent tokens are worth drafting (FR-Spec, arXiv 2502.14856)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..contract import DraftingContract
from ..draft_vocabulary import count_tokens, most_frequent
from ..metrics import acceptance_length
from ..texts import Text, all_token_ids
from .progress import bar
from .turns import Prompts, every_round_drafts, generate_text, take_turns, timed_generation

Timed = tuple[float, list[list[int]]]  # (seconds per token, accepted tokens of each round of each sequence)


@dataclass(frozen=True)
class VocabularySize:
    """Measurements for one size of the draft vocabulary.

    Attributes:
        size: Number of tokens; `None` for the whole vocabulary.
        coverage: Share of the corpus's tokens that are in the draft vocabulary.
        acceptance_length: Tokens per round.
        tokens_per_second: Tokens per second of timed generations, including the prefill.
    """

    size: int | None
    coverage: float
    acceptance_length: float
    tokens_per_second: float


def tune_vocabulary(
    target: PreTrainedModel,
    heads: DraftingContract,
    prompts: Prompts,
    sizes: Sequence[int | None],
    corpus: Iterable[Text] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 64,
    repeats: int = 3,
    **generate_options: Any,
) -> list[VocabularySize]:
    """Prunes heads to the most frequent tokens of a corpus, trying several sizes and keeping the fastest (FR-Spec).

    All sizes are measured with the current draft tree of the heads.

    Args:
        target: The target.
        heads: The target's heads. Afterwards they are pruned to the fastest size, or not pruned if that is `None`.
        prompts: Prompts to generate from: token ids, [1, T] or plain lists, or strings and chats.
        sizes: Sizes to try; `None` stands for no pruning.
        corpus: Texts to count tokens in, in the same forms as `prompts`. By default these are the prompts with the
            target's continuations, which is a small sample: frequent tokens of other texts may be missing.
        tokenizer: The target's tokenizer, for strings and chats.
        max_new_tokens: Tokens per prompt in every run.
        repeats: Number of times each size is timed; the sizes take turns.
        **generate_options: Options of `generate`; greedy by default.

    Returns:
        The measurements of all sizes, the fastest first.

    Raises:
        ValueError: if there are no sizes, a size is not between 1 and V, or strings are given without a tokenizer.
    """
    if not sizes:
        raise ValueError("`sizes` must hold at least one size to try.")
    options = {**generate_options, "max_new_tokens": max_new_tokens}
    prompts = all_token_ids(prompts, tokenizer)
    heads.bind(target)
    if corpus is None:
        corpus = [generate_text(target, prompt, **options) for prompt in bar(prompts, "texts of the target")]
    counts = count_tokens(corpus, heads.target_vocab_size, tokenizer)
    chosen = {size: None if size is None else most_frequent(counts, size) for size in sizes}
    runs = _time_vocabularies(target, heads, prompts, chosen, repeats, options)
    total = counts.sum().clamp_min(1)
    coverage = {size: 1.0 if ids is None else float(counts[ids].sum() / total) for size, ids in chosen.items()}
    found = [_measured(size, coverage[size], runs[size]) for size in chosen]
    found.sort(key=lambda one: -one.tokens_per_second)
    heads.prune_draft_vocabulary(chosen[found[0].size])
    return found


def _time_vocabularies(
    target: PreTrainedModel,
    heads: DraftingContract,
    prompts: Prompts,
    chosen: dict[int | None, torch.Tensor | None],
    repeats: int,
    options: dict[str, Any],
) -> dict[int | None, list[list[Timed]]]:
    """Times every size, and returns its times and accepted tokens as `[repeat][prompt]`."""

    def run(size: int | None, prompt: Any, turn: int = 0, **changes: Any) -> Timed:
        heads.prune_draft_vocabulary(chosen[size]).bind(target)  # binding copies rows, which must not be timed
        with every_round_drafts(heads):
            (new_ids,), seconds = timed_generation(target, prompt, assistant_model=heads, **{**options, **changes})
        return seconds / len(new_ids), heads.last_stats.num_accepted

    def warm_up(size: int | None, prompt: Any) -> None:
        run(size, prompt, max_new_tokens=8)

    return take_turns(chosen, prompts, run, repeats, warm_up, "draft vocabularies in turns")


def _measured(size: int | None, coverage: float, runs: list[list[Timed]]) -> VocabularySize:
    """Summarises the runs of one size. Every prompt counts with the time of its fastest repeat."""
    fastest = [min(seconds for seconds, _ in of_prompt) for of_prompt in zip(*runs, strict=True)]
    accepted = [row for repeat in runs for _, rows in repeat for row in rows]
    return VocabularySize(size, coverage, acceptance_length(accepted), len(fastest) / sum(fastest))
