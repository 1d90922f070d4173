"""Draws docs/images/badges.svg from facts in the project's files: `python docs/images/badges.py`.

No hosted CI reports whether the last run passed. The badges therefore show what every run checks, read from the
recipes that `.ci/run` calls.
"""

from __future__ import annotations

import re
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "images" / "badges.svg"
LEFT, RIGHT, CHECKED = "#4a4a4a", "#2f5d8a", "#2b7d4f"


def recipe(target: str) -> str:
    """Returns the commands of a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)[1]


def ci_checks() -> list[str]:
    """Returns the names of the tools that CI runs."""
    targets = re.findall(r"make (?:--[\w-]+ )*(\w+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    commands = "".join(recipe(target) for target in targets)
    return [name for name in ("ruff", "mypy", "pytest") if re.search(rf"\b{name}\b", commands)]


def facts() -> list[tuple[str, str, str]]:
    """Returns name, value and colour of every badge."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    transformers = next(one for one in project["dependencies"] if one.startswith("transformers"))
    return [
        ("python", project["requires-python"].replace(">=", "≥ "), RIGHT),
        ("transformers", transformers.removeprefix("transformers").replace(">=", "≥ "), RIGHT),
        ("licence", project["license"], RIGHT),
        ("CI checks", " · ".join(ci_checks()), CHECKED),
    ]


def draw() -> str:
    """Returns the SVG."""
    parts, at = [], 0
    for name, value, colour in facts():
        left, right = 14 + 7 * len(name), 14 + 7 * len(value)
        parts.append(
            f'<rect x="{at}" width="{left + right}" height="22" rx="4" fill="{LEFT}"/>'
            f'<path d="M{at + left} 0 h{right - 4} q4 0 4 4 v14 q0 4 -4 4 h-{right - 4} z" fill="{colour}"/>'
            f'<text x="{at + left / 2}" y="15">{escape(name)}</text>'
            f'<text x="{at + left + right / 2}" y="15">{escape(value)}</text>'
        )
        at += left + right + 8
    said = escape("; ".join(f"{name}: {value}" for name, value, _ in facts()))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{at - 8}" height="22" role="img" aria-label="{said}" '
    style = 'font-family="DejaVu Sans,Verdana,sans-serif" font-size="11" fill="#fff" text-anchor="middle">'
    return "\n".join([head + style, f"<title>{said}</title>", *parts, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
