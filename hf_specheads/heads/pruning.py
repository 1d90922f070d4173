"""Restricting the draft vocabulary of heads after training (FR-Spec, arXiv 2502.14856, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ..configuration import DraftHeadConfig
from ..contract import DraftingContract
from ..draft_vocabulary import TokenIds, draft_ids_problem, mapping_of
from ..errors import WrongTargetError
from ..target.borrowed import Binding
from ..target.projection import has_plain_weight, projection_rows

PRUNED_TOKEN_IDS = "pruned_token_ids"


class PrunableVocabulary(DraftingContract, nn.Module):
    """The part of [`DraftHead`] that knows which tokens the draft logits stand for, and can restrict them to fewer.

    The chosen token ids are a tensor that is saved with the heads; `config.pruned_vocab_size` is their number. The
    rows of the projection for these tokens are copied when the heads are bound to their target, and never saved.
    """

    pruned_token_ids: torch.Tensor | None
    _binding: Binding

    def _init_vocabulary(self, config: DraftHeadConfig) -> None:
        size = config.pruned_vocab_size
        ids = None if size is None else torch.arange(size)  # placeholder until the saved ids are loaded
        self.register_buffer(PRUNED_TOKEN_IDS, ids)

    # ------------------------------------------------------------------ what a family may override
    @property
    def trained_vocabulary(self) -> torch.Tensor | None:
        """Token ids that the heads were trained to draft, int64 [Vd], ascending; `None` for all of V."""
        return None

    def own_projections(self) -> Sequence[nn.Module]:
        """The heads' own projections to draft logits, [..., h] -> [..., Vd] each. If there are none, the heads use the
        target's `lm_head`."""
        return ()

    @property
    def target_vocab_size(self) -> int:
        """V of the target. A distribution over drafts must have this width to be verified."""
        return self.config.vocab_size

    # ------------------------------------------------------------------ what drafting uses
    @property
    def draft_vocabulary(self) -> torch.Tensor | None:
        """Token ids that the draft logits stand for, int64 [Vd], ascending; `None` for heads that draft all of V."""
        return self.trained_vocabulary if self.pruned_token_ids is None else self.pruned_token_ids

    def project(self, hidden: torch.Tensor, index: int = 0) -> torch.Tensor:
        """Draft logits in fp32 over the draft vocabulary, [..., h] -> [..., Vd].

        Args:
            hidden: Input of the projection.
            index: Index in [`own_projections`]; ignored for heads that use the target's `lm_head`.
        """
        return self._projection(index)(hidden).float()

    def _projection(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        own = self.own_projections()
        if self.pruned_token_ids is None:
            return own[index] if own else self.borrowed.lm_head
        copied = self._binding.copied
        if "rows" not in copied:
            self._copy_rows(self.pruned_token_ids)
        return copied["rows"][index if own else 0]

    # ------------------------------------------------------------------ pruning
    def prune_draft_vocabulary(self, token_ids: TokenIds | None) -> Self:
        """Restricts drafts to some tokens, e.g. the most frequent ones of a corpus, for cheaper draft forwards:

            counts = count_tokens(texts, target.config.vocab_size)
            heads.prune_draft_vocabulary(most_frequent(counts, 8192))

        The text of `generate` does not change, only how much of it is drafted. Tokens outside the draft vocabulary
        that the heads were trained with, if any, are dropped. Copies made by [`with_tree`] are pruned as well.

        Args:
            token_ids: Token ids of the target, in any order; `None` to lift the restriction.

        Returns:
            The heads themselves.

        Raises:
            ValueError: for ids that repeat or that the target does not have, or if none of them can be drafted.
        """
        self._binding.copied.clear()
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
        """Says why the saved token ids are not a draft vocabulary; `None` if they are one, or if there are none."""
        if self.pruned_token_ids is None:
            return None
        return draft_ids_problem(self.pruned_token_ids, self.config.vocab_size)

    def _refresh_pruning(self) -> None:
        """Copies the rows again if the weights they were copied from have changed."""
        copied, ids = self._binding.copied, self.pruned_token_ids
        if ids is None:
            copied.clear()
        elif copied.get("ids") is not ids or copied["source"] != self._pruning_source():
            self._copy_rows(ids)

    def _projections(self) -> Sequence[nn.Module]:
        return self.own_projections() or (self.borrowed_projection(),)

    def borrowed_projection(self) -> nn.Module:
        """The target's `lm_head`, as a module."""
        return self._bound_target().get_output_embeddings()

    def _bound_target(self) -> PreTrainedModel:
        _ = self.borrowed  # raises an error with advice if there is no target yet
        return cast(PreTrainedModel, self._binding.target)

    def _pruning_source(self) -> list[Any]:
        """Values that change when the projections' weights move or change. For a module that is more than its plain
        weight (quantised, offloaded or adapted), the module's identity."""
        source: list[Any] = []
        for module in self._projections():
            if has_plain_weight(module):
                weight = module.weight
                # Tensors created under `torch.inference_mode()` do not track a version.
                version = None if weight.is_inference() else weight._version
                source.append((weight.data_ptr(), version, weight.dtype, weight.device))
            else:
                source.append(id(module))
        return source

    def _copy_rows(self, token_ids: torch.Tensor) -> None:
        own, ids = bool(self.own_projections()), token_ids
        if own and (trained := self.trained_vocabulary) is not None:
            # Rows of the heads' own projections are indexed by draft id.
            ids = torch.searchsorted(trained, token_ids).clamp_max(len(trained) - 1)
            if bool((unknown := torch.ne(trained[ids], token_ids)).any()):
                raise WrongTargetError(
                    f"these {self.config.method} heads are pruned to tokens that they cannot draft for this target, "
                    f"e.g. {int(token_ids[unknown][0])}; prune them again with `heads.prune_draft_vocabulary(...)`."
                )
        like = next(self.parameters()) if own else self._features_like(ids)
        width = self.config.hidden_size if own else self.config.feature_size
        widths = [getattr(module, "in_features", width) for module in self._projections()]
        rows = [projection_rows(*each, ids, like) for each in zip(self._projections(), widths, strict=True)]
        if not own and self._projections()[0] is self._bound_target().get_output_embeddings():
            rows = [replace(each, after=self.borrowed.logit_function) for each in rows]
        self._binding.copied.update(rows=rows, ids=token_ids, source=self._pruning_source())

    def _features_like(self, token_ids: torch.Tensor) -> torch.Tensor:
        """A tensor with the device and dtype of the inputs of the target's `lm_head`."""
        embedding = self._bound_target().get_input_embeddings()
        weight = getattr(embedding, "weight", None)
        at = self.borrowed.device if weight is None or weight.device.type == "meta" else weight.device
        return embedding(token_ids[:1].to(at)).detach().to(self.borrowed.device)
