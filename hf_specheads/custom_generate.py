"""The code behind `custom_generate/generate.py` of a pushed repository: draft heads without an import.

    target.generate(**inputs, custom_generate="org/heads", trust_remote_code=True)

transformers downloads `custom_generate/generate.py` from the repository, checks the `requirements.txt` beside it, and
calls its `generate` with the target and all arguments as the user gave them, before it prepares anything. That file
only names its repository and calls [`generate_with`], which does the same as
`assistant_model=load_heads("org/heads")`: streamers, stop strings, logits processors and stopping criteria all work.
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
    """Calls `model.generate` with the draft heads of a repository, which are kept in memory between calls.

    Args:
        source: Hub id or folder of the heads.
        code: Path of the `generate.py` that calls this function. transformers keeps that file in a folder named after
            its commit; the heads are loaded from the same commit.
        model: The target.
        inputs, arguments: Arguments of `generate`, as the user gave them.
        assistant_model: Must be `None`, because the heads are the assistant.
        revision, token: Arguments of `generate` for downloading the code; they also apply to the heads.

    Returns:
        The result of `generate`.

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
    heads = kept.with_tree()  # a copy, so that every call has its own settings and statistics
    return model.generate(inputs, assistant_model=heads, **arguments)


@functools.lru_cache(maxsize=1)
def _load(source: str, version: Any, token: str | bool | None, dtype: torch.dtype, device: torch.device) -> DraftHead:
    """Loads heads, and keeps those requested last."""
    from .checkpoints.load import load_heads

    revision = version if isinstance(version, str) else None
    return load_heads(source, revision=revision, token=token, dtype=dtype, device_map={"": device})


def _commit_of(code: str) -> str | None:
    """Returns the commit in the path `.../<commit>/custom_generate/generate.py`; `None` for a local repository."""
    folder = Path(code).parent.parent.name
    return folder if re.fullmatch(r"[0-9a-f]{40}", folder) else None
