"""Results: JSON with their provenance, the tables made of them, and documents that show both."""

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
# Of the folders that a measurement is about, what no number depends on.
NOT_MEASURED = {
    "hf_specheads": {"cli", "diagnosis", "publishing", "checkpoints", "trainer", "__main__.py", "version.py",
                     "provenance.py", "custom_generate.py", "generation/compiled/kept.py",
                     "generation/compiled/premises.py"},
    "trainer": {"shipped_pair", "__init__.py", "__main__.py", "publishing.py", "facts.py"},
}  # fmt: skip
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
TABLE = re.compile(r"(<!-- results:(?P<name>[\w/-]+) -->\n)(?P<text>.*?)(<!-- /results:(?P=name) -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value:(?P<path>[^:\n]+)(:(?P<format>\S+))? -->)(?P<text>[^\n]*?)(<!-- /value -->)")


# ---------------------------------------------------------------------- results with their provenance
def provenance_of(words: Sequence[str], sources: Iterable[str]) -> Result:
    """How a result comes about: command, commit, versions, processor, threads, date, and a hash of what is measured.

    Args:
        words: Arguments of the command line.
        sources: Folders of the repository that the result depends on.
    """
    # Results that were just written do not count.
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
    """A path relative to the repository; of a path outside it only the name."""
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def hash_of(sources: Iterable[str]) -> str:
    """Of what runs in the Python files of folders of the repository, but those that no number depends on.

    Files that move are the files they were.
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
    """Python source without docstrings, comments, empty lines and imports: what is imported is hashed where it is."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines[node.body[0].lineno - 1 : node.body[0].end_lineno] = [""] * _height(node.body[0])
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            lines[node.lineno - 1 : node.end_lineno] = [""] * _height(node)
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _height(node: ast.stmt) -> int:
    return cast(int, node.end_lineno) - node.lineno + 1


@functools.cache
def shipped_target() -> str:
    """Hash of the weights of the target that comes with the project."""
    return hashlib.sha256((SHIPPED_TARGET / "model.safetensors").read_bytes()).hexdigest()[:16]


def mark(result: Result, sources: Sequence[str]) -> str:
    """A line for the table of a result whose sources or whose target has changed since; empty while they have not."""
    facts, lines = result["provenance"], []
    if result.get("target") == SHIPPED_TARGET.name and facts.get("shipped_target") != shipped_target():
        lines.append("Measured on an earlier shipped pair: other texts, other acceptance.\n")
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
    """All results of a folder and of those in it, by their path without `.json`."""
    files = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.json"))}
    found = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in files.items()}
    return {name: result for name, result in found.items() if "provenance" in result}


def rounded(result: Result) -> Result:
    """A result as its file will hold it, floats to five significant digits."""
    return json.loads(json.dumps(result), parse_float=lambda text: float(f"{float(text):.5g}"))


def texts_agree(result: Result) -> bool:
    """Whether all are those of plain generation. In fewer bits than float32 logits tie, and they need not be: where it
    was looked at why texts differ, ties must be why."""
    if result.get("dtype", "float32") == "float32":
        return identical(result)
    return all(side.get("differing", 0) == side.get("ties", 0) for side in _dictionaries(result))


def identical(value: Any) -> bool:
    """Whether all texts in a result were those of plain generation: every `identical` in it, however deep."""
    return all(side.get("identical", True) for side in _dictionaries(value))


def _dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    """All in a result, however deep."""
    if isinstance(value, dict):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inner:
        yield from _dictionaries(item)


# ---------------------------------------------------------------------- what tables are made of
def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right-aligned."""
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join(["---"] + ["---:"] * (len(header) - 1)) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def column_table(columns: Mapping[str, Column], found: Any, *keys: str) -> str:
    """A row per item of a list or, with `keys`, per entry of mappings in each other.

    Args:
        columns: By header, what is shown of an item: a function, words with fields of it as `str.format` fills them
            in, or the key of a number and how [`number`] shows it.
        found: The items.
        *keys: Headers of the keys that lead to an item, which come first.
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
    """A share as a percentage."""
    return "-" if value is None else f"{100 * value:.0f} %"


def millions(parameters: int) -> str:
    """A number of parameters."""
    return f"{parameters / 1e6:.2f} M"


def teraflop(flop: float | None, after: str | None) -> str:
    """Training compute, and after whose."""
    text = number(flop / 1e12 if flop else None, 1)
    return f"{text} after {after}" if after else text


def speed_up(side: Result) -> str:
    """A median and its range."""
    return f"{number(side['speed_up'])}x ({'-'.join(number(ratio) for ratio in side['speed_up_range'])})"


def same_text(*sides: Result) -> str:
    """Whether the texts of a side, or of several, were the plain ones; where not, whether rounding decided alone."""
    others = [side for side in sides if not side["identical"]]
    if not others:
        return "yes"
    return "up to ties" if all(side.get("differing") == side.get("ties", -1) for side in others) else "no"


def same_texts(side: Result, of: str = "") -> str:
    """The same, and how many prompts' texts differ."""
    return "yes" if side["identical"] else f"no ({len(side['differing_prompts'])}{of} differ)"


def pos_acc(values: Sequence[float] | None) -> str:
    """pos-acc in hundredths, draft position 1 first."""
    return " ".join(f".{round(100 * value):02d}" if value < 0.995 else "1." for value in values or ()) or "-"


def draft_tree(tree: Result) -> str:
    """A draft tree in words."""
    copied = f" and {tree['lookup']} copied nodes" if tree.get("lookup") else ""
    if tree["kind"] == "chain":
        return f"chain of {tree['depth']}{copied}"
    kind = "" if tree["kind"] == "dynamic" else f"{tree['kind']}, "
    return f"{kind}depth {tree['depth']}, top-k {tree['top_k']}, {tree['total_tokens']} nodes{copied}"


def footnote(result: Result, *more: str) -> str:
    """Where a table comes from, after `more` with fields of the result in it as `str.format` fills them in."""
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
    """Documents that may show results."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def render(text: str, results: Mapping[str, Result], tables: Mapping[str, str]) -> str:
    """A document with every table and every number of a result as the result has them.

        <!-- results:speedup -->
        (table of benchmarks/results/speedup.json)
        <!-- /results:speedup -->
        ... is <!-- value:speedup.prompt_sets.held_out.poss3.speed_up:.2f -->1.23<!-- /value --> times as fast ...

    A value is named by the result and the keys that lead to it, with a format as of Python's `format` after a colon.

    Args:
        text: Markdown with such marks.
        results: Results by name.
        tables: Their tables by name.

    Raises:
        ValueError: for a mark without its partner, or of something that is in no result.
    """
    for kind, pattern in (("results", TABLE), ("value", VALUE)):
        marks = re.findall(rf"<!-- /?{kind}\b[^\n]*? -->", text)
        if len(marks) != 2 * len(pattern.findall(text)):
            raise ValueError(f"every <!-- {kind}:X --> needs a following <!-- /{kind} --> of its own; found {marks}.")
    if unknown := sorted({found["name"] for found in TABLE.finditer(text)} - set(tables)):
        raise ValueError(f"unknown results {unknown}, expected some of {sorted(tables)}; mend the mark, or measure.")
    text = TABLE.sub(lambda found: f"{found[1]}{tables[found['name']]}{found[4]}", text)
    return VALUE.sub(lambda found: f"{found[1]}{_value(found, results)}{found[6]}", text)


def _value(found: re.Match[str], results: Mapping[str, Result]) -> str:
    try:
        return format(value_at(results, found["path"]), found["format"] or "")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{found[1]} names nothing that can be shown: {error}") from error


def value_at(values: Any, path: str) -> str | float | bool:
    """What lies at keys joined by dots, of which each may hold dots itself; list items by their number.

    Raises:
        KeyError: if nothing lies there.
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
        raise KeyError(f"a number or a text, but the path ends at {type(values).__name__} of {len(values)}")
    return values
