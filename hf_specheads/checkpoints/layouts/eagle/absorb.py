"""Moves the bias of `fc` into an embedding of the heads' own, for engines whose `fc` has no bias.

With `fc.weight = [A | B]`, embedding e, feature f and bias b: `A e + B f + b = A (e + d) + B f`, where `A d = b`. So
every embedding is shifted by the same vector d. Since d is longer than e, rounding `e + d` to 16 bits would lose e, so
the sum is reflected first. The reflection Q maps d to a vector with a single nonzero coordinate. The other coordinates
keep their magnitude, and the rounding error of this one is a few thousandths of b. The exported heads read
`Q (e + d)` and have `A Q` in place of A. The remaining rounding error is measured.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from ....cache.masks import additive_mask
from ....errors import ExportError
from ....heads import EagleHead
from ....heads.specialists import SpecialistHead
from ..fields import Tensors
from ..keys import EMBEDDING, FC

MAX_CONDITION = 1e8
MIN_AGREEMENT = 0.95  # share of rows whose most likely token must stay the same
MEASURED_ROWS = 256
CHUNK = 8192


def needed_target(target: PreTrainedModel | None, reason: str) -> PreTrainedModel:
    """Returns the target.

    Raises:
        ExportError: If there is none; `reason` says why it is needed.
    """
    if target is None:
        raise ExportError(
            f"{reason}; pass the loaded target (`target=`, `--target`), because its embedding is needed."
        )
    return target


def embedding_of(heads: SpecialistHead, target: PreTrainedModel) -> torch.Tensor:
    """The target's embeddings [V, E] as its first layer receives them, in the heads' dtype, on the CPU.

    Raises:
        WrongTargetError: If the heads were made for another target.
    """
    heads.check_target(target)
    module, device = target.get_input_embeddings(), target.device
    with torch.no_grad():
        parts = [module(torch.arange(first, min(first + CHUNK, heads.config.vocab_size), device=device)).cpu()
                 for first in range(0, heads.config.vocab_size, CHUNK)]  # fmt: skip
    return torch.cat(parts).to(heads.dtype)


def absorb_bias(heads: EagleHead, target: PreTrainedModel | None) -> tuple[Tensors, list[str]]:
    """Computes `embed_tokens.weight` [V, E] and `fc.weight` [H, E + H] that need no bias, and a note on their error.

    Raises:
        ExportError: If there is no target, A cannot be inverted, or rounding changes too many drafted tokens.
    """
    reason = "vLLM's `fc` has no bias, so the bias of these heads must be moved into an embedding"
    target = needed_target(target, reason)
    embedding = embedding_of(heads, target).double()
    width, weight = heads.config.embedding_size, heads.fc.weight.detach().cpu().double()
    condition = float(torch.linalg.cond(weight[:, :width]))
    if not condition <= MAX_CONDITION:
        raise ExportError(
            f"{reason}, but that is impossible here: the embedding's part of `fc.weight` has the condition number "
            f"{condition:.1e}, more than {MAX_CONDITION:.0e}. Train heads with fc_bias=False, or export `--to sglang`."
        )
    shift = torch.linalg.solve(weight[:, :width], heads.fc.bias.detach().cpu().double())
    turn = _reflection(shift)
    tensors = {
        EMBEDDING: ((embedding + shift) @ turn).to(heads.dtype),
        FC: torch.cat([weight[:, :width] @ turn, weight[:, width:]], dim=1).to(heads.dtype),
    }
    error, agreement = _measure(heads, target, tensors)
    if agreement < MIN_AGREEMENT:
        raise ExportError(
            f"{reason}; after rounding to {heads.dtype} (condition number {condition:.1e}), only {agreement:.1%} of "
            f"the drafted tokens stay the same, below {MIN_AGREEMENT:.0%}. Export float32 heads, train heads with "
            "fc_bias=False, or export `--to sglang`."
        )
    return tensors, [
        "the bias of `fc` was moved into the written embedding, which vLLM uses as the heads' own: condition number "
        f"{condition:.1e}, largest error of a draft logit {error:.1e}, same favourite token in {agreement:.1%} of "
        f"{MEASURED_ROWS} rows"
    ]


def _reflection(vector: torch.Tensor) -> torch.Tensor:
    """Householder matrix [E, E] that maps a vector to a multiple of the first unit vector. It is its own inverse."""
    normal = vector.clone()
    normal[0] += torch.copysign(vector.norm(), vector[0])
    identity = torch.eye(len(vector), dtype=vector.dtype)
    length = normal.square().sum()
    return identity if length == 0 else identity - 2 * torch.outer(normal, normal) / length


@torch.no_grad()
def _measure(heads: EagleHead, target: PreTrainedModel, tensors: Tensors) -> tuple[float, float]:
    """Measures the largest error of a draft logit, and the share of rows whose most likely token stays the same.

    The rows come from a text that the target generates from a random token, so they resemble those of a generation.
    """
    token_ids = _some_text(target, MEASURED_ROWS + 1)
    features = target(token_ids, output_hidden_states=True).hidden_states[-1][:, :-1].to(heads.device)
    heads.bind(target)
    rows, later = features.shape[1], token_ids[:, 1:].to(heads.device)
    theirs = F.embedding(later.cpu(), tensors[EMBEDDING]).to(heads.device)
    fused = (
        heads.fuse(heads.embed(later, heads.device), features),
        F.linear(torch.cat([theirs, features.to(heads.dtype)], dim=-1), tensors[FC].to(heads.device)),
    )
    mask = additive_mask(torch.ones(rows, rows, dtype=torch.bool, device=heads.device).tril()[None, None], heads.dtype)
    positions = torch.arange(rows, device=heads.device)[None]
    ours, others = (heads.draft_logits(heads(part, positions, mask)) for part in fused)
    return float((ours - others).abs().max()), float((ours.argmax(-1) == others.argmax(-1)).float().mean())


def _some_text(target: PreTrainedModel, length: int) -> torch.Tensor:
    """Samples a text from the target: int64 [1, length], where length is at most the target's number of positions."""
    config = target.config.get_text_config(decoder=True)
    length = min(length, getattr(config, "max_position_embeddings", None) or length)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = torch.randint(0, config.vocab_size, (1, 1), device="cpu").to(target.device)
        mask = torch.ones_like(first)
        # For type checkers, a PreTrainedModel does not always have `generate`; a target always does.
        text: torch.Tensor = target.generate(  # type: ignore[operator]
            first, attention_mask=mask, do_sample=True, min_new_tokens=length - 1, max_new_tokens=length - 1
        )
    return text
