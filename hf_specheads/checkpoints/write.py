"""Writes draft heads in the layouts that serving engines and the authors' own code read.

    export_heads(heads, "heads-for-vllm", to="vllm")

Nothing is approximated silently. Heads that a destination cannot represent are refused with the reason, and notes say
what is lost by serving heads there.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..errors import ExportError
from ..heads import (
    DFlash2Head,
    DFlashHead,
    DominoHead,
    DraftLanguageModel,
    DSparkHead,
    Eagle3Head,
    EagleHead,
    HydraHead,
    MedusaHead,
    MtpHead,
    PEagleHead,
)
from ..heads.base import DraftHead
from ..heads.block import BlockHead
from .files import CONFIG
from .layouts.commands import path_note, sglang_command, vllm_command
from .layouts.dflash import write as dflash
from .layouts.dflash import write_deepspec as deepspec
from .layouts.eagle import write as eagle
from .layouts.eagle3 import write as eagle3
from .layouts.hydra import write as hydra
from .layouts.medusa import write as medusa
from .layouts.mtp import write as mtp
from .layouts.speculators import write as speculators
from .layouts.speculators import write_blocks as speculators_blocks
from .layouts.written import Layout, common_notes, scales_embeddings, target_name

# Destinations that the heads of each family can be exported to; the authors' own layout comes last.
DESTINATIONS: dict[type[DraftHead], tuple[str, ...]] = {
    EagleHead: ("vllm", "sglang", "eagle"),
    PEagleHead: ("speculators",),
    Eagle3Head: ("vllm", "sglang", "speculators", "eagle"),
    MedusaHead: ("vllm-medusa", "medusa"),
    HydraHead: ("hydra",),
    DFlashHead: ("speculators", "dflash"),
    DFlash2Head: ("speculators", "dflash"),
    DominoHead: ("dflash",),
    DSparkHead: ("speculators", "dflash"),
    MtpHead: ("speculators", "mtp"),
    DraftLanguageModel: ("vllm", "sglang"),
}
ALL_DESTINATIONS = tuple(sorted({to for destinations in DESTINATIONS.values() for to in destinations}))


@dataclass(frozen=True)
class Exported:
    """An export that was written.

    Attributes:
        folder: Folder of the export.
        to: Destination, as passed to [`export_heads`].
        files: Names of the written files.
        notes: What is lost or changed, and what users must know; one sentence each.
        command: Command that serves the export; `None` if there is none.
    """

    folder: Path
    to: str
    files: tuple[str, ...]
    notes: tuple[str, ...]
    command: str | None


def export_heads(
    heads: DraftHead,
    folder: str | os.PathLike[str],
    *,
    to: str,
    target: PreTrainedModel | str | None = None,
    overwrite: bool = False,
) -> Exported:
    """Writes draft heads in the layout of a serving engine, or of the method's authors.

    Args:
        heads: Loaded heads; they are not changed.
        folder: Folder to write.
        to: Destination. Engines: `"vllm"`, `"sglang"`. Library: `"speculators"` (EAGLE-3, P-EAGLE, DFlash-1/2, DSpark,
            MTP). The authors' own layouts: `"eagle"` (EAGLE-1/2/3, HASS, PosS), `"medusa"`, `"hydra"`, `"dflash"`
            (DFlash-1/2, JetSpec, DSpark, Domino), `"mtp"` (as in Qwen's targets). Older releases of vLLM:
            `"vllm-medusa"`.
        target: The loaded target, or its name. The loaded target is needed for few heads (the error says so). The name
            appears in commands and in the layout of `speculators`; by default it is the name stored with the heads.
        overwrite: Write into the folder even if it is not empty.

    Returns:
        The written files, notes on what is lost, and the command that serves them.

    Raises:
        ExportError: If the destination cannot represent the heads; the message says why and what to do.
        FileExistsError: If the folder is not empty and `overwrite` is false.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not overwrite:
        raise FileExistsError(
            f"{folder} exists and is not empty; choose another folder, or pass `overwrite=True` (on the command line: "
            "--overwrite)."
        )
    family = _family_of(heads, to)
    _check_weights(heads)
    if isinstance(heads, DraftLanguageModel):
        return _export_language_model(heads, folder, to, target)
    layout = _layout(heads, to, target)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(layout.config, indent=2) + "\n", encoding="utf-8")
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in sorted(layout.tensors.items())}
    if layout.weight_file.endswith(".pt"):
        torch.save(tensors, folder / layout.weight_file)
    else:
        save_file(tensors, folder / layout.weight_file, metadata={"format": "pt"})
    files = (CONFIG, layout.weight_file)
    if to == "vllm":
        layout.notes += path_note(folder, "eagle3" if family is Eagle3Head else "eagle")
    return Exported(folder, to, files, tuple(layout.notes), _command(layout.command, heads, folder, target))


def needs_target(heads: DraftHead, to: str) -> bool:
    """Whether an export needs the loaded target, because weights of it must be written with the heads."""
    config = heads.config
    if isinstance(heads, DSparkHead):
        return True
    if isinstance(heads, BlockHead):
        return to == "speculators"
    if isinstance(heads, Eagle3Head):
        return to == "vllm" and scales_embeddings(heads) and not config.own_embedding
    if not isinstance(heads, EagleHead):
        return False
    return to == "eagle" or (to == "vllm" and (config.fc_bias or scales_embeddings(heads)))


def _family_of(heads: DraftHead, to: str) -> type[DraftHead]:
    if to not in ALL_DESTINATIONS:
        raise ExportError(f"`to` must be one of {list(ALL_DESTINATIONS)}, got {to!r}.")
    family = next((family for family in DESTINATIONS if isinstance(heads, family)), None)
    if family is None:
        raise ExportError(f"`heads` must be loaded draft heads, got {type(heads).__name__}; pass load_heads(...).")
    if to not in DESTINATIONS[family] and (family, to) != (EagleHead, "speculators"):
        raise ExportError(
            f"{to} cannot serve {heads.config.method} heads; they can be exported to {list(DESTINATIONS[family])}."
        )
    return family


def _check_weights(heads: DraftHead) -> None:
    """Refuses quantised weights, which are not those that were trained, and offloaded weights, which are not there."""
    if getattr(heads, "is_quantized", False) or getattr(heads, "hf_quantizer", None) is not None:
        raise ExportError("these heads were quantised on loading; load them without `quantization_config` to export.")
    if missing := [name for name, value in heads.named_parameters() if value.device.type == "meta"]:
        raise ExportError(
            f"{missing[0]} and {len(missing) - 1} other weights are offloaded; load the heads without `device_map` to "
            "export them."
        )


def _layout(heads: DraftHead, to: str, target: PreTrainedModel | str | None) -> Layout:
    loaded = target if isinstance(target, PreTrainedModel) else None
    if isinstance(heads, BlockHead):
        return _block_layout(heads, to, loaded)
    if isinstance(heads, MtpHead):
        return mtp.speculators_layout(heads, target) if to == "speculators" else mtp.layout(heads)
    if isinstance(heads, HydraHead):
        return hydra.layout(heads)
    if isinstance(heads, MedusaHead):
        return medusa.layout(heads, to)
    if isinstance(heads, Eagle3Head):
        return speculators.layout(heads, target) if to == "speculators" else eagle3.layout(heads, to, loaded)
    return eagle.layout(cast(EagleHead, heads), to, loaded)  # only EAGLE's family is left


def _block_layout(heads: BlockHead, to: str, target: PreTrainedModel | None) -> Layout:
    if to == "speculators":
        return speculators_blocks.layout(heads, target)
    return deepspec.layout(heads, target) if isinstance(heads, DSparkHead) else dflash.layout(heads, target)


def _export_language_model(
    heads: DraftLanguageModel, folder: Path, to: str, target: PreTrainedModel | str | None
) -> Exported:
    """Saves the wrapped model as transformers does: engines can draft with any small language model."""
    heads.language_model.save_pretrained(folder)
    command = sglang_command(heads, "STANDALONE") if to == "sglang" else vllm_command(heads, "draft_model")
    notes = tuple(common_notes(heads))
    files = tuple(sorted(path.name for path in folder.iterdir()))
    return Exported(folder, to, files, notes, _command(command, heads, folder, target))


def _command(command: str | None, heads: DraftHead, folder: Path, target: PreTrainedModel | str | None) -> str | None:
    if command is None:
        return None
    name = target if isinstance(target, str) else getattr(getattr(target, "config", None), "name_or_path", None)
    return command.format(folder=folder, target=name or target_name(heads) or "TARGET")


__all__ = ["ALL_DESTINATIONS", "DESTINATIONS", "ExportError", "Exported", "export_heads", "needs_target"]
