"""Under which names models take their caches: transformers 5.24 calls every one `cache`, versions before it all but
Mamba's `past_key_values`."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from transformers.generation.utils import ALL_CACHE_NAMES

CACHE_NAME: str = ALL_CACHE_NAMES[0]
CACHE_NAMES = tuple(dict.fromkeys((CACHE_NAME, "past_key_values", "cache_params")))


def cache_name(model_kwargs: dict[str, Any]) -> str:
    """Under which name `generate` prepared the cache."""
    return next((name for name in CACHE_NAMES if model_kwargs.get(name) is not None), CACHE_NAME)


def cache_parameter(parameters: Container[str]) -> str:
    """Under which of its parameters a forward takes a cache."""
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAME)
