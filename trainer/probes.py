"""Probes a target once before training: its logit function, its hidden states, and the separation of documents.

None of these can be read from a config. If the losses used logits of another scale than the target's, or if packed
documents saw each other, training would raise no error, but the draft heads would lose acceptance for good.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_specheads.target.features import asked_hidden_states, features_problem
from hf_specheads.target.identity import spread_over

from .data.batches import PackedCollator
from .unroll.target_features import FrozenTarget

PROBE_LENGTHS = (7, 5)  # lengths in tokens of the two documents of a probe
TOLERANCE = 0.05  # in standard deviations: above 16-bit rounding, below the effect of any other logit function


class ProbeError(ValueError):
    """The target does not support the requested training of draft heads."""


def refuse_other_logits(frozen: FrozenTarget) -> None:
    """Compares the logits that the losses compute with the target's own logits, on a few tokens.

    Raises:
        ProbeError: if they differ, or if the target returns no final hidden state.
    """
    ids = _tokens(frozen)[0][None]
    with torch.no_grad():
        outputs = frozen.model(input_ids=ids, output_hidden_states=-1, use_cache=False)
        name, states = type(frozen.model).__name__, outputs.hidden_states
        if not states or states[-1] is None:
            raise ProbeError(
                f"{name} does not return the hidden state that its `lm_head` reads (requested by "
                "output_hidden_states=-1). Draft heads learn from this state, so they cannot be trained for it."
            )
        ours = frozen.lm_head(states[-1]).float()
    theirs = outputs.logits.float().to(ours.device)
    if ours.shape != theirs.shape:
        raise ProbeError(
            f"{name} returns logits of shape {list(theirs.shape)}, but its `lm_head` returns {list(ours.shape)} for "
            "its last hidden state; draft heads can only be trained for targets whose `lm_head` computes the logits."
        )
    if (difference := _relative(ours, theirs)) > TOLERANCE:
        raise ProbeError(
            f"the logits of {name} are not those that its `lm_head` computes from its last hidden state, even with "
            f"the multipliers and the soft-cap of its config (they differ by {difference:.2g} of their spread on a "
            "probe), so heads would be trained on another distribution than the target's; add the logit function of "
            "this target to hf_specheads/target/logits.py."
        )


def refuse_other_features(frozen: FrozenTarget, layers: tuple[int, ...], width: int) -> None:
    """Checks the hidden states that draft heads read between layers, on a few tokens.

    Args:
        frozen: The target.
        layers: Hidden states that the draft heads read, see `DraftHead.feature_layers`.
        width: Width F of a feature.

    Raises:
        ProbeError: if the hidden states cannot be used as features.
    """
    if not set(layers) - {-1}:
        return
    asked = {"output_hidden_states": asked_hidden_states(layers), "use_cache": False}
    with torch.no_grad():
        states = frozen.model(input_ids=_tokens(frozen)[0][None], **asked).hidden_states
    if (problem := features_problem(states, layers, width)) is not None:
        raise ProbeError(
            f"these heads cannot be trained for {type(frozen.model).__name__}: {problem}; choose other hidden "
            "states with feature_layers=[...], or train heads that read the last one, such as EAGLE's."
        )


def packing_problem(frozen: FrozenTarget) -> str | None:
    """Returns why this target does not separate two documents of one sequence, `None` if it does.

    A document must have the same features whatever stands beside it. Two comparisons are made. The first changes the
    neighbour and keeps the shape of the sequence: rounding is then nearly the same, so the largest difference reveals
    a neighbour that is seen. The second compares with the document alone, a sequence of another shape, where rounding
    of many layers in 16 bits can exceed the tolerance at single features; it uses the root mean square difference,
    which still reveals positions that do not restart, because these change all features.
    """
    documents, others = _documents(frozen)
    collate = PackedCollator(0, sum(PROBE_LENGTHS))
    try:
        for document, neighbour, another in zip(documents, documents[::-1], others[::-1], strict=True):
            beside, beside_another = (
                _features_among(frozen, collate([document, one, one, document]), document)
                for one in (neighbour, another)
            )
            alone = _features(frozen, collate([document]))[0].repeat(2, 1)
            seen = max(_relative(beside, beside_another), _relative(beside, alone, largest=False))
            if seen > TOLERANCE:
                return (
                    f"a document's features change by {seen:.2g} of their spread when another one stands in the same "
                    "sequence"
                )
    except Exception as error:  # model code may raise anything for packed rows
        return f"its forward of packed documents fails ({type(error).__name__}: {error})"
    return None


def refuse_leaking_packing(frozen: FrozenTarget) -> None:
    """Refuses packed documents for a target that does not keep them apart.

    Raises:
        ProbeError: with the problem found by [`packing_problem`].
    """
    if (problem := packing_problem(frozen)) is not None:
        raise ProbeError(
            f"packing=True cannot be used with {type(frozen.model).__name__}: {problem}; set packing=False."
        )


def _tokens(frozen: FrozenTarget, documents: int = 2) -> list[torch.Tensor]:
    """Returns token ids of an even number of documents, spread over the vocabulary, without repeated tokens."""
    size = frozen.model.config.get_text_config(decoder=True).vocab_size
    device = frozen.model.get_input_embeddings().weight.device
    lengths = PROBE_LENGTHS * (documents // 2)
    ids = 3 + torch.tensor(spread_over(size - 3, sum(lengths)), device=device)
    order = torch.arange(len(ids)).mul(5).remainder(len(ids))  # shuffles ids, so that they do not ascend
    return list(ids[order].split(lengths))


def _documents(frozen: FrozenTarget) -> tuple[list[dict[str, list[int]]], list[dict[str, list[int]]]]:
    """Returns two documents, and two other documents of the same lengths."""
    first, second, *others = ({"input_ids": ids.tolist()} for ids in _tokens(frozen, documents=4))
    return [first, second], others


def _features(frozen: FrozenTarget, batch: dict[str, Any]) -> torch.Tensor:
    device = frozen.model.get_input_embeddings().weight.device
    return frozen.features({name: value.to(device) for name, value in batch.items()})[1].float()


def _features_among(frozen: FrozenTarget, packed: dict[str, Any], document: dict[str, list[int]]) -> torch.Tensor:
    """Returns the features of a document in every row of a packed batch, concatenated."""
    ids, found = document["input_ids"], []
    for features, row in zip(_features(frozen, packed), packed["input_ids"].tolist(), strict=True):
        start = _place(row, ids)
        found.append(features[start : start + len(ids)])
    return torch.cat(found)


def _place(row: list[int], document: list[int]) -> int:
    return next(i for i in range(len(row)) if row[i : i + len(document)] == document)


def _relative(ours: torch.Tensor, theirs: torch.Tensor, largest: bool = True) -> float:
    """Returns the largest difference, or the root mean square difference, in standard deviations of `theirs`;
    infinite if it is NaN."""
    difference = (ours.float() - theirs.float()).abs()
    size = difference.max() if largest else difference.square().mean().sqrt()
    return float((size / theirs.float().std().clamp_min(1e-6)).nan_to_num(float("inf")))
