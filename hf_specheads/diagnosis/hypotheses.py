"""What the files of heads do not prove, and what it could be instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..heads.base import DraftHead
from ..heads.layers import LayerHeadConfig, rotary_embedding
from ..target.projection import output_weight
from .evidence import BEFORE_NORM, Level

# Rows of EAGLE heads that are equally wide.
PAIRINGS = ("feature+shifted_token", "feature+token")
ROPE_BASES = (10000.0, 500000.0, 1000000.0)


@dataclass(frozen=True)
class Alternative:
    """One setting with another value than the one in force.

    Attributes:
        setting: Its name, in the words of the table.
        value: The other value.
        in_force: What is in force.
        cause: What it would mean if the other value were right.
        changes: Fields of the config that put it into force; empty if no config can.
        mend: What to do, if no config can.
        levels: Hidden states to read, `None` for those in force.
        shift: As in [`teacher_forced.draft_everywhere`].
        modules: Weights that stand in for those of the heads, by their names.
        deep: Whether only later draft positions depend on it.
    """

    setting: str
    value: str
    in_force: str
    cause: str
    changes: dict[str, Any] = field(default_factory=dict)
    mend: str = ""
    levels: tuple[Level, ...] | None = None
    shift: int = 0
    modules: dict[str, torch.Tensor] = field(default_factory=dict)
    deep: bool = False

    @property
    def what_to_do(self) -> str:
        """The argument that mends it."""
        if not self.changes:
            return self.mend
        fields = "; ".join(f"heads.config.{name} = {value!r}" for name, value in self.changes.items())
        return f"set `{fields}` (`specheads doctor --write FOLDER` saves them so)"


@contextmanager
def tried(heads: DraftHead, alternative: Alternative) -> Iterator[None]:
    """While this lasts the heads are as the alternative says; afterwards as they were."""
    with ExitStack() as undo:
        for name, value in alternative.changes.items():
            if name != "feature_layers":  # read by the caller
                undo.callback(setattr, heads.config, name, getattr(heads.config, name))
                setattr(heads.config, name, value)
        if "rope_parameters" in alternative.changes:
            _swap_rotary(heads, undo)
        if "norm_before_residual" in alternative.changes:
            for module in heads.modules():
                if hasattr(module, "norm_before_residual"):
                    undo.callback(setattr, module, "norm_before_residual", module.norm_before_residual)
                    module.norm_before_residual = alternative.changes["norm_before_residual"]
        for name, weight in alternative.modules.items():
            parameter = heads.get_parameter(name)
            undo.callback(setattr, parameter, "data", parameter.data)
            parameter.data = weight.to(parameter)
        yield


def _swap_rotary(heads: DraftHead, undo: ExitStack) -> None:
    for parent in list(heads.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, LlamaRotaryEmbedding):
                undo.callback(setattr, parent, name, module)
                setattr(parent, name, rotary_embedding(heads.config).to(heads.device))


def put_into_force(heads: DraftHead, changes: dict[str, Any]) -> None:
    """Settles what a config can settle, in the heads as they are and in what they save."""
    stack = ExitStack()
    stack.enter_context(tried(heads, Alternative("", "", "", "", changes)))
    stack.pop_all()  # what was changed stays
    for name, value in changes.items():
        setattr(heads.config, name, value)


# ---------------------------------------------------------------------- what could be otherwise
def alternatives(heads: DraftHead, target: PreTrainedModel, depth: int, levels: Sequence[Level]) -> list[Alternative]:
    """Everything the tensors of these heads leave open.

    Args:
        heads: Bound to the target.
        target: The target.
        depth: Its layers N.
        levels: Hidden states that were captured.
    """
    found = [*tap_sets(heads, depth, levels), *flags(heads), *ropes(heads, target), *shifts(heads)]
    return [*found, *borrowed_parts(heads, target)]


def tap(heads: DraftHead, levels: tuple[Level, ...], what: str) -> Alternative:
    """Other hidden states."""
    numbers = [level for level in levels if isinstance(level, int)]
    in_config = hasattr(heads.config, "feature_layers") and len(numbers) == len(levels)
    return Alternative(
        "hidden states read",
        f"{list(levels)}{f' ({what})' if what else ''}",
        str(list(heads.feature_layers)),
        "taps",
        {"feature_layers": tuple(numbers)} if in_config else {},
        f"the heads were trained on the hidden states {list(levels)}, and this family reads "
        f"{list(heads.feature_layers)}; train them anew on what it reads",
        levels,
    )


def tap_sets(heads: DraftHead, depth: int, levels: Sequence[Level]) -> list[Alternative]:
    """All hidden states one layer up or down, the default sets of other programs, another order, without the norm."""
    ours = tuple(depth if level == -1 else level for level in heads.feature_layers)
    if not ours:
        return []
    known: dict[tuple[Level, ...], str] = {}
    for step in (-1, 1):
        known.setdefault(tuple(level + step for level in ours), f"all {step:+d}")
    if len(ours) > 1:
        known.setdefault(ours[::-1], "the other way round")
    if len(ours) == 3:
        known.setdefault((2, depth // 2, depth - 3), "the usual ones")
        known.setdefault((3, depth // 2 + 1, depth - 2), "the usual ones, counted after a layer")
        known.setdefault((1, depth // 2 - 1, depth - 4), "the usual ones less one")
    if ours == (depth,):
        known.setdefault((BEFORE_NORM,), "without the final norm")
    available = set(levels)
    return [tap(heads, other, what) for other, what in known.items()
            if other != ours and len(set(other)) == len(other) and available.issuperset(other)]  # fmt: skip


def single_taps(heads: DraftHead, depth: int, levels: tuple[Level, ...]) -> Iterator[tuple[int, list[Alternative]]]:
    """For every place of a feature all hidden states that could stand there."""
    for place in range(len(levels)):
        others = [(*levels[:place], level, *levels[place + 1 :]) for level in range(depth + 1)]
        yield place, [tap(heads, other, "") for other in others if len(set(other)) == len(other) and other != levels]


def flags(heads: DraftHead) -> list[Alternative]:
    """Norms that no tensor tells of, and which token a row is made of."""
    found = []
    for name, deep in (("norm_before_residual", False), ("norm_output", True)):
        if hasattr(heads.config, name):
            now = bool(getattr(heads.config, name))
            found.append(Alternative(name, str(not now), str(now), "norm flags", {name: not now}, deep=deep))
    inputs = getattr(heads.config, "inputs", None)
    if inputs in PAIRINGS:
        other = next(one for one in PAIRINGS if one != inputs)
        found.append(Alternative("inputs", other, inputs, "token shift", {"inputs": other}))
    return found


def ropes(heads: DraftHead, target: PreTrainedModel) -> list[Alternative]:
    """The usual bases, the target's rope, and scaling left out."""
    rotates = any(isinstance(module, LlamaRotaryEmbedding) for module in heads.modules())
    if not (rotates and isinstance(heads.config, LayerHeadConfig)):
        return []
    now = dict(getattr(heads.config, "rope_parameters", None) or {})
    base = float(now.get("rope_theta") or 10000.0)
    theirs = getattr(target.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    theirs = {**(theirs.get("full_attention") or theirs)}
    theirs.pop("partial_rotary_factor", None)
    others: list[dict[str, Any]] = [{"rope_type": "default", "rope_theta": other} for other in ROPE_BASES]
    if "rope_theta" in theirs:
        others.append({"rope_type": "default", "rope_theta": float(theirs["rope_theta"])})
        others.append(theirs)
    if now.get("rope_type", "default") != "default":
        others.append({"rope_type": "default", "rope_theta": base})
    found: dict[str, Alternative] = {}
    for other in others:
        same = other.get("rope_type", "default") == now.get("rope_type", "default") == "default"
        if other == now or (same and float(other["rope_theta"]) == base):
            continue
        words = _rope_words(other)
        found.setdefault(words, Alternative("rope", words, _rope_words(now), "rope", {"rope_parameters": other}))
    return list(found.values())


def _rope_words(rope: dict[str, Any]) -> str:
    kind = rope.get("rope_type", "default")
    scaled = "" if kind == "default" else f", {kind} scaling by {rope.get('factor', '?')}"
    return f"base {float(rope.get('rope_theta') or 10000.0):g}{scaled}"


def shifts(heads: DraftHead) -> list[Alternative]:
    """Tokens paired with the feature before, or after, the one they belong to."""
    if not heads.feature_layers:
        return []
    words = {1: "the feature two tokens before it", -1: "its own feature"}
    mend = (
        "tokens and features were paired otherwise in training; pair them as here (token t + 1 with feature t), and "
        "train anew"
    )
    return [Alternative("a token is read with", said, "the feature of the token before", "token shift", mend=mend,
                        shift=shift) for shift, said in words.items()]  # fmt: skip


@torch.no_grad()
def borrowed_parts(heads: DraftHead, target: PreTrainedModel) -> list[Alternative]:
    """The target's own weights in place of copies that the heads have: lost, random or of another target."""
    found = []
    lm_head = heads._modules.get("lm_head")
    if isinstance(lm_head, nn.Linear) and lm_head.in_features == heads.config.feature_size:
        rows = heads.trained_vocabulary
        weight = output_weight(target)
        weight = weight if rows is None else weight[rows.to(weight.device)]
        if weight.shape == lm_head.weight.shape:
            mend = "the heads' own `lm_head` is not what was trained (random, or of another file); get the whole file"
            found.append(Alternative("lm_head", "the target's", "the heads' own", "damaged weights", mend=mend,
                                     modules={"lm_head.weight": weight}))  # fmt: skip
    own = heads._modules.get("embed_tokens")
    if isinstance(own, nn.Embedding):
        ids = torch.arange(own.num_embeddings, device=target.device)
        weight = target.get_input_embeddings()(ids)
        if weight.shape == own.weight.shape:
            mend = "the heads' own embedding is not what was trained; drop it from the file to borrow the target's"
            found.append(Alternative("embedding", "the target's", "the heads' own", "damaged weights", mend=mend,
                                     modules={"embed_tokens.weight": weight}))  # fmt: skip
    return found
