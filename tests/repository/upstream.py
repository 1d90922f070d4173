"""transformers' own tests of generation, with this package imported and without: do they behave the same?

    python tests/repository/upstream.py PATH/TO/transformers [TEST ...] [-- OPTIONS OF PYTEST]

Wants a checkout of the transformers release that is installed. By default its `tests/generation` runs twice, each time
in a process of its own: plainly, and with `hf_specheads` imported before any test is. Tests whose outcomes differ are
named, and there must be none; what fails both times is transformers' own affair. Some of these tests fetch models from
the Hub; without a network they fail both times.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

DEFAULT = ("tests/generation",)
PACKAGE = "hf_specheads"
INTERRUPTED = 2  # pytest's exit codes from here on: nothing was learnt


def outcomes(checkout: Path, tests: list[str], options: list[str], plugin: str | None) -> dict[str, str]:
    """Outcome of every test by its name.

    Args:
        checkout: The checkout's root.
        tests: Files or folders below it.
        options: Further options of pytest.
        plugin: Module that is imported before the tests are.

    Raises:
        SystemExit: if pytest could not run them.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        imported = [] if plugin is None else ["-p", plugin]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *imported]
        ran = subprocess.run([*command, *options, *tests], cwd=checkout, capture_output=True, text=True)
        if ran.returncode >= INTERRUPTED or not report.is_file():
            raise SystemExit(f"pytest could not run {tests} in {checkout}:\n{(ran.stdout + ran.stderr)[-2000:]}")
        cases = ET.parse(report).getroot().iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ET.Element) -> str:
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")


def differences(without: dict[str, str], imported: dict[str, str]) -> list[str]:
    """A line for every test that does not behave the same."""
    names = sorted({*without, *imported})
    pairs = [(name, without.get(name, "not there"), imported.get(name, "not there")) for name in names]
    return [f"{name}: {before}, with {PACKAGE} {after}" for name, before, after in pairs if before != after]


def main(arguments: list[str] | None = None) -> int:
    """Runs both and tells; 1 where something differs."""
    given = sys.argv[1:] if arguments is None else arguments
    ours, options = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="root of a checkout of transformers")
    parser.add_argument("tests", nargs="*", default=list(DEFAULT), help="files or folders below it")
    args = parser.parse_args(ours)
    missing = [test for test in args.tests if not (args.checkout / test.partition("::")[0]).exists()]
    if missing:
        parser.error(f"{args.checkout} has no {missing[0]}; give the root of a checkout, and tests below it.")
    without, imported = (outcomes(args.checkout, args.tests, options, plugin) for plugin in (None, PACKAGE))
    found = differences(without, imported)
    sys.stdout.write("\n".join([*found, f"{dict(Counter(without.values()))}; {len(found)} differ\n"]))
    return int(bool(found) or not without)


if __name__ == "__main__":
    sys.exit(main())
