"""A tiny target whose text depends on the preceding text, and heads that memorise a few of its texts.

Planted causes have a clear effect on such heads, and causes that need a training of their own can be planted at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_specheads import AutoDraftHead, DraftHead
from hf_specheads.diagnosis.evidence import Evidence, capture, continue_texts
from hf_specheads.diagnosis.teacher_forced import own_text, rounds_in, slots_of_token_ids

VOCABULARY, LEVELS = 99, (2, 4, 6)
PROMPT_TOKENS, TEXTS, NEW_TOKENS = 12, 6, 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.12, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
BLOCK = {"num_hidden_layers": 2, "block_size": 4, "feature_layers": LEVELS}
METHOD_OPTIONS: dict[str, dict[str, Any]] = {
    "eagle3": {"feature_layers": LEVELS},
    "peagle": {"feature_layers": LEVELS, "num_hidden_layers": 2},
    "dflash": BLOCK,
    "jetspec": BLOCK,
    "dspark": {**BLOCK, "markov_rank": 8},
    "dflash2": {**BLOCK, "selector_rank": 8, "conv_group_size": 8, "selector_top_k": 8},
    "mtp": {"native": False},
}


def tiny_target(seed: int = 0) -> LlamaForCausalLM:
    """Makes a target of eight layers and width 32."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=8)).eval()


def scaling_target() -> Gemma3ForCausalLM:
    """Makes a target of four layers that multiplies its embedding by the square root of its width."""
    torch.manual_seed(0)
    target = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, num_hidden_layers=4, head_dim=8, bos_token_id=None)).eval()
    target.generation_config.eos_token_id = None
    return target


def tiny_prompts(count: int = TEXTS, length: int = PROMPT_TOKENS, seed: int = 0) -> list[torch.Tensor]:
    """Makes prompts of random tokens, int64 [1, T]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (1, length), generator=generator) for _ in range(count)]


def texts_of(target: PreTrainedModel, prompts: Sequence[torch.Tensor], new_tokens: int = NEW_TOKENS) -> Evidence:
    """Captures the target's texts after the prompts, with its features and predictions."""
    return capture(target, continue_texts(target, prompts, new_tokens), [ids.shape[1] for ids in prompts])


def fresh_heads(target: PreTrainedModel, method: str = "eagle3", **options: Any) -> DraftHead:
    """Makes untrained heads, bound to the target, that draft chains of two tokens."""
    torch.manual_seed(5)
    tree = {"kind": "chain", "depth": 2, "top_k": 1, "total_tokens": 3}
    options = {**METHOD_OPTIONS.get(method, {}), **options}
    return AutoDraftHead.from_target(target, method, tree_config=tree, **options).bind(target, follow=False)


def learn(
    heads: DraftHead,
    evidence: Evidence,
    *,
    steps: int = 60,
    passes: int = 2,
    shift: int = 0,
    labels: torch.Tensor | None = None,
    where: torch.Tensor | None = None,
    rate: float = 1e-2,
    scale: float = 1.0,
) -> DraftHead:
    """Teaches heads the texts of an evidence.

    Args:
        heads: Heads that are bound to their target.
        evidence: Texts and features.
        steps: Steps of Adam.
        passes: Draft positions.
        shift: Rows get the feature of the token this many tokens before their own.
        labels: int64 [B, T], tokens to predict at every place instead of the text's own.
        where: bool [B, T], tokens to learn; the target's own text by default.
        rate: Learning rate.
        scale: Factor on `fc` before training, for features that are far from normalised.
    """
    if scale != 1:
        heads.fc.weight.data *= scale
    optimizer = torch.optim.Adam([weight for weight in heads.parameters() if weight.requires_grad], lr=rate)
    features = evidence.features(heads.feature_layers)
    if features is not None:  # language models read no features
        features = features.roll(shift, dims=1)
    wanted = slots_of_token_ids(heads, evidence.token_ids if labels is None else labels)
    wanted = wanted.masked_fill(~(own_text(evidence, 0) if where is None else where), -1)
    anchors = rounds_in(evidence) if heads.trains_at_anchors else None
    rows = evidence.rows(features, heads.borrowed.embed_tokens, heads.borrowed.lm_head, anchors)
    for _ in range(steps):
        optimizer.zero_grad()
        _loss(heads, rows, wanted, passes).backward()
        optimizer.step()
    return heads.eval()


def _loss(heads: DraftHead, rows: Any, wanted: torch.Tensor, passes: int) -> torch.Tensor:
    """Returns the sum over draft positions of the cross entropy of all drafts."""
    index, loss = rows.anchor_rows(), torch.zeros(())
    for position, drafted in enumerate(heads.unroll(rows, passes)):
        places = index + 2 + drafted.offset
        inside = (index >= 0) & (places < wanted.shape[1])
        labels = wanted.gather(1, places.masked_fill(~inside, 0)).masked_fill(~inside, -1)
        known = labels >= 0
        held = drafted.hidden[:, : known.shape[1]][known]
        logits = drafted.logits(held).float()
        loss = loss + torch.nn.functional.cross_entropy(logits, labels[known])
        if drafted.selected is not None:
            loss = loss + _selection_loss(*drafted.selected(held, logits), labels[known])
        if position + 1 == passes:
            break
    return loss


def _selection_loss(candidates: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy of the rows whose label is among the candidates."""
    right = candidates == labels[:, None]
    among = right.any(-1)
    if not bool(among.any()):
        return scores.sum() * 0
    return torch.nn.functional.cross_entropy(scores[among], right[among].float().argmax(-1))
