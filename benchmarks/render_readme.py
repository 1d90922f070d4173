"""Puts the tables of `benchmarks/results/` into README.md and docs/*.md, between marks that name a result.

python -m benchmarks.render_readme            # rewrite
python -m benchmarks.render_readme --check    # fail if a document is not what the results say
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from .tables import RENDERERS

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- results:(?P<name>\w+) -->\n)(?P<text>.*?)(<!-- /results:(?P=name) -->)", re.DOTALL)


def render(text: str, results: Path) -> str:
    """The text with every marked block replaced by its table.

    Args:
        text: Markdown with markers.
        results: Folder of `<name>.json`; a block without a result stays as it is.

    Raises:
        ValueError: for a marker without its partner, or of an unknown result.
    """
    marks = re.findall(r"<!-- /?results:(\w+) -->", text)
    if len(marks) != 2 * len(BLOCK.findall(text)):
        raise ValueError(f"every <!-- results:X --> needs a following <!-- /results:X -->; found marks of {marks}")
    if unknown := sorted(set(marks) - set(RENDERERS)):
        raise ValueError(f"unknown results {unknown}; known are {sorted(RENDERERS)}")

    def block(match: re.Match[str]) -> str:
        path = results / f"{match['name']}.json"
        if not path.is_file():
            return match[0]
        table = RENDERERS[match["name"]](json.loads(path.read_text(encoding="utf-8")))
        return f"{match[1]}{table}{match[4]}"

    return BLOCK.sub(block, text)


def documents() -> list[Path]:
    """Documents that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--documents", type=Path, nargs="+", default=documents())
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 if something would change")
    args = parser.parse_args()
    differing = []
    for document in args.documents:
        text = document.read_text(encoding="utf-8")
        rendered = render(text, args.results)
        if rendered == text:
            continue
        differing.append(document.name)
        if not args.check:
            document.write_text(rendered, encoding="utf-8")
    if args.check:
        print(f"{differing} differ from the results; run without --check" if differing else "in sync")
    return int(args.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
