"""n-alpha: how often a chain's draft agrees with the target if n of the features that it reads were drafted.

This is EAGLE's measure of how well draft heads cope with their own errors (arXiv 2401.15077, section 4). The target
writes a text greedily. At every position, the draft whose last n rows consist of drafted features and true tokens is
compared with the target's choice. n-alpha is acceptance at draft position n + 1, given that all earlier drafts were
accepted, on the same positions for all n and all draft heads. Draft heads that draft no features are measured the same
way: for Medusa, the row is n tokens back.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..heads.base import DraftHead
from ..target.borrowed import as_embedding, as_lm_head
from ..target.features import asked_hidden_states, select_hidden_states
from ..unroll.rows import TrainingRows, row_positions


@torch.no_grad()
def agreement(
    target: PreTrainedModel, heads: DraftHead, text: torch.Tensor, prompt_length: int, max_n: int
) -> torch.Tensor:
    """Whether draft and target choose the same token, bool [n, positions] for n = 0 to `max_n`.

    There are fewer rows if the heads draft fewer positions. The positions are the target's own tokens except the first
    `max_n` + 1.

    Args:
        target: The target.
        heads: Draft heads of the target, of a method that unrolls over rows.
        text: int64 [1, T], a prompt and the target's continuation.
        prompt_length: Number of tokens of the prompt.
        max_n: Largest number of drafted features.
    """
    layers = heads.feature_layers
    asked = asked_hidden_states((*layers, -1) if layers else (-1,))
    outputs = target(input_ids=text, output_hidden_states=asked, use_cache=False)
    features = select_hidden_states(outputs.hidden_states, layers or (-1,))
    documents = torch.zeros_like(text[:, 1:])
    rows = TrainingRows(
        features=features[:, :-1].to(heads.device),
        token_ids=text[:, :-1],
        next_token_ids=text[:, 1:],
        documents=documents,
        position_ids=row_positions(documents),
        embed=as_embedding(target.get_input_embeddings()),
        lm_head=as_lm_head(target.get_output_embeddings()),
    )
    # Row t knows token t + 1 and drafts token t + 2. With n drafted features, the round's root is token t + 1 - n.
    compared = torch.arange(prompt_length + max_n - 1, text.shape[1] - 2)
    wanted = outputs.logits[0, 1:].argmax(dim=-1)[compared]
    passes = max_n + 1 if heads.max_draft_positions is None else min(max_n + 1, heads.max_draft_positions)
    found = []
    for drafted in heads.unroll(rows, passes):
        choices = drafted.logits(drafted.hidden[0, compared - drafted.offset]).argmax(dim=-1)
        if heads.draft_vocabulary is not None:
            choices = heads.draft_vocabulary[choices]
        found.append(choices.to(wanted.device) == wanted)
    return torch.stack(found)
