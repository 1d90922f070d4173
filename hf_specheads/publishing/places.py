"""Facts as others may read them: what lies on this machine by its last name, not by its place."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

# An absolute path, or one below the user's home, where a word of a command line or its value begins.
PLACE = re.compile(r"""(?:^|(?<=[\s=,'"\[(]))(?:[A-Za-z]:[\\/]|~?/)(?:[^\s/\\'",\])=]+[\\/])+([^\s/\\'",\])=]+)""")


def without_places(facts: Any) -> Any:
    """The same facts with `poss3` for `/home/me/runs/poss3`; relative paths and addresses stay. Absolute ones are of
    no use elsewhere, and tell whose machine it was.

    Args:
        facts: Plain values, as JSON holds them.
    """
    if isinstance(facts, dict):
        return {name: without_places(value) for name, value in facts.items()}
    if isinstance(facts, list):
        return [without_places(value) for value in facts]
    if not isinstance(facts, str):
        return facts
    if os.path.isabs(facts) and os.path.exists(facts):  # with spaces, perhaps
        return Path(facts).name or facts
    return PLACE.sub(lambda found: found[1], facts)
