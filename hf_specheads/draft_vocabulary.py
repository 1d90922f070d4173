"""Draft vocabularies: the part of the target's vocabulary that draft heads draft over.

Heads trained with one (EAGLE-3) have an `lm_head` of that many rows of their own. It is stored as the authors store
it, in two tensors next to the weights: `d2t` int64 [Vd] holds **offsets**, draft id i stands for token `i + d2t[i]`;
`t2d` bool [V] says which tokens can be drafted. Token ids ascend with draft ids, so that `logits[..., t2d]` are the
target's logits in the order of the draft's.

Any other heads can be *pruned* to one after training (FR-Spec, arXiv 2502.14856, section 3.2): only the rows of the
chosen tokens of whatever projects to draft logits are multiplied. Fewer tokens can be drafted, none is verified
otherwise, so the text stays the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .configuration import DraftHeadConfig
from .errors import WrongTargetError
from .features import BorrowedModules

PRUNED_TOKEN_IDS = "pruned_token_ids"
ROWS_AT_ONCE = 256  # columns of a weight read through its module in one call


def draft_ids_problem(token_ids: torch.Tensor, vocab_size: int) -> str | None:
    """Why token ids are no draft vocabulary of a target with `vocab_size` tokens, `None` if they are one.

    Args:
        token_ids: int64 [Vd], in the order of the draft logits.
        vocab_size: V.
    """
    if token_ids.dim() != 1 or not 1 <= len(token_ids) <= vocab_size:
        return f"a draft vocabulary holds 1 to {vocab_size} token ids, got a tensor of shape {list(token_ids.shape)}"
    if bool(((token_ids < 0) | (token_ids >= vocab_size)).any()):
        outside = int(token_ids[(token_ids < 0) | (token_ids >= vocab_size)][0])
        return f"the draft vocabulary has the token id {outside}, and the target's ids are 0 to {vocab_size - 1}"
    if bool((token_ids[1:] <= token_ids[:-1]).any()):
        return "the token ids of a draft vocabulary must ascend, each once"
    return None


def mapping_problem(d2t: torch.Tensor, t2d: torch.Tensor) -> str | None:
    """Why `d2t` [Vd] and `t2d` [V] contradict each other or are no draft vocabulary, `None` if they fit."""
    token_ids = torch.arange(len(d2t), device=d2t.device) + d2t
    if problem := draft_ids_problem(token_ids, len(t2d)):
        return problem
    drafted = t2d.nonzero()[:, 0]
    if len(drafted) != len(d2t):
        return f"`t2d` marks {len(drafted)} tokens, and `d2t` has {len(d2t)}"
    if bool((drafted != token_ids).any()):
        return "`t2d` marks other tokens than those `d2t` leads to"
    return None


def mapping_of(token_ids: torch.Tensor | Sequence[int], vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`d2t` int64 [Vd] and `t2d` bool [V] of a draft vocabulary, given in any order.

    Raises:
        ValueError: for ids that repeat or that the target does not have.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.long).cpu()
    if ids.dim() == 1:
        ids = ids.sort().values
    if problem := draft_ids_problem(ids, vocab_size):
        raise ValueError(f"{problem}; choose others, e.g. `hf_specheads.trainer.frequent_tokens(...)`.")
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return ids - torch.arange(len(ids)), t2d


def count_tokens(texts: Iterable[torch.Tensor | Sequence[int]], vocab_size: int) -> torch.Tensor:
    """How often every token occurs, int64 [V].

    Args:
        texts: Token ids, of any shape.
        vocab_size: V of the target.

    Raises:
        ValueError: for token ids the target does not have.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for text in texts:
        ids = torch.as_tensor(text, dtype=torch.long).flatten().cpu()
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            outside = int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())
            raise ValueError(
                f"the data has the token id {outside}, outside the target's {vocab_size} ids; tokenize it with "
                "the target's own tokenizer."
            )
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def most_frequent(counts: torch.Tensor, size: int) -> torch.Tensor:
    """The most frequent tokens by their counts [V], ascending int64 [Vd]; of equally frequent ones, those never seen
    included, lower ids win.

    Raises:
        ValueError: for a size that is not between 1 and V.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(f"`size` of a draft vocabulary must be between 1 and {len(counts)}, got {size}.")
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


# ---------------------------------------------------------------------- rows of projections to logits
@dataclass(frozen=True)
class Projection:
    """Some rows of a projection to logits, copied: `[..., H] -> [..., Vp]`.

    Attributes:
        weight: [Vp, H], contiguous.
        bias: [Vp], or `None`.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)


def has_plain_weight(module: nn.Module) -> bool:
    """Whether a linear module is no more than its weight: not quantised, offloaded, adapted or wrapped."""
    weight = getattr(module, "weight", None)
    return (
        type(module) is nn.Linear
        and type(weight) in (nn.Parameter, torch.Tensor)
        and weight.dtype.is_floating_point
        and weight.device.type != "meta"
    )


@torch.no_grad()
def projection_rows(module: nn.Module, width: int, token_ids: torch.Tensor, like: torch.Tensor) -> Projection:
    """Rows of a projection, read from its weight or, where that is not all there is to it, asked of the module.

    Args:
        module: Linear map from [..., H] to [..., V], possibly with bias.
        width: H.
        token_ids: int64 [Vp], the rows.
        like: A tensor on the device and of the dtype the module's inputs have, for modules that are asked.
    """
    if has_plain_weight(module):
        ids = token_ids.to(module.weight.device)
        return Projection(module.weight.detach()[ids], None if module.bias is None else module.bias.detach()[ids])
    bias = module(like.new_zeros(1, width))[0, token_ids.to(like.device)]
    columns = []
    for start in range(0, width, ROWS_AT_ONCE):
        units = torch.eye(width, dtype=like.dtype, device=like.device)[start : start + ROWS_AT_ONCE]
        columns.append(module(units)[:, token_ids.to(like.device)] - bias)
    return Projection(torch.cat(columns).T.contiguous(), bias if bool(bias.any()) else None)


class PrunableVocabulary:
    """The part of [`DraftHead`] that says which tokens its draft logits stand for, and restricts them to fewer.

    The ids are a tensor of the heads, saved with them, and `config.pruned_vocab_size` says how many they are. The rows
    are a copy, made when the heads are bound to their target and never saved.
    """

    config: DraftHeadConfig
    pruned_token_ids: torch.Tensor | None
    borrowed: BorrowedModules
    device: torch.device
    _bound_to: tuple[PreTrainedModel, ...]
    _pruned: dict[str, Any]

    def _init_vocabulary(self, config: DraftHeadConfig) -> None:
        size = config.pruned_vocab_size
        ids = None if size is None else torch.arange(size)  # the first tokens until the saved ones are loaded
        self.register_buffer(PRUNED_TOKEN_IDS, ids)
        # Shared by the copies that `with_tree` makes, as the weights are.
        self._pruned = {}

    # ------------------------------------------------------------------ what a family says
    @property
    def trained_vocabulary(self) -> torch.Tensor | None:
        """int64 [Vd], token ids the heads can draft at all, ascending; `None` for all of V."""
        return None

    def own_projections(self) -> Sequence[nn.Module]:
        """Projections to draft logits that the heads have themselves, [..., h] -> [..., Vd] each; without any, they
        use the target's `lm_head`."""
        return ()

    @property
    def target_vocab_size(self) -> int:
        """V of the target, as wide as a distribution over drafts must be for its verification."""
        return self.config.vocab_size

    # ------------------------------------------------------------------ what drafting asks
    @property
    def draft_vocabulary(self) -> torch.Tensor | None:
        """int64 [Vd], token ids of the draft logits, ascending; `None` when the head drafts over all of V."""
        return self.trained_vocabulary if self.pruned_token_ids is None else self.pruned_token_ids

    def project(self, hidden: torch.Tensor, index: int = 0) -> torch.Tensor:
        """Draft logits in fp32 over the draft vocabulary, [..., h] -> [..., Vd].

        Args:
            hidden: What a projection to logits reads.
            index: Which of [`own_projections`]; without meaning for heads that use the target's `lm_head`.
        """
        return self._projection(index)(hidden).float()

    def _projection(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        own = self.own_projections()
        if self.pruned_token_ids is None:
            return own[index] if own else self.borrowed.lm_head
        if "rows" not in self._pruned:
            self._copy_rows()
        return self._pruned["rows"][index if own else 0]

    # ------------------------------------------------------------------ pruning
    def prune_draft_vocabulary(self, token_ids: torch.Tensor | Sequence[int] | None) -> Any:
        """Restricts drafts to some tokens, e.g. the most frequent ones of a corpus, for smaller draft forwards:

            counts = count_tokens(texts, target.config.vocab_size)
            heads.prune_draft_vocabulary(most_frequent(counts, 8192))

        The text of `generate` does not change, only how much of it is drafted. With heads that were trained with a
        draft vocabulary, the tokens that are not in it are dropped. Copies made by [`with_tree`] are pruned as well.

        Args:
            token_ids: Token ids of the target, in any order; `None` to draft over everything again.

        Returns:
            The heads themselves.

        Raises:
            ValueError: for ids that repeat or that there are not, or if none of them can be drafted.
        """
        self._pruned.clear()
        if token_ids is None:
            self.pruned_token_ids, self.config.pruned_vocab_size = None, None
            return self
        d2t, t2d = mapping_of(token_ids, self.config.vocab_size)
        ids = d2t + torch.arange(len(d2t))
        if (trained := self.trained_vocabulary) is not None:
            ids = trained.cpu()[t2d[trained.cpu()]]
            if not len(ids):
                raise ValueError(
                    f"none of the {len(d2t)} `token_ids` is among the {len(trained)} tokens these heads were trained "
                    "to draft; choose from `heads.trained_vocabulary`."
                )
        self.pruned_token_ids, self.config.pruned_vocab_size = ids.to(self.device), len(ids)
        return self

    def pruning_problem(self) -> str | None:
        """Why the saved tokens are no draft vocabulary of these heads, `None` if they are, or there are none."""
        if self.pruned_token_ids is None:
            return None
        return draft_ids_problem(self.pruned_token_ids, self.config.vocab_size)

    def _refresh_pruning(self) -> None:
        """Copies the rows again if what they were copied from has changed since."""
        if self.pruned_token_ids is None:
            self._pruned.clear()
        elif self._pruned.get("source") != self._pruning_source():
            self._copy_rows()

    def _projections(self) -> Sequence[nn.Module]:
        return self.own_projections() or (self.borrowed_projection(),)

    def borrowed_projection(self) -> nn.Module:
        """The target's `lm_head`, as a module."""
        _ = self.borrowed  # says what to do if there is no target yet
        return self._bound_to[0].get_output_embeddings()

    def _pruning_source(self) -> list[Any]:
        """What tells whether weights have moved or changed; of a module that is more than its weight, the module."""
        source: list[Any] = [self.pruned_token_ids.data_ptr()]
        for module in self._projections():
            weight = getattr(module, "weight", None)
            if has_plain_weight(module):
                source.append((weight.data_ptr(), weight._version, weight.dtype, weight.device))
            else:
                source.append(id(module))
        return source

    def _copy_rows(self) -> None:
        own, ids = bool(self.own_projections()), self.pruned_token_ids
        if own and (trained := self.trained_vocabulary) is not None:
            rows = torch.searchsorted(trained, ids).clamp_max(len(trained) - 1)  # rows are counted by draft id
            if bool((trained[rows] != ids).any()):
                raise WrongTargetError(
                    f"these {self.config.method} heads are pruned to tokens that they cannot draft for this target, "
                    f"e.g. {int(ids[trained[rows] != ids][0])}; prune them again, `heads.prune_draft_vocabulary(...)`."
                )
            ids = rows
        like = next(self.parameters()) if own else self._bound_to[0].get_input_embeddings()(ids[:1]).detach()
        if not own:
            like = like.to(self.borrowed.device)
        width = self.config.hidden_size if own else self.config.feature_size
        widths = [getattr(module, "in_features", width) for module in self._projections()]
        rows = [projection_rows(*each, ids, like) for each in zip(self._projections(), widths, strict=True)]
        self._pruned["rows"] = rows
        self._pruned["source"] = self._pruning_source()
