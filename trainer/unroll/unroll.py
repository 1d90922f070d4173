"""The unroll: drafts every draft position for all rows of a batch, and computes the losses of each position.

`DraftHead.unroll` produces the drafts; this module compares them with the target. EAGLE trains one pass (arXiv
2401.15077). HASS and POSS train several, each of which reads what the previous pass drafted (arXiv 2408.15766,
2506.03566).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Required, TypedDict, Unpack

import torch

from hf_specheads.heads.base import DraftHead
from hf_specheads.target.borrowed import as_embedding, as_lm_head
from hf_specheads.unroll.rows import DraftedPass, TrainingRows, later, row_positions

from .chunks import CHUNK_ROWS, ChunkedPass, send_on
from .losses import IGNORED, DraftedRows, TargetDistribution, agreement, mean_loss

# A module of the target, or a function that replaces it.
Projection = Callable[[torch.Tensor], torch.Tensor]
DEFAULT_LOSSES = ("feature", "token", "top_k")
DEFAULT_WEIGHTS = {"feature": 1.0, "token": 0.1, "top_k": 1.0}


@dataclass(frozen=True)
class PassLosses:
    """Losses of one pass, as unweighted scalars.

    Attributes:
        values: Losses by name, see [`losses.LOSSES`]. They carry a graph unless their backward has been run.
        drafted: [B, T, H], drafted features, detached; `None` for draft heads that draft no features.
    """

    values: dict[str, torch.Tensor]
    drafted: torch.Tensor | None

    @property
    def feature_loss(self) -> torch.Tensor:
        """SmoothL1 between drafted features and the target's features."""
        return self.values["feature"]

    @property
    def token_loss(self) -> torch.Tensor:
        """Cross-entropy against the target's distribution."""
        return self.values["token"]

    @property
    def top_k_loss(self) -> torch.Tensor:
        """The part of the token loss that falls on the target's K most probable tokens."""
        return self.values["top_k"]

    def weighted(self, **weights: float) -> torch.Tensor:
        """Returns the sum of the losses times their weights, given by name. Default: [`DEFAULT_WEIGHTS`], the weights
        of EAGLE and HASS.

        Raises:
            ValueError: if none of the losses in `values` has a weight above 0.
        """
        weights = weights or DEFAULT_WEIGHTS
        # A loss of weight 0 is only logged. It stays out of the graph, because 0 times infinity would be NaN.
        terms = [weights[name] * value for name, value in self.values.items() if weights.get(name)]
        if not terms:
            raise ValueError(
                f"none of the losses these heads have, {list(self.values)}, has a weight above 0 in {weights}; set "
                "one, e.g. `token_loss_weight`."
            )
        return torch.stack(terms).sum()


class RowInputs(TypedDict, total=False):
    """Arguments of [`Unroll`] that describe the rows of a batch; their shapes are documented there."""

    features: Required[torch.Tensor]
    next_token_ids: Required[torch.Tensor]
    target_features: Required[torch.Tensor]
    loss_mask: Required[torch.Tensor]
    attention_mask: Required[torch.Tensor | None]
    token_ids: torch.Tensor | None
    document_ids: torch.Tensor | None
    position_ids: torch.Tensor | None


class UnrollInputs(RowInputs, total=False):
    """Arguments that [`unroll_losses`] passes to [`Unroll`] unchanged."""

    embed_tokens: Required[torch.Tensor | Projection]
    lm_head: Required[torch.Tensor | Projection]
    anchors: torch.Tensor | None
    top_k: int
    lk_decay: float
    losses: Sequence[str]
    num_items: torch.Tensor | float | None


class Unroll:
    """Unrolled training forward of one batch: call [`next_pass`] `num_passes` times, or call [`run_passes`].

    Row t holds the feature at t and knows the token at t + 1; pass 0 is compared with the target's distribution at
    t + 1. With `anchors`, passes compute only the anchor rows, and the supervised rows are those that drafts may
    reach from any anchor.

    Args:
        draft_head: Draft heads of any family.
        features: [B, T, F], target features that the draft heads read, noise included if there is any.
        next_token_ids: int64 [B, T], the token after each row.
        target_features: [B, T, H], final features one position later, without noise.
        loss_mask: [B, T], nonzero at supervised rows.
        attention_mask: [B, T], zero on padding, which may be on either side; or `None`.
        embed_tokens: The target's token embedding, a weight [V, E] or a module.
        lm_head: The target's `lm_head`, a weight [V, H] or a module.
        num_passes: Number of draft positions.
        top_k: K of the top-k loss.
        lk_decay: Decay of the KL term of the LK loss, see [`losses.lk_loss`].
        losses: Names of the losses to compute. Losses that the draft heads do not support are left out.
        upstream_masking: For parity with the authors' training code only; see [`unroll_losses`].
        token_ids: int64 [B, T], the token of each row, for draft heads that read it.
        document_ids: int64 [B, T], equal within a document of a packed sequence, or `None` for one document per
            sequence. Rows do not attend across documents, and drafted features do not move across them.
        position_ids: int64 [B, T], rope positions. Default: count from 0 in every document.
        anchors: int64 [B, A], rows at which rounds start, for draft heads that are trained at sampled rows only; -1
            where a sequence has fewer than A.
        num_items: Divisor of the losses instead of each pass's own number of supervised rows.
        separate_backward: Whether each pass is followed by its own backward, which frees the pass's graph. Gradients
            at rows that passes share are kept until [`finish_backward`].
        measure: Also measure how drafts agree with the target, at the cost of a softmax.

    Attributes:
        measured: fp32 [num_passes, 3], agreement of each pass with the target, see [`losses.agreement`].

    Raises:
        ValueError: if a shape does not fit.
    """

    def __init__(
        self,
        draft_head: DraftHead,
        *,
        features: torch.Tensor,
        next_token_ids: torch.Tensor,
        target_features: torch.Tensor,
        loss_mask: torch.Tensor,
        attention_mask: torch.Tensor | None,
        embed_tokens: torch.Tensor | Projection,
        lm_head: torch.Tensor | Projection,
        num_passes: int,
        top_k: int = 10,
        lk_decay: float = 3.0,
        losses: Sequence[str] = DEFAULT_LOSSES,
        upstream_masking: bool = False,
        token_ids: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        anchors: torch.Tensor | None = None,
        num_items: torch.Tensor | float | None = None,
        separate_backward: bool = False,
        measure: bool = False,
    ):
        _refuse_shapes(
            features,
            next_token_ids=next_token_ids,
            target_features=target_features,
            loss_mask=loss_mask,
            attention_mask=attention_mask,
            document_ids=document_ids,
            position_ids=position_ids,
        )
        self.losses, self.num_items, self.lk_decay = losses, num_items, lk_decay
        self.top_k = top_k if "top_k" in losses else 0
        documents = _documents(next_token_ids, None if upstream_masking else attention_mask, document_ids)
        self.documents = documents.flatten()
        self.length = documents.shape[1]
        rows = TrainingRows(
            features=features,
            token_ids=token_ids,
            next_token_ids=next_token_ids,
            documents=documents,
            position_ids=row_positions(documents) if position_ids is None else position_ids,
            embed=as_embedding(embed_tokens),
            lm_head=as_lm_head(lm_head),
            upstream_masking=upstream_masking,
            separate_backward=separate_backward,
            anchors=anchors,
        )
        self._place = None if anchors is None else _places(anchors, self.length)
        self._lm_head, self._vocabulary = rows.lm_head, draft_head.draft_vocabulary
        self.supervised = loss_mask.flatten().nonzero()[:, 0]  # [R]
        self._labels = _labels(documents, next_token_ids)
        self._target_features = target_features.detach().flatten(0, 1)
        self.measured = torch.zeros(num_passes, 3, dtype=torch.float32, device=features.device)
        self._measures = measure
        self._passes = draft_head.unroll(rows, num_passes)
        self._position = 0

    @property
    def num_rounds(self) -> int:
        """Number of rows at which rounds start, the divisor of mean losses."""
        return int(self.supervised.numel() if self._place is None else torch.count_nonzero(self._place >= 0))

    @torch.no_grad()
    def target_at(self, rows: torch.Tensor) -> TargetDistribution:
        """Returns the target's distribution at supervised rows, given as flat indices int64 [R']."""
        logits = self._lm_head(self._target_features[rows])
        return TargetDistribution.from_logits(
            logits, self.top_k, labels=self._labels[rows], vocabulary=self._vocabulary
        )

    @cached_property
    def target(self) -> TargetDistribution:
        """The target's distribution at all supervised rows."""
        return self.target_at(self.supervised)

    def next_pass(self) -> PassLosses:
        """Runs the next pass and compares it with the target at all supervised rows at once."""
        drafted = next(self._passes)
        rows, kept = self._rows_of(drafted.offset, self.supervised)
        # Selecting rows first saves work in `lm_head`, the largest matrix product of a pass.
        hidden = drafted.hidden.flatten(0, 1)[rows]
        features = None if drafted.features is None else drafted.features.flatten(0, 1)[rows]
        values = self._losses(drafted, hidden, features, self.supervised, kept, self.target, self._position)
        self._position += 1
        return PassLosses(values, None if drafted.features is None else drafted.features.detach())

    def run_passes(
        self,
        count: int,
        weigh: Callable[[PassLosses, int], torch.Tensor] | None = None,
        backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
        chunk_rows: int = CHUNK_ROWS,
        others: Sequence[torch.Tensor] = (),
    ) -> list[PassLosses]:
        """Runs the next `count` passes, compares them with the target chunk by chunk, and runs their backward.

        Logits of draft and target exist only for the rows of one chunk at a time. The target's distribution of a chunk
        is computed once for all `count` passes. See [`chunks`].

        Args:
            count: Number of passes to run.
            weigh: Maps the losses of a pass and its position (0-based) to the scalar to minimise; `None` computes the
                losses without a backward.
            backward: Runs the backward of that scalar; `accelerator.backward` in a trainer.
            chunk_rows: Rows per chunk.
            others: Scalars whose backward runs together with that of the passes, because they share a graph.

        Returns:
            Losses of each pass, detached.

        Raises:
            ValueError: if the unroll was built without `num_items`.
        """
        if self.num_items is None:
            raise ValueError("the losses of a chunk are sums over its rows; give `num_items` to divide them by.")
        passes = [ChunkedPass(next(self._passes)) for _ in range(count)]
        for supervised in self.supervised.split(chunk_rows):
            target = self.target_at(supervised)
            for position, chunked in enumerate(passes, start=self._position):
                rows, kept = self._rows_of(chunked.drafted.offset, supervised)
                hidden, features, leaves = chunked.take(rows)
                values = self._losses(chunked.drafted, hidden, features, supervised, kept, target, position)
                chunked.add(values)
                if weigh is not None:
                    loss = weigh(PassLosses(values, None), position)
                    with torch.autocast(loss.device.type, enabled=False):
                        backward(loss)
                    chunked.gather(rows, leaves)
        self._position += count
        if weigh is not None:
            with torch.autocast(self.supervised.device.type, enabled=False):
                send_on(passes, others)
        drafted = [chunked.drafted.features for chunked in passes]
        return [
            PassLosses(chunked.values, None if features is None else features.detach())
            for chunked, features in zip(passes, drafted, strict=True)
        ]

    def finish_backward(self) -> None:
        """Call after the last pass's backward: propagates the gradients gathered at rows that passes share."""
        next(self._passes, None)

    def _rows_of(self, offset: int, supervised: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the flat indices [R'] of the rows of a pass that draft supervised rows `offset` positions later, and
        the indices of those supervised rows in `supervised` (`None` if it is all of them)."""
        if offset == 0 and self._place is None:
            return supervised, None
        rows = (supervised - offset).clamp_min(0)
        inside = (supervised % self.length >= offset) & (self.documents[rows] == self.documents[supervised])
        if self._place is not None:
            rows = self._place[rows]
            inside = inside & (rows >= 0)
        kept = inside.nonzero()[:, 0]
        return rows[kept], kept

    def _losses(
        self,
        drafted: DraftedPass,
        hidden: torch.Tensor,
        features: torch.Tensor | None,
        supervised: torch.Tensor,
        kept: torch.Tensor | None,
        target: TargetDistribution,
        position: int,
    ) -> dict[str, torch.Tensor]:
        """Computes the losses of drafted rows [R', *] at the rows `kept` of `supervised` (`None`: at all of them);
        `target` holds the target's distribution at `supervised`."""
        if kept is not None:
            target, supervised = target.select(kept), supervised[kept]
        pair = None if features is None else (features, self._target_features[supervised])
        confidence = None if drafted.confidence is None else drafted.confidence(hidden)
        logits = drafted.logits(hidden)
        selected = None if drafted.selected is None else drafted.selected(hidden, logits)
        base = None if drafted.base is None or "base" not in self.losses else drafted.base(hidden)
        found = DraftedRows(logits, target, pair, self.lk_decay, confidence, selected, base)
        if self._measures:
            self.measured[position] += agreement(found)
        lacking = {"feature"} if features is None else set()
        lacking |= {"confidence"} if confidence is None else set()
        lacking |= {"selector"} if selected is None else set()
        lacking |= {"base"} if base is None else set()
        names = [name for name in self.losses if name not in lacking]
        return {name: mean_loss(name, found, self.num_items) for name in names}


def unroll_losses(
    draft_head: DraftHead, *, num_passes: int, upstream_masking: bool = False, **inputs: Unpack[UnrollInputs]
) -> list[PassLosses]:
    """Computes the unweighted losses of `num_passes` draft positions in one graph.

    The arguments are those of [`Unroll`]. `upstream_masking=True` reproduces the masking of the authors' training code
    for parity tests: with several passes (HASS, PosS), masked scores count as 0 in the softmax and padding is not
    masked; with one pass (EAGLE), the authors' masks are correct and the option has no effect. Do not train with it,
    because drafting masks correctly.

    Raises:
        ValueError: if `num_passes` is below 1 or a shape does not fit.
    """
    if num_passes < 1:
        raise ValueError(f"`num_passes` must be at least 1, got {num_passes}.")
    unroll = Unroll(draft_head, num_passes=num_passes, upstream_masking=upstream_masking and num_passes > 1, **inputs)
    return [unroll.next_pass() for _ in range(num_passes)]


def _documents(
    next_token_ids: torch.Tensor, attention_mask: torch.Tensor | None, document_ids: torch.Tensor | None
) -> torch.Tensor:
    """Returns document ids [B, T] in which padding is a document of its own (-1), so that no real row sees padding."""
    documents = torch.zeros_like(next_token_ids) if document_ids is None else document_ids
    if attention_mask is None:
        return documents
    return documents.masked_fill(attention_mask == 0, -1)


def _places(anchors: torch.Tensor, length: int) -> torch.Tensor:
    """Returns int64 [B * T], the flat index of every row among the anchors [B, A], -1 for rows that are no anchor."""
    rows = anchors + torch.arange(len(anchors), device=anchors.device)[:, None] * length
    place = torch.full((len(anchors) * length,), -1, device=anchors.device)
    found = (anchors >= 0).flatten().nonzero()[:, 0]
    place[rows.flatten()[found]] = found
    return place


def _labels(documents: torch.Tensor, next_token_ids: torch.Tensor) -> torch.Tensor:
    """Returns int64 [B * T], the token after each row's next token; -100 where the batch or document ends first."""
    labels = torch.where(later(documents, 1) == documents, later(next_token_ids, 1), IGNORED)
    labels[:, -1] = IGNORED
    return labels.flatten()


def _refuse_shapes(features: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Raises a `ValueError` unless all tensors have the sequences and rows of `features`, [B, T, ...]."""
    rows = tuple(features.shape[:2])
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape[:2]) != rows:
            raise ValueError(f"`{name}` must have the rows of `features` {rows}, got {tuple(tensor.shape)}.")
