"""One setting of heads with another value: what it is, trying it, and putting it into force."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..heads.base import DraftHead
from ..heads.layers import DraftAttention
from ..heads.mtp_config import MtpHeadConfig
from ..tree.default import default_tree
from .evidence import Level


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
        least: What it must gain at position 1, where it shows the heads more than what is in force.
        rotated: Share of an attention head's width that rope rotates, `None` for all of it.
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
    least: float = 0.0
    rotated: float | None = None

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
        scale = getattr(heads.config, "embedding_scale", 1.0)
        for name, value in alternative.changes.items():
            if name != "feature_layers":  # read by the caller
                undo.callback(setattr, heads.config, name, getattr(heads.config, name))
                setattr(heads.config, name, value)
        if alternative.changes.keys() & {"rope_parameters", "layer_config"}:
            _swap_rotary(heads, undo)
        if "embedding_scale" in alternative.changes:
            _set(heads, "_embedding_factor", heads._embedding_factor * heads.config.embedding_scale / scale, undo)
        if "norm_before_residual" in alternative.changes:
            for module in heads.modules():
                if hasattr(module, "norm_before_residual"):
                    _set(module, "norm_before_residual", alternative.changes["norm_before_residual"], undo)
        if alternative.rotated is not None:
            _rotate_partly(heads, alternative.rotated, undo)
        for name, weight in alternative.modules.items():
            parameter = heads.get_parameter(name)
            _set(parameter, "data", weight.to(parameter), undo)
        yield


def _set(owner: Any, name: str, value: Any, undo: ExitStack) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _swap_rotary(heads: DraftHead, undo: ExitStack) -> None:
    config: Any = heads.config
    config = config.decoder_config() if isinstance(config, MtpHeadConfig) else config
    for parent in list(heads.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(getattr(module, "inv_freq", None), torch.Tensor):
                undo.callback(setattr, parent, name, module)
                setattr(parent, name, type(module)(config).to(heads.device))


def _rotate_partly(heads: DraftHead, share: float, undo: ExitStack) -> None:
    """Rope over the first dimensions of every attention head only. The rotation in force has its pairs elsewhere, so
    rows of the projections move to where these are; scores of attention do not depend on the order."""
    for module in heads.modules():
        if isinstance(module, DraftAttention):
            order = partial_rotation(module.head_dim, share)
            for part in (module.q_proj, module.k_proj, module.q_norm, module.k_norm):
                for parameter in () if part is None else part.parameters():
                    moved = parameter.data.unflatten(0, (-1, module.head_dim))[:, order].flatten(0, 1)
                    _set(parameter, "data", moved, undo)
        if isinstance(module, LlamaRotaryEmbedding):
            base = float((heads.config.rope_parameters or {}).get("rope_theta") or 10000.0)  # type: ignore[attr-defined]
            _set(
                module,
                "inv_freq",
                partial_frequencies(len(module.inv_freq) * 2, share, base).to(module.inv_freq),
                undo,
            )


def partial_rotation(width: int, share: float) -> list[int]:
    """Where the dimensions of an attention head come from, if pairs (i, i + r/2) of its first r, rotated ones shall
    stand at (i, i + width/2)."""
    rotated, half = int(width * share), width // 2
    first, second = list(range(rotated // 2)), list(range(rotated // 2, rotated))
    rest = list(range(rotated, width))
    return [*first, *rest[: half - len(first)], *second, *rest[half - len(first) :]]


def partial_frequencies(width: int, share: float, base: float) -> torch.Tensor:
    """Frequencies [width/2] of such a rotation: those of a head of r dimensions, and none."""
    rotated = int(width * share)
    some = base ** (-torch.arange(0, rotated, 2, dtype=torch.float) / rotated)
    return torch.nn.functional.pad(some, (0, width // 2 - len(some)))


def put_into_force(heads: DraftHead, changes: dict[str, Any]) -> None:
    """Settles what a config can settle, in the heads as they are and in what they save."""
    stack = ExitStack()
    stack.enter_context(tried(heads, Alternative("", "", "", "", changes)))
    stack.pop_all()  # what was changed stays
    for name, value in changes.items():
        setattr(heads.config, name, value)
    most = heads.max_draft_positions
    if most is not None and heads.tree_config.depth > most:  # a slot less
        heads.tree_config = default_tree(heads.device, heads.published_tree, most)
