"""Builds the documents as a site and treats warnings as errors: `make docs`, or `python docs/build.py [--output
FOLDER]`.

The pages are the ones that GitHub shows. A link to a file outside `docs/`, which the site does not contain, is
replaced by its text; all other links must resolve. Docstrings are read from `hf_specheads` with `trainer/` inside it,
as the package is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?!https?://|#)[^)\s]+)\)")


def without_links_out(text: str, page: Path) -> str:
    """Replaces links to files of the repository outside `docs/` by their texts.

    Args:
        text: Markdown.
        page: Path of the page; links are relative to it. Links to missing files stay, so that the build reports them.
    """

    def words_or_link(link: re.Match[str]) -> str:
        linked = (page.parent / link[2].partition("#")[0]).resolve()
        leads_out = linked.is_relative_to(ROOT) and not linked.is_relative_to(DOCS) and linked.exists()
        return link[1] if leads_out else link[0]

    return LINK.sub(words_or_link, text)


def copy_pages(folder: Path) -> None:
    """Copies configuration, pages and pictures into a folder, with links to the package as it is installed."""
    shutil.copy(DOCS / "mkdocs.yml", folder)
    shutil.copy(Path(__file__).with_name("docstrings.py"), folder)
    shutil.copytree(DOCS, folder / "docs", ignore=shutil.ignore_patterns("*.py", "mkdocs.yml", "__pycache__"))
    for page in DOCS.rglob("*.md"):
        text = without_links_out(page.read_text(encoding="utf-8"), page)
        (folder / "docs" / page.relative_to(DOCS)).write_text(text, encoding="utf-8")
    package = folder / "package" / "hf_specheads"
    package.mkdir(parents=True)
    for part in (ROOT / "hf_specheads").iterdir():
        if part.name not in ("trainer", "demo_pair", "__pycache__"):
            (package / part.name).symlink_to(part)
    (package / "trainer").symlink_to(ROOT / "trainer")


def build(output: Path) -> int:
    """Builds the site into `output`, which is replaced. Returns the builder's exit code, which is not 0 after any
    warning."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_pages(folder)
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        code = subprocess.run(command, cwd=folder, env={**os.environ, "NO_COLOR": "1"}).returncode
        if code == 0:
            shutil.rmtree(output, ignore_errors=True)
            shutil.copytree(folder / "site", output)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "site")
    return build(parser.parse_args().output)


if __name__ == "__main__":
    sys.exit(main())
