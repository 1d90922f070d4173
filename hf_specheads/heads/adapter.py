"""Finds, checks and saves the adapter of a target that draft heads were trained together with (Medusa-2)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import PreTrainedModel

from ..configuration import DraftHeadConfig
from ..errors import HeadLoadError, WrongTargetError
from ..target.adapter import ADAPTER_FOLDER, CONFIG, WEIGHTS, active_fingerprints, adapter_identity, save_adapter
from ..target.identity import fingerprints_match


def check_adapter(config: DraftHeadConfig, target: PreTrainedModel) -> None:
    """Refuses a target without the adapter that the heads were trained with.

    Raises:
        WrongTargetError: if that adapter is not active; the message says how to load it.
    """
    wanted = config.target_adapter
    if wanted is None:
        return
    found = active_fingerprints(target)
    if found and not wanted.get("fingerprint"):
        return
    if any(fingerprints_match(wanted["fingerprint"], fingerprint) for fingerprint in found):
        return
    state = "has another adapter" if found else "has no active adapter"
    raise WrongTargetError(
        f"these {config.method} heads were trained together with an adapter of their target, but "
        f"{target.config.name_or_path or type(target).__name__!r} {state}; call `heads.load_target_adapter(target)` "
        "first (the adapter changes the text that the target generates), or set "
        "`heads.config.target_adapter = None` if the adapter is merged into the target's weights."
    )


# ------------------------------------------------------------------ adapters stored beside the heads
def find_adapter(config: DraftHeadConfig, source: str | Path | None, **hub: Any) -> Path:
    """Finds the adapter stored beside draft heads, and returns its local folder.

    Args:
        config: Config of heads that were trained with an adapter.
        source: Folder or Hub id of the heads; defaults to where they were loaded from, at the same commit.
        hub: `revision`, `token`, ... for a Hub id.

    Raises:
        HeadLoadError: if there is no adapter.
    """
    if config.target_adapter is None:
        raise HeadLoadError("these heads were trained for a target without an adapter; there is no adapter to load.")
    if source is None and hub.get("revision") is None:
        hub["revision"] = getattr(config, "_commit_hash", None)
    source = str(source or config.name_or_path)
    folder = Path(source)
    if source and not folder.is_dir():
        folder = Path(snapshot_download(source, allow_patterns=[f"{ADAPTER_FOLDER}/*"], **hub))
    adapter = folder / ADAPTER_FOLDER
    if not source or not all((adapter / name).exists() for name in (WEIGHTS, CONFIG)):
        raise HeadLoadError(
            f"there is no {ADAPTER_FOLDER}/ with {WEIGHTS} and {CONFIG} beside the heads in {source!r}; pass the "
            "folder or Hub id in which the heads were saved after training."
        )
    return adapter


def save_adapter_beside(config: DraftHeadConfig, folder: Path, target: PreTrainedModel | None) -> None:
    """Saves the adapter that heads were trained with beside them. It is taken from the bound target, and its identity
    is then written to the config; otherwise it is copied from beside the files that the heads were loaded from.

    Raises:
        HeadLoadError: if the adapter is neither on a bound target nor beside the heads' files.
    """
    destination = folder / ADAPTER_FOLDER
    if target is not None and (identity := adapter_identity(target)):
        save_adapter(target, destination)
        config.target_adapter = identity
        return
    try:
        adapter = find_adapter(config, None)
    except HeadLoadError as error:
        raise HeadLoadError(
            f"the adapter that these heads were trained with could not be saved with them, because it is neither "
            f"beside their files nor on a bound target; call `heads.bind(target)` first. {error}"
        ) from error
    if adapter.resolve() != destination.resolve():
        shutil.copytree(adapter, destination, dirs_exist_ok=True)
