"""What `custom_generate/generate.py` of a pushed repository calls: generation with its heads, without an import.

    target.generate(**inputs, custom_generate="org/heads", trust_remote_code=True)

transformers fetches `custom_generate/generate.py` of the repository, checks `requirements.txt` beside it, and calls
its `generate` with the target and every argument as the user gave it, before anything is prepared. The file therefore
only says which repository it is of; what it does is here, and is what `assistant_model=load_heads("org/heads")` does:
streamers, stop strings, processors and criteria go where they always go.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedGenerationError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .heads.base import DraftHead


def generate_with(
    source: str,
    code: str,
    model: PreTrainedModel,
    inputs: torch.Tensor | None = None,
    *,
    assistant_model: Any = None,
    revision: str | None = None,
    token: str | bool | None = None,
    **arguments: Any,
) -> Any:
    """`model.generate` with the heads of a repository, which are loaded once.

    Args:
        source: Hub id or folder of the heads.
        code: The `generate.py` that runs: transformers keeps it in a folder named after the commit it is of, and the
            heads are taken from the same commit.
        model: The target.
        inputs, arguments: As `generate` was given them.
        assistant_model: Refused; the heads are the assistant.
        revision, token: Of the repository, as `generate` was given them for fetching the code.

    Returns:
        What `generate` returns.

    Raises:
        UnsupportedGenerationError: if the call also names an `assistant_model`.
        WrongTargetError: if the heads were made for another target.
    """
    if assistant_model is not None:
        raise UnsupportedGenerationError(
            f"custom_generate={source!r} generates with its own draft heads, and assistant_model="
            f"{type(assistant_model).__name__} was given too; leave one of the two out."
        )
    from .target.borrowed import BorrowedModules

    if os.path.isdir(source):
        version: Any = tuple(sorted((p.name, p.stat().st_mtime_ns) for p in Path(source).iterdir() if p.is_file()))
    else:
        version = _commit_of(code) or revision
    kept = _load(source, version, token, model.dtype, BorrowedModules.of(model).device).bind(model)
    heads = kept.with_tree()  # settings and statistics of a call are its own
    return model.generate(inputs, assistant_model=heads, **arguments)


@functools.lru_cache(maxsize=1)
def _load(source: str, version: Any, token: str | bool | None, dtype: torch.dtype, device: torch.device) -> DraftHead:
    """The heads last asked for."""
    from .checkpoints.load import load_heads

    revision = version if isinstance(version, str) else None
    return load_heads(source, revision=revision, token=token, dtype=dtype, device_map={"": device})


def _commit_of(code: str) -> str | None:
    """Commit in the path `.../<commit>/custom_generate/generate.py`; `None` for a local repository."""
    folder = Path(code).parent.parent.name
    return folder if re.fullmatch(r"[0-9a-f]{40}", folder) else None
