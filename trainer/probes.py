"""What is tried on a target once, before it is trained for: its logit function, and whether it keeps documents apart.

Neither can be told from a config. A teacher with another temperature than the target, or documents that read each
other, train heads without an error and cost acceptance for good.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_specheads.target.features import asked_hidden_states, features_problem
from hf_specheads.target.identity import spread_over

from .data.batches import PackedCollator
from .unroll.target_features import FrozenTarget

PROBE_LENGTHS = (7, 5)  # tokens of two documents
TOLERANCE = 0.05  # of the spread of what is compared: above rounding to 16 bits, below any other function


class ProbeError(ValueError):
    """A target that cannot be trained for as asked."""


def refuse_other_logits(frozen: FrozenTarget) -> None:
    """Compares what the losses take for the target's logits with its own, on a few tokens.

    Raises:
        ProbeError: if they differ.
    """
    ids = _tokens(frozen)[0][None]
    with torch.no_grad():
        outputs = frozen.model(input_ids=ids, output_hidden_states=-1, use_cache=False)
        name, states = type(frozen.model).__name__, outputs.hidden_states
        if not states or states[-1] is None:
            raise ProbeError(
                f"{name} does not return the hidden state that its `lm_head` reads (asked for it by "
                "output_hidden_states=-1), which is what draft heads learn from; they cannot be trained for it."
            )
        ours = frozen.lm_head(states[-1]).float()
    theirs = outputs.logits.float().to(ours.device)
    if ours.shape != theirs.shape:
        raise ProbeError(
            f"{name} returns logits of shape {list(theirs.shape)}, and its `lm_head` makes {list(ours.shape)} of its "
            "last hidden state; draft heads cannot be trained for a target that computes its logits otherwise."
        )
    if (difference := _relative(ours, theirs)) > TOLERANCE:
        raise ProbeError(
            f"the logits of {name} are not what its `lm_head` makes of its last hidden state, multipliers and "
            f"soft-cap of its config included (they differ by {difference:.2g} of their spread on a probe), so heads "
            "would be trained on another distribution than the target's; its logit function has to be added to "
            "hf_specheads/target/logits.py."
        )


def refuse_other_features(frozen: FrozenTarget, layers: tuple[int, ...], width: int) -> None:
    """Looks at the hidden states that heads read between layers, on a few tokens.

    Args:
        frozen: The target.
        layers: Hidden states that heads read, see `DraftHead.feature_layers`.
        width: Of a feature.

    Raises:
        ProbeError: if they are no features [B, N, H].
    """
    if not set(layers) - {-1}:
        return
    asked = {"output_hidden_states": asked_hidden_states(layers), "use_cache": False}
    with torch.no_grad():
        states = frozen.model(input_ids=_tokens(frozen)[0][None], **asked).hidden_states
    if (problem := features_problem(states, layers, width)) is not None:
        raise ProbeError(
            f"these heads cannot be trained for {type(frozen.model).__name__}: {problem}; name other states, "
            "feature_layers=[...], or train heads that read the last one, such as EAGLE's."
        )


def packing_problem(frozen: FrozenTarget) -> str | None:
    """Why two documents of one sequence are not told apart by this target, `None` if they are.

    A document has to have the same features whatever stands beside it. In sequences of one shape they are, nearly, to
    the last bit, which tells a neighbour that is read from rounding; of many layers in 16 bits, that alone can exceed
    the tolerance. The document by itself is another shape, so there the root mean square counts, not the largest
    difference: positions that do not begin anew change all features.
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
    except Exception as error:  # whatever a model's code raises for rows it does not know
        return f"its forward of packed documents fails ({type(error).__name__}: {error})"
    return None


def refuse_leaking_packing(frozen: FrozenTarget) -> None:
    """Refuses packed documents for a target that does not keep them apart.

    Raises:
        ProbeError: saying what was seen.
    """
    if (problem := packing_problem(frozen)) is not None:
        raise ProbeError(
            f"packing=True cannot be used with {type(frozen.model).__name__}: {problem}; set packing=False."
        )


def _tokens(frozen: FrozenTarget, documents: int = 2) -> list[torch.Tensor]:
    """Token ids of an even number of documents, spread over the vocabulary, no token twice."""
    size = frozen.model.config.get_text_config(decoder=True).vocab_size
    device = frozen.model.get_input_embeddings().weight.device
    lengths = PROBE_LENGTHS * (documents // 2)
    ids = 3 + torch.tensor(spread_over(size - 3, sum(lengths)), device=device)
    order = torch.arange(len(ids)).mul(5).remainder(len(ids))  # not ascending
    return list(ids[order].split(lengths))


def _documents(frozen: FrozenTarget) -> tuple[list[dict[str, list[int]]], list[dict[str, list[int]]]]:
    """Two documents, and two others of the same lengths."""
    first, second, *others = ({"input_ids": ids.tolist()} for ids in _tokens(frozen, documents=4))
    return [first, second], others


def _features(frozen: FrozenTarget, batch: dict[str, Any]) -> torch.Tensor:
    device = frozen.model.get_input_embeddings().weight.device
    return frozen.features({name: value.to(device) for name, value in batch.items()})[1].float()


def _features_among(frozen: FrozenTarget, packed: dict[str, Any], document: dict[str, list[int]]) -> torch.Tensor:
    """Features of a document in every row of a batch of packed ones, one row after the other."""
    ids, found = document["input_ids"], []
    for features, row in zip(_features(frozen, packed), packed["input_ids"].tolist(), strict=True):
        start = _place(row, ids)
        found.append(features[start : start + len(ids)])
    return torch.cat(found)


def _place(row: list[int], document: list[int]) -> int:
    return next(i for i in range(len(row)) if row[i : i + len(document)] == document)


def _relative(ours: torch.Tensor, theirs: torch.Tensor, largest: bool = True) -> float:
    """Largest difference, or its root mean square, in units of the spread of what is expected; infinite where it is
    not a number."""
    difference = (ours.float() - theirs.float()).abs()
    size = difference.max() if largest else difference.square().mean().sqrt()
    return float((size / theirs.float().std().clamp_min(1e-6)).nan_to_num(float("inf")))
