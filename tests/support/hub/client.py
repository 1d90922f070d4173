"""Functions that several tests run in the process that talks to the local Hub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def error_of(function: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """Returns name and message of the error that a call raises, or an empty text without an error."""
    try:
        function(*args, **kwargs)
    except (ValueError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
