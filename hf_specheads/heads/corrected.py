"""Block drafters that correct the logits of each slot for the tokens drafted before it (DSpark, Domino).

    c, state' = correct(h_s, y, state)         y: the token before the slot; the root for the first slot
    logits of slot s after y = lm_head(h_s) + O c

The layers still run once per round. Only this low-rank correction is computed along the drafted paths, so that the
logits of a node depend on its branch. Nodes pass the state on to their children.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from ..cache.draft import DraftCache
from ..unroll.rows import DraftedPass, TrainingRows, later
from .block import BlockHead


class CorrectedBlockHead(BlockHead):
    """Block drafter with logits corrected for the drafted path. Families define what the correction reads and does."""

    @property
    def independent_positions(self) -> bool:
        return False

    # ------------------------------------------------------------------ what a family implements
    @property
    def state_size(self) -> int:
        """Width of the state that nodes pass on."""
        raise NotImplementedError

    @property
    def correction_output(self) -> nn.Linear:
        """The projection O, from corrections to logits over all of V."""
        raise NotImplementedError

    def read_tokens(self, token_ids: torch.Tensor, embed: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Inputs [B, K, *] of the correction for tokens [B, K]; `embed` is the target's token embedding."""
        raise NotImplementedError

    def correct(
        self, position: int, hidden: torch.Tensor, read: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the corrections [B, K, r] for the slot of a draft position, and the states [B, K, s] after the
        tokens before that slot.

        Args:
            position: Draft position, 0-based.
            hidden: [B, K, h], the slot's state.
            read: [B, K, *], inputs from the tokens before the slot ([`read_tokens`]).
            state: [B, K, s], states before those tokens.
        """
        raise NotImplementedError

    def first_state(
        self, hidden: torch.Tensor, roots: torch.Tensor, embed: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """States [B, K, s] that the first draft position starts from; zeros by default. The roots are [B, K], and
        `hidden` [B, K, h] are the states of the roots' own slots."""
        return hidden.new_zeros(*roots.shape, self.state_size)

    # ------------------------------------------------------------------ drafting
    def root_state(self, block: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        return self.first_state(block[:, :1], root, self.borrowed.embed_tokens)

    def node_logits(
        self, cache: DraftCache, position: int, token_ids: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.slot_states(cache, position).expand(-1, token_ids.shape[1], -1)
        read = self.read_tokens(token_ids, self.borrowed.embed_tokens).to(hidden.device)
        correction, states = self.correct(position, hidden, read, states)
        return states, self.slot_logits(cache, position) + self.corrections(correction)

    def corrections(self, correction: torch.Tensor) -> torch.Tensor:
        """Corrections of the logits, O c, in fp32 over the draft vocabulary: [..., r] -> [..., Vd]."""
        weight = self.correction_output.weight
        weight = weight if self.pruned_token_ids is None else weight[self.pruned_token_ids]
        return nn.functional.linear(correction, weight).float()

    # ------------------------------------------------------------------ training
    def unroll(self, rows: TrainingRows, num_passes: int) -> Iterator[DraftedPass]:
        """Pass i yields the slots of draft position i, corrected for the true tokens before; see [`drafted_pass`]."""
        slots, anchors = self.drafted_slots(rows), rows.anchor_rows().clamp_min(0)
        state = self.first_state(slots[:, :, 0], rows.next_token_ids.gather(1, anchors), rows.embed)
        for position in range(num_passes):
            hidden = slots[:, :, position + self.config.first_slot]
            with torch.no_grad():
                before = later(rows.next_token_ids, position).gather(1, anchors)
            read = self.read_tokens(before, rows.embed)
            correction, state = self.correct(position, hidden, read, state)
            yield self.drafted_pass(rows, position, torch.cat([hidden, correction], dim=-1), read)

    def drafted_pass(self, rows: TrainingRows, position: int, held: torch.Tensor, read: torch.Tensor) -> DraftedPass:
        """Makes a pass from rows `held` that begin with [h_s ; c]; families may append more to them."""
        return DraftedPass(hidden=held, logits=partial(self.corrected_logits, rows), offset=position)

    def corrected_logits(self, rows: TrainingRows, held: torch.Tensor) -> torch.Tensor:
        """Draft logits in training, fp32 [R, V], from rows that begin with [h_s ; c]."""
        width, rank = self.config.hidden_size, self.correction_output.in_features
        correction = self.correction_output(held[..., width : width + rank])
        return self.row_logits(rows, held[..., :width]).float() + correction.float()
