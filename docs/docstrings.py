"""An extension of griffe that turns references in docstrings, written [`Name`] as in transformers, into links."""

from __future__ import annotations

import re
from typing import Any

import griffe

REFERENCE = re.compile(r"\[`([\w.]+)`\](?![\[(])")
PAGES = ("hf_specheads", "hf_specheads.trainer")  # packages whose public names have entries on the site


class References(griffe.Extension):
    """Turns references to public names into links to their entries, and other references into plain code."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Rewrites the docstrings of the whole package after griffe has read it."""
        public = {}
        for package in (pkg, pkg.members["trainer"]):
            for alias in package.members.values():
                if alias.is_alias and not alias.name.startswith("_"):
                    public[alias.name] = alias.path
        self._rewrite(pkg, public)

    def _rewrite(self, parent: Any, public: dict[str, str]) -> None:
        for member in [parent, *(one for one in parent.members.values() if not one.is_alias)]:
            if member.docstring is not None:
                member.docstring.value = REFERENCE.sub(lambda found: _link(found[1], public), member.docstring.value)
            if member is not parent and member.members:
                self._rewrite(member, public)


def _link(name: str, public: dict[str, str]) -> str:
    last = name.rpartition(".")[2]
    return f"[`{name}`][{public[last]}]" if last in public else f"`{name}`"
