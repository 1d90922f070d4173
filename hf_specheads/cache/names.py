"""Names of the argument through which models take their cache.

transformers 5.24 calls it `cache` for all models. Earlier versions call it `past_key_values`, except for Mamba.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from transformers.generation.utils import ALL_CACHE_NAMES

CACHE_NAME: str = ALL_CACHE_NAMES[0]
CACHE_NAMES = tuple(dict.fromkeys((CACHE_NAME, "past_key_values", "cache_params")))


def cache_name(model_kwargs: dict[str, Any]) -> str:
    """Returns the key of `model_kwargs` under which `generate` prepared the cache."""
    return next((name for name in CACHE_NAMES if model_kwargs.get(name) is not None), CACHE_NAME)


def cache_parameter(parameters: Container[str]) -> str:
    """Returns which of a forward's parameters takes the cache."""
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAME)
