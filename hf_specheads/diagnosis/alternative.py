"""An alternative value of one setting of heads: describing it, trying it, and applying it permanently."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..heads.base import DraftHead
from ..heads.layers import DraftAttention
from ..heads.mtp_config import MtpHeadConfig
from ..tree.default import default_tree
from .evidence import Level


@dataclass(frozen=True)
class Alternative:
    """An alternative value of one setting.

    Attributes:
        setting: Name of the setting, as shown in the table.
        value: The alternative value.
        in_force: The current value.
        cause: Cause that is found if the alternative is right; a key of [`findings.KIND`].
        changes: Config fields that apply the alternative; empty if no config field can.
        mend: Advice for the user if no config field can apply it.
        levels: Hidden states to read; `None` for the current ones.
        shift: As in [`teacher_forced.draft_everywhere`].
        modules: Weights that replace those of the heads, by name.
        least: Gain at position 1 that is required to win; above 0 if the alternative gives the heads more information.
        rotated: Share of an attention head's width that rope rotates; `None` for all of it.
        embedding: Factor for the target's embeddings.
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
    embedding: float = 1.0

    @property
    def what_to_do(self) -> str:
        """Advice for the user: the config fields to set, or else `mend`."""
        if not self.changes:
            return self.mend
        fields = "; ".join(f"heads.config.{name} = {value!r}" for name, value in self.changes.items())
        return (
            f"set `{fields}`, save and load the heads again (`specheads doctor --write FOLDER` saves the repaired "
            "heads)"
        )


@contextmanager
def tried(heads: DraftHead, alternative: Alternative) -> Iterator[None]:
    """Context manager that applies an alternative to the heads, and restores them at exit."""
    with ExitStack() as undo:
        _change(heads, alternative, undo)
        yield


def _change(heads: DraftHead, alternative: Alternative, undo: ExitStack) -> None:
    """Applies an alternative to the heads, and registers callbacks that undo it."""
    scale = getattr(heads.config, "embedding_scale", 1.0)
    for name, value in alternative.changes.items():
        if name != "feature_layers":  # the caller passes the levels to the forward instead
            _set(heads.config, name, value, undo)
    _follow(heads, alternative.changes, scale, undo)
    if alternative.rotated is not None:
        _rotate_partly(heads, alternative.rotated, undo)
    for name, weight in alternative.modules.items():
        parameter = heads.get_parameter(name)
        _set(parameter, "data", weight.to(parameter), undo)


def _follow(heads: DraftHead, changes: dict[str, Any], scale: float, undo: ExitStack) -> None:
    """Updates the parts of the heads that were computed from config fields when the heads were built."""
    if changes.keys() & {"rope_parameters", "layer_config", "head_dim"}:
        _swap_rotary(heads, undo)
    if "head_dim" in changes:
        _reshape_attention(heads, undo)
    if "embedding_scale" in changes:
        _set(heads, "_embedding_factor", heads._embedding_factor * changes["embedding_scale"] / scale, undo)
    made = {name: changes[name] for name in changes.keys() & {"norm_before_residual"}}
    if "hidden_act" in changes:
        made["act_fn"] = ACT2FN[changes["hidden_act"]]
    for module in heads.modules():
        for name, value in made.items():
            if hasattr(module, name):
                _set(module, name, value, undo)


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


def _reshape_attention(heads: DraftHead, undo: ExitStack) -> None:
    config: Any = heads.config
    for module in heads.modules():
        if isinstance(module, DraftAttention):
            _set(module, "head_dim", config.head_dim, undo)
            _set(module, "num_key_value_groups", config.num_attention_heads // config.num_key_value_heads, undo)
            _set(module, "scaling", config.head_dim**-0.5, undo)


def _rotate_partly(heads: DraftHead, share: float, undo: ExitStack) -> None:
    """Applies rope only to the first dimensions of every attention head.

    The rope implementation pairs dimensions i and i + width/2, so the rows of the projections are moved to these
    pairs. Attention scores do not depend on the order of dimensions.
    """
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
    """Order of an attention head's dimensions in which the rotated pairs (i, i + r/2) are at (i, i + width/2).

    The first r dimensions are rotated.
    """
    rotated, half = int(width * share), width // 2
    first, second = list(range(rotated // 2)), list(range(rotated // 2, rotated))
    rest = list(range(rotated, width))
    return [*first, *rest[: half - len(first)], *second, *rest[half - len(first) :]]


def partial_frequencies(width: int, share: float, base: float) -> torch.Tensor:
    """Frequencies [width/2] of a partial rotation: those of an attention head of r dimensions, followed by zeros."""
    rotated = int(width * share)
    some = base ** (-torch.arange(0, rotated, 2, dtype=torch.float) / rotated)
    return torch.nn.functional.pad(some, (0, width // 2 - len(some)))


def put_into_force(heads: DraftHead, changes: dict[str, Any]) -> None:
    """Applies config fields permanently, both to the loaded heads and to the config that they save."""
    _change(heads, Alternative("", "", "", "", changes), ExitStack())  # never closed, so the changes stay
    for name, value in changes.items():
        setattr(heads.config, name, value)
    most = heads.max_draft_positions
    if most is not None and heads.tree_config.depth > most:  # an idle root slot leaves one draft position less
        heads.tree_config = default_tree(heads.device, heads.published_tree, most)
