"""Draft vocabularies: the part of the target's vocabulary that draft heads draft over.

Heads trained with a draft vocabulary (EAGLE-3) have their own `lm_head` with one row per draft token. The vocabulary
is stored as in the authors' code, in two tensors next to the weights. `d2t` int64 [Vd] holds **offsets**: draft id i
stands for token `i + d2t[i]`. `t2d` bool [V] says which tokens can be drafted. Token ids ascend with draft ids, so
`logits[..., t2d]` are the target's logits in the order of the draft logits.

All heads can be *pruned* to a smaller draft vocabulary after training (FR-Spec, arXiv 2502.14856, section 3.2): the
projection to draft logits is then computed for the rows of the chosen tokens only. Fewer tokens can be drafted, but
verification is unchanged, so the text is still the target's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from .texts import Text, token_ids_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TokenIds = torch.Tensor | Sequence[int]  # token ids of the target, in any order


def draft_ids_problem(token_ids: torch.Tensor, vocab_size: int) -> str | None:
    """Says why token ids are not a draft vocabulary of a target with `vocab_size` tokens; `None` if they are one.

    Args:
        token_ids: int64 [Vd], in the order of the draft logits.
        vocab_size: V of the target.
    """
    if token_ids.dim() != 1 or not 1 <= len(token_ids) <= vocab_size:
        return f"a draft vocabulary holds 1 to {vocab_size} token ids, got a tensor of shape {list(token_ids.shape)}"
    if bool(((token_ids < 0) | (token_ids >= vocab_size)).any()):
        outside = int(token_ids[(token_ids < 0) | (token_ids >= vocab_size)][0])
        return f"the draft vocabulary has the token id {outside}, and the target's ids are 0 to {vocab_size - 1}"
    if bool((token_ids[1:] <= token_ids[:-1]).any()):
        return "the token ids of a draft vocabulary must be ascending, without repetition"
    return None


def mapping_problem(d2t: torch.Tensor, t2d: torch.Tensor) -> str | None:
    """Says why `d2t` [Vd] and `t2d` [V] contradict each other or are no draft vocabulary; `None` if they are one."""
    token_ids = torch.arange(len(d2t), device=d2t.device) + d2t
    if problem := draft_ids_problem(token_ids, len(t2d)):
        return problem
    drafted = t2d.nonzero()[:, 0]
    if len(drafted) != len(d2t):
        return f"`t2d` marks {len(drafted)} tokens, and `d2t` has {len(d2t)}"
    if bool((drafted != token_ids).any()):
        return "`t2d` and `d2t` disagree about which tokens are drafted"
    return None


def mapping_of(token_ids: TokenIds, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `d2t` int64 [Vd] and `t2d` bool [V] of a draft vocabulary, whose ids may be given in any order.

    Raises:
        ValueError: for ids that repeat or that the target does not have.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.long).cpu()
    if ids.dim() == 1:
        ids = ids.sort().values
    if problem := draft_ids_problem(ids, vocab_size):
        raise ValueError(f"{problem}; choose other token ids, e.g. `hf_specheads.trainer.frequent_tokens(...)`.")
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(len(ids)), t2d


def count_tokens(
    texts: Iterable[Text], vocab_size: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> torch.Tensor:
    """Counts how often every token occurs, int64 [V].

    Args:
        texts: Token ids of any shape; with a tokenizer also strings and chats.
        vocab_size: V of the target.
        tokenizer: Tokenizer of the target.

    Raises:
        ValueError: for token ids the target does not have, or strings without a tokenizer.
    """
    if isinstance(texts, str):
        raise ValueError(f"expected a list of texts, got the string {texts[:40]!r}; put it into a list.")
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for text in texts:
        if not isinstance(text, str) and len(text) == 0:
            continue
        ids = token_ids_of(text, tokenizer).cpu()
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            outside = int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())
            raise ValueError(
                f"the data has the token id {outside}, outside the target's {vocab_size} ids; tokenize it with "
                "the target's own tokenizer."
            )
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def most_frequent(counts: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the most frequent tokens by their counts [V], int64 [Vd] with ids ascending. Lower ids win ties, also
    among tokens that never occur.

    Raises:
        ValueError: for a size that is not between 1 and V.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(f"`size` of a draft vocabulary must be between 1 and {len(counts)}, got {size}.")
    return counts.sort(descending=True, stable=True).indices[:size].sort().values
