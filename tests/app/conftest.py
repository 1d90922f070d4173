"""A page's models on tiny random ones."""

from __future__ import annotations

import pytest

from hf_specheads.app.models import Models


@pytest.fixture
def models(target, poss_heads, eagle_heads, tokenizer) -> Models:
    """A target that continues texts, with heads of two methods."""
    loaders = {"poss": lambda: poss_heads, "eagle": lambda: eagle_heads}
    return Models(target, tokenizer, loaders, "tiny")
