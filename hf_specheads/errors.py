"""Errors of this package. Each message names the value, what was expected, and how to fix it."""

from __future__ import annotations


class HeadLoadError(ValueError):
    """Draft heads could not be loaded. Base class of the more specific errors below."""


class UnknownFormatError(HeadLoadError):
    """The files are not draft heads in a layout this package reads. The message says what they look like."""


class CorruptCheckpointError(HeadLoadError):
    """A file is truncated, not parseable, or holds something other than plain tensors. Nothing in it was executed."""


class CheckpointKeysError(HeadLoadError):
    """Tensors are missing from a checkpoint, or it holds unexpected tensors."""


def refuse_wrong_keys(*, missing: set[str], unknown: set[str]) -> None:
    """Raises a [`CheckpointKeysError`] that names the missing and unknown keys, if there are any."""
    problems = [
        f"{what} {sorted(keys)[:6]}{' ...' if len(keys) > 6 else ''}"
        for what, keys in (("missing", missing), ("unknown", unknown))
        if keys
    ]
    if problems:
        raise CheckpointKeysError(
            f"the tensors do not match these draft heads: {'; '.join(problems)}. The file is of another kind, or "
            "damaged; download it again."
        )


class CheckpointShapeError(HeadLoadError):
    """Tensor shapes contradict one another or the config, or are impossible for draft heads."""


class CheckpointValueError(HeadLoadError):
    """A tensor holds NaN or infinities, or has a dtype that no weight has."""


class HeadConfigError(HeadLoadError):
    """`config.json` has an impossible value, or lacks a field that cannot be derived from anything else."""


class MissingArgumentError(HeadConfigError):
    """`load_heads` needs an argument that neither the files nor their names provide. The message says which."""


class WarmStartError(ValueError):
    """The heads of a warm start do not fit the heads to be initialised."""


class WrongTargetError(ValueError):
    """The heads were made for another target than the one they are used with."""


class ExportError(ValueError):
    """The export format cannot represent the heads. The message says why, and what to do instead."""


class UnsupportedGenerationError(ValueError):
    """Draft heads cannot serve this call of `generate`. The message says what to change."""
