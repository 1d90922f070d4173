"""References in docstrings, [`Name`] as in transformers, become links of the site: an extension of griffe."""

from __future__ import annotations

import re
from typing import Any

import griffe

REFERENCE = re.compile(r"\[`([\w.]+)`\](?![\[(])")
PAGES = ("hf_specheads", "hf_specheads.trainer")  # packages whose public names have entries


class References(griffe.Extension):
    """Public names become links to their entries; of other names the words stay."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Goes through everything once the package is read."""
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
