"""Errors of this package. Each message names the value, what was expected, and how to mend it."""

from __future__ import annotations


class HeadLoadError(ValueError):
    """Draft heads could not be loaded; base class of the more particular reasons below."""


class UnknownFormatError(HeadLoadError):
    """The files are no draft heads in a layout this package reads; the message says what they look like."""


class CorruptCheckpointError(HeadLoadError):
    """A file is truncated, not parseable, or holds something else than plain tensors. Nothing of it was executed."""


class CheckpointKeysError(HeadLoadError):
    """Tensors are missing from a checkpoint, or it holds tensors that nothing accounts for."""


def refuse_wrong_keys(*, missing: set[str], unknown: set[str]) -> None:
    """Raises [`CheckpointKeysError`] if there is a missing or an unknown key, naming them."""
    problems = [
        f"{what} {sorted(keys)[:6]}{' ...' if len(keys) > 6 else ''}"
        for what, keys in (("missing", missing), ("unknown", unknown))
        if keys
    ]
    if problems:
        raise CheckpointKeysError(
            f"the tensors are not exactly those of these draft heads: {'; '.join(problems)}. The file is of another "
            "kind, or damaged; download it again."
        )


class CheckpointShapeError(HeadLoadError):
    """Sizes of tensors contradict one another, the config, or what draft heads can be."""


class CheckpointValueError(HeadLoadError):
    """A tensor holds NaN, infinities, or numbers of a type no weight has."""


class HeadConfigError(HeadLoadError):
    """`config.json` lacks a field that nothing else tells, or has an impossible value."""


class MissingArgumentError(HeadConfigError):
    """`load_heads` must be told something that neither the files nor their names say; the message says what."""


class WarmStartError(ValueError):
    """The heads of a warm start do not fit the heads to be initialised."""


class WrongTargetError(ValueError):
    """The heads were made for another target than the one they were handed to."""


class ExportError(ValueError):
    """A destination cannot represent the heads; the message says why, and what to do instead."""


class UnsupportedGenerationError(ValueError):
    """Draft heads cannot serve this call of `generate`; the message says what to change."""
