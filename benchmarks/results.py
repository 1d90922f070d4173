"""Results: JSON with provenance, the tables rendered from them, and the documents that show both."""

from __future__ import annotations

import ast
import datetime as dt
import functools
import hashlib
import io
import json
import re
import shlex
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from hf_specheads import provenance
from hf_specheads.cli.display import number

Result = dict[str, Any]
Column = Callable[[Result], str] | str | tuple[Any, ...]

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
SHIPPED_TARGET = ROOT / "model_cards" / "target"
PACKAGES = ("torch", "transformers", "hf-specheads")
# Parts of the measured folders that cannot change any number.
NOT_MEASURED = {
    "hf_specheads": {"app", "cli", "diagnosis", "evaluation", "figures", "publishing", "checkpoints", "trainer",
                     "__main__.py", "version.py", "provenance.py", "custom_generate.py",
                     "generation/compiled/kept.py", "generation/compiled/premises.py", "generation/streams"},
    "trainer": {"shipped_pair", "__init__.py", "__main__.py", "publishing.py", "facts.py"},
}  # fmt: skip
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
TABLE = re.compile(r"(<!-- results:(?P<name>[\w/-]+) -->\n)(?P<text>.*?)(<!-- /results:(?P=name) -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value:(?P<path>[^:\n]+)(:(?P<format>\S+))? -->)(?P<text>[^\n]*?)(<!-- /value -->)")


# ---------------------------------------------------------------------- results with their provenance
def provenance_of(words: Sequence[str], sources: Iterable[str]) -> Result:
    """Returns how a result was produced: command, commit, versions, processor, threads, date, and a hash of the
    measured code.

    Args:
        words: Arguments of the command line.
        sources: Folders of the repository that the result depends on.
    """
    # Results that were just written do not count as uncommitted changes.
    changed = provenance.git(
        ROOT, "status", "--porcelain", "--untracked-files=no", "--", ":(exclude)benchmarks/results"
    )
    return {
        "command": shlex.join(["python", "-m", "benchmarks", *map(_without_folders, words)]),
        "commit": provenance.git(ROOT, "rev-parse", "HEAD"),
        "uncommitted_changes": bool(changed),
        "sources": hash_of(sources),
        "shipped_target": shipped_target(),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "processor": provenance.processor(),
        "versions": provenance.versions(PACKAGES),
        "threads": torch.get_num_threads(),
        "accelerators": provenance.accelerators(),
    }


def _without_folders(word: str) -> str:
    """Makes an absolute path relative to the repository. Of a path outside the repository only the name is kept."""
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def hash_of(sources: Iterable[str]) -> str:
    """Hashes the executable code of the Python files in these folders, except for files that no number depends on.

    The hash does not depend on file names, so moving a file within its folder does not change it.
    """
    digest = hashlib.sha256()
    for folder in sources:
        names = (path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.py"))
        measured = [name for name in names if not any(map(name.is_relative_to, NOT_MEASURED.get(folder, ())))]
        texts = sorted(what_runs((ROOT / folder / name).read_text(encoding="utf-8")) for name in measured)
        digest.update("\n\n".join((folder, *filter(None, texts))).encode())
    return digest.hexdigest()[:16]


@functools.cache
def what_runs(source: str) -> str:
    """Python source without what no number depends on: docstrings, comments, empty lines, imports, errors and logs.

    Imported code is hashed in its own file.
    """
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines[node.body[0].lineno - 1 : node.body[0].end_lineno] = [""] * _height(node.body[0])
        elif isinstance(node, (ast.Import, ast.ImportFrom, ast.Raise)) or _logs(node):
            lines[node.lineno - 1 : node.end_lineno] = [""] * _height(cast(ast.stmt, node))
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _logs(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("logger.")


def _height(node: ast.stmt) -> int:
    return cast(int, node.end_lineno) - node.lineno + 1


@functools.cache
def shipped_target() -> str:
    """Returns the hash of the weights of the target that ships with the project."""
    return hashlib.sha256((SHIPPED_TARGET / "model.safetensors").read_bytes()).hexdigest()[:16]


def mark(result: Result, sources: Sequence[str]) -> str:
    """Returns remarks for a table whose sources or shipped target have changed since; empty if neither has."""
    facts, lines = result["provenance"], []
    if result.get("target") == SHIPPED_TARGET.name and facts.get("shipped_target") != shipped_target():
        lines.append("Measured on an earlier version of the shipped pair, whose texts and acceptance differ.\n")
    if sources and facts.get("sources") != hash_of(sources):
        lines.append(
            f"Measured with an earlier engine: {' or '.join(f'`{one}`' for one in sources)} has changed since.\n"
        )
    return "".join(lines)


def write(folder: Path, name: str, result: Result, table: str) -> None:
    """Writes `<name>.json` and its table `<name>.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(table, encoding="utf-8")


def read(folder: Path) -> dict[str, Result]:
    """Reads all results in a folder and its subfolders, by relative path without `.json`."""
    files = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.json"))}
    found = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in files.items()}
    return {name: result for name, result in found.items() if "provenance" in result}


def rounded(result: Result) -> Result:
    """Returns a result as its file holds it: floats have five significant digits."""
    return json.loads(json.dumps(result), parse_float=lambda text: float(f"{float(text):.5g}"))


def texts_agree(result: Result) -> bool:
    """Tells whether all texts equal those of plain generation.

    In dtypes with fewer bits than float32, logits tie and texts may differ. There, every text that differs must have
    been traced to a tie, where causes were recorded.
    """
    if result.get("dtype", "float32") == "float32":
        return identical(result)
    return all(side.get("differing", 0) == side.get("ties", 0) for side in _dictionaries(result))


def identical(value: Any) -> bool:
    """Tells whether all texts of a result were those of plain generation: checks every nested `identical`."""
    return all(side.get("identical", True) for side in _dictionaries(value))


def _dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    """Yields all nested dictionaries of a result."""
    if isinstance(value, dict):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inner:
        yield from _dictionaries(item)


# ---------------------------------------------------------------------- building blocks of tables
def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a Markdown table. The first column is left-aligned, the others are right-aligned."""
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join(["---"] + ["---:"] * (len(header) - 1)) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def column_table(columns: Mapping[str, Column], found: Any, *keys: str) -> str:
    """Formats a table with one row per item of a list or, with `keys`, per entry of nested mappings.

    Args:
        columns: What to show of an item, by header: a function; a text whose fields `str.format` fills in from the
            item; or the key of a number, followed by arguments of [`number`].
        found: The items.
        *keys: Headers of the leading columns, which show the keys that lead to an item.
    """
    paths: list[tuple[tuple[str, ...], Any]] = [((), found)] if keys else [((), one) for one in found]
    for _ in keys:
        paths = [((*path, key), inner) for path, outer in paths for key, inner in outer.items()]
    rows = [[*path, *(_cell(item, column) for column in columns.values())] for path, item in paths]
    return markdown_table([*keys, *columns], rows)


def _cell(item: Result, column: Column) -> str:
    if isinstance(column, str):
        return column.format_map(item)
    return column(item) if callable(column) else number(item.get(column[0]), *column[1:])


def percent(value: float | None) -> str:
    """Formats a share as a percentage."""
    return "-" if value is None else f"{100 * value:.0f} %"


def millions(parameters: int) -> str:
    """Formats a number of parameters in millions."""
    return f"{parameters / 1e6:.2f} M"


def teraflop(flop: float | None, after: str | None) -> str:
    """Formats training compute in TFLOP, and names the heads it started from."""
    text = number(flop / 1e12 if flop else None, 1)
    return f"{text} after {after}" if after else text


def speed_up(side: Result) -> str:
    """Formats a speed-up: median and range."""
    return f"{number(side['speed_up'])}x ({'-'.join(number(ratio) for ratio in side['speed_up_range'])})"


def same_text(*sides: Result) -> str:
    """Tells whether the texts of all sides were the plain ones; if not, whether they differ only at ties of logits."""
    others = [side for side in sides if not side["identical"]]
    if not others:
        return "yes"
    return "up to ties" if all(side.get("differing") == side.get("ties", -1) for side in others) else "no"


def same_texts(side: Result, of: str = "") -> str:
    """Tells whether the texts of a side were the plain ones; if not, how many prompts differ."""
    return "yes" if side["identical"] else f"no ({len(side['differing_prompts'])}{of} differ)"


def pos_acc(values: Sequence[float] | None) -> str:
    """Formats pos-acc in hundredths, draft position 1 first."""
    return " ".join(f".{round(100 * value):02d}" if value < 0.995 else "1." for value in values or ()) or "-"


def draft_tree(tree: Result) -> str:
    """Describes a draft tree in words."""
    copied = f" and {tree['lookup']} copied nodes" if tree.get("lookup") else ""
    if tree["kind"] == "chain":
        return f"chain of {tree['depth']}{copied}"
    kind = "" if tree["kind"] == "dynamic" else f"{tree['kind']}, "
    return f"{kind}depth {tree['depth']}, top-k {tree['top_k']}, {tree['total_tokens']} nodes{copied}"


def footnote(result: Result, *more: str) -> str:
    """Formats the line below a table that tells where its numbers come from. It starts with the texts `more`, whose
    fields `str.format` fills in from the result."""
    facts = result["provenance"]
    commit = (facts["commit"] or "unknown")[:10] + ("+" if facts["uncommitted_changes"] else "")
    versions = facts["versions"]
    parts = [
        *(one.format_map(result) for one in more),
        *([facts["accelerators"]] if result.get("device", "cpu") != "cpu" else []),
        f"{facts['processor']}, {facts['threads']} threads",
        f"torch {versions['torch']}, transformers {versions['transformers']}",
        f"commit {commit}, {facts['date']}",
    ]
    return "\n" + "; ".join(parts) + f".\n`{facts['command']}`\n"


# ---------------------------------------------------------------------- documents
def documents() -> list[Path]:
    """Returns the documents that may show results."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def render(text: str, results: Mapping[str, Result], tables: Mapping[str, str]) -> str:
    """Renders a document: replaces the marked tables and numbers by those of the results.

        <!-- results:speedup -->
        (table of benchmarks/results/speedup.json)
        <!-- /results:speedup -->
        ... is <!-- value:speedup.prompt_sets.held_out.poss3.speed_up:.2f -->1.23<!-- /value --> times as fast ...

    The path of a value is the name of the result and the keys that lead to the value, joined by dots. A colon and a
    format specification of Python's `format` may follow.

    Args:
        text: Markdown with such marks.
        results: Results by name.
        tables: Tables by name.

    Raises:
        ValueError: if a mark has no partner, or names something that is in no result.
    """
    for kind, pattern in (("results", TABLE), ("value", VALUE)):
        marks = re.findall(rf"<!-- /?{kind}\b[^\n]*? -->", text)
        if len(marks) != 2 * len(pattern.findall(text)):
            raise ValueError(f"every <!-- {kind}:X --> needs a following <!-- /{kind} -->; found {marks}.")
    if unknown := sorted({found["name"] for found in TABLE.finditer(text)} - set(tables)):
        raise ValueError(
            f"unknown results {unknown}, expected one of {sorted(tables)}; correct the mark, or run the measurement."
        )
    text = TABLE.sub(lambda found: f"{found[1]}{tables[found['name']]}{found[4]}", text)
    return VALUE.sub(lambda found: f"{found[1]}{_value(found, results)}{found[6]}", text)


def _value(found: re.Match[str], results: Mapping[str, Result]) -> str:
    try:
        return format(value_at(results, found["path"]), found["format"] or "")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{found[1]} does not name a value that can be shown: {error}") from error


def value_at(values: Any, path: str) -> str | float | bool:
    """Returns the value at keys joined by dots. Keys may contain dots themselves; list items are addressed by number.

    Raises:
        KeyError: if there is no value at this path.
    """
    while path:
        if isinstance(values, list):
            values = {str(place): value for place, value in enumerate(values)}
        known = list(values) if isinstance(values, Mapping) else []
        fitting = [key for key in known if f"{path}.".startswith(f"{key}.")]
        if not fitting:
            raise KeyError(f"{path!r}, expected one of {known}")
        key = max(fitting, key=len)
        values, path = values[key], path[len(key) + 1 :]
    if isinstance(values, dict | list):
        raise KeyError(
            f"expected a number or a text, but the path ends at a {type(values).__name__} of {len(values)} values"
        )
    return values
