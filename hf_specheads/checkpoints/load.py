"""`load_heads`: loads draft heads from a folder or the Hub, in this package's own layout or their authors'."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import HeadLoadError
from ..generation.compiled.toolchain import warm_up_toolchain
from ..heads.auto import HEADS
from ..heads.base import DraftHead
from ..heads.placement import Placement, announce
from .fetch import HubOptions, local_folder, name_of
from .native import read_native
from .read import StoredHeads, read_heads, with_note
from .tensors import usual_dtype


def load_heads(
    repo_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device_map: Any = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    positions_per_specialist: int | None = None,
    method: str | None = None,
    anchor_slot: str | None = None,
    compile: bool = False,  # noqa: A002 (transformers' word)
    **tree_overrides: Any,
) -> DraftHead:
    """Loads draft heads, ready for `target.generate(..., assistant_model=heads)`.

    The layout is recognised from `config.json` and the names of the tensors. Supported are this package's own layout,
    those of the authors of EAGLE-1/2, HASS, PosS, EAGLE-3, Medusa, Hydra, DFlash, JetSpec, DSpark and Domino, and
    those of DeepSpec, SpecForge, SGLang, ModelOpt, vLLM and speculators. One log line says what was found and what had
    to be assumed. A folder may also be a training state of `accelerate`.

    Args:
        repo_or_path: Hub id or folder.
        revision: Branch, tag or commit on the Hub.
        dtype: Dtype of the weights. By default they are loaded as stored, and converted to the target's dtype when the
            heads are first used with it.
        device_map: As in transformers. By default the heads follow their target to the device of its `lm_head`.
        token: Hub token for private repositories.
        local_files_only: Do not access the network.
        positions_per_specialist: Draft positions per specialist, for PosS heads in the authors' layout, whose files do
            not store the number. By default it is taken from a name such as `PosS3-...`.
        method: `"mtp"` reads the MTP layers in a target's own checkpoint; `repo_or_path` then names the target.
        anchor_slot: `"idle"` or `"drafts"`: whether the first slot of a block predicts a token. Only for block
            drafters whose files do not say (JetSpec heads trained with `draft_shift`); default idle.
        compile: Compile the rounds of `generate` (`heads.compiled`).
        **tree_overrides: Fields of [`DraftTreeConfig`] (`kind`, `depth`, `top_k`, `total_tokens`, `choices`) that
            replace the saved ones.

    Returns:
        The draft heads, in eval mode.

    Raises:
        HeadLoadError: (a `ValueError`) one of its subclasses, see `hf_specheads.errors`: unknown layout, damaged
            file, missing or unknown keys, contradicting shapes, NaN, missing config fields.
        ValueError: For impossible tree options.
    """
    hub: HubOptions = {"revision": revision, "token": token, "local_files_only": local_files_only}
    folder = Path(repo_or_path) if method is not None else local_folder(repo_or_path, **hub)
    with _errors_name(repo_or_path):
        if method is not None:
            stored = read_native(repo_or_path, method, hub)
        else:
            stored = read_heads(folder, name_of(repo_or_path), positions_per_specialist, anchor_slot=anchor_slot)
        heads, stored = _build(stored, dtype, device_map)
    announce(f"{name_of(repo_or_path)}: {stored}")
    _remember_source(heads, repo_or_path, folder)
    _will_be_compiled(heads, compile)
    if tree_overrides:
        heads.tree_config = heads.tree_config.replace(**tree_overrides)
    return heads.eval()


@contextmanager
def _errors_name(repo_or_path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except HeadLoadError as error:
        raise type(error)(f"cannot load draft heads from {str(repo_or_path)!r}: {error}") from error


def _remember_source(heads: DraftHead, repo_or_path: str | os.PathLike[str], folder: Path) -> None:
    """Stores where the heads come from: the folder, or the Hub id and its commit."""
    heads.config.name_or_path = heads.name_or_path = str(repo_or_path)
    if folder != Path(repo_or_path):
        # As transformers does. The adapter of the target is later loaded from the same commit.
        heads.config._commit_hash = folder.name


def _will_be_compiled(heads: DraftHead, chosen: bool) -> None:
    heads.compiled = chosen
    if chosen and not torch.accelerator.is_available():
        warm_up_toolchain()  # runs in the background, typically while the user loads the target


def _build(stored: StoredHeads, dtype: torch.dtype | str | None, device_map: Any) -> tuple[DraftHead, StoredHeads]:
    """Builds the heads from what was read. Adds a note to the latter if weights are converted to another dtype."""
    stored, loaded_as = _with_dtype(stored, dtype)
    heads = HEADS[stored.config.model_type].from_pretrained(
        None, config=stored.config, state_dict=stored.tensors, dtype=loaded_as, device_map=device_map
    )
    heads.placement = Placement.asked_for(device_map, dtype)
    return heads, stored


def _with_dtype(stored: StoredHeads, dtype: torch.dtype | str | None) -> tuple[StoredHeads, torch.dtype | str]:
    """Chooses the dtype to load in, by default that of most stored weights, and notes weights of other dtypes."""
    if dtype not in (None, "auto"):
        return stored, dtype
    usual = usual_dtype(stored.tensors)
    other = {str(t.dtype) for t in stored.tensors.values() if t.dtype.is_floating_point and t.dtype != usual}
    return (with_note(stored, f"weights of {', '.join(sorted(other))} become {usual}") if other else stored), usual
