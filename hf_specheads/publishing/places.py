"""Removes absolute local paths from facts before they are published; only the last part of a path remains."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

# Matches an absolute path, or one below the user's home, at the start of a word or value in a command line.
PLACE = re.compile(r"""(?:^|(?<=[\s=,'"\[(]))(?:[A-Za-z]:[\\/]|~?/)(?:[^\s/\\'",\])=]+[\\/])+([^\s/\\'",\])=]+)""")


def without_places(facts: Any) -> Any:
    """Replaces absolute paths by their last part, e.g. `/home/me/runs/poss3` by `poss3`.

    Relative paths and URLs are kept. Absolute paths are useless on other machines and may reveal the user's name.

    Args:
        facts: Plain values, as in JSON.
    """
    if isinstance(facts, dict):
        return {name: without_places(value) for name, value in facts.items()}
    if isinstance(facts, list):
        return [without_places(value) for value in facts]
    if not isinstance(facts, str):
        return facts
    if os.path.isabs(facts) and os.path.exists(facts):  # catches paths with spaces, which PLACE does not match as one
        return Path(facts).name or facts
    return PLACE.sub(lambda found: found[1], facts)
