"""How options of commands may be written."""

from __future__ import annotations

from collections.abc import Sequence


def dashed_options(words: Sequence[str]) -> list[str]:
    """The words of a command line, options with dashes for underscores; after `--` all as they are."""
    end = words.index("--") if "--" in words else len(words)
    return [*map(dashed, words[:end]), *words[end:]]


def dashed(word: str) -> str:
    """`--max_new_tokens=8` as `--max-new-tokens=8`; whatever is no option as it is."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word
