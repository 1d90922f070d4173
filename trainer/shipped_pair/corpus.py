"""Corpus of the shipped pair: chats with right answers, and the Python standard library's source.

    python -m hf_specheads.trainer.shipped_pair.corpus --output runs/held_out.jsonl --held_out --per_family 20
    python -m hf_specheads.trainer.shipped_pair.corpus --tokenizer runs/tokenizer --statistics

The first command writes chats (`tasks/`) as JSONL; the second prints their lengths in tokens.

Files of the library are assigned to train or held-out by a hash of their relative path. The split therefore does not
depend on the order of the files, on the machine, or on optional folders (`test`, ...) that an installation may lack.
"""

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .chat import chat_tokens, prompt_tokens
from .tasks import FAMILIES, Example, Family, examples

HELD_OUT_PER_MILLE = 25
# Folders that are skipped. Most hold tables, thousands of near-identical lines that any model would memorise.
SKIPPED_PARTS = {"site-packages", "__pycache__", "encodings", "cjkencodings", "pydoc_data", "bad_grammars"}
MAX_FILE_BYTES = 400_000


def corpus_files(root: Path | None = None) -> list[Path]:
    """Returns the Python files of the corpus, sorted by path.

    Args:
        root: Folder to search. Default: the standard library of the running interpreter.

    Raises:
        FileNotFoundError: if `root` holds no usable Python file.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not SKIPPED_PARTS & set(path.relative_to(root).parts) and 200 < path.stat().st_size < MAX_FILE_BYTES
    ]
    if not files:
        raise FileNotFoundError(f"no Python source files under {root}; pass the folder of a standard library")
    return files


def is_held_out(path: Path, root: Path) -> bool:
    """Whether a file belongs to the held-out split (about 2.5 % of all files), by a hash of its relative path."""
    digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE


def read_split(held_out: bool, root: Path | None = None) -> list[str]:
    """Reads the texts of one split, one string per file; files that are not valid UTF-8 are left out."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in corpus_files(root):
        if is_held_out(path, root) != held_out:
            continue
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    return texts


def fingerprint(texts: list[str]) -> str:
    """Returns a short hash of a list of texts, which model cards show so that a rebuilt corpus can be compared."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()[:16]


def distinct_examples(family: Family, count: int, seed: int = 0, held_out: bool = False) -> Iterator[Example]:
    """Yields the first `count` chats of a family with different prompts."""
    seen: set[str] = set()
    for example in examples(family, seed, held_out):
        if len(seen) == count:
            return
        asked = json.dumps([example.prompt, example.thinking])
        if asked not in seen:
            seen.add(asked)
            yield example


def write_examples(path: Path, per_family: int, seed: int = 0, held_out: bool = False) -> int:
    """Writes chats of all families as JSONL, alternating between families; `Example.from_row` reads a line back.

    Returns:
        The number of chats.
    """
    columns = [list(distinct_examples(family, per_family, seed, held_out)) for family in FAMILIES]
    rows = [example.to_row() for row in zip(*columns, strict=True) for example in row]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(rows)


def read_examples(path: Path) -> list[Example]:
    """Reads the chats of a file written by [`write_examples`]."""
    return [Example.from_row(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def statistics(
    family: Family, tokenizer: PreTrainedTokenizerBase, count: int, seed: int = 0, held_out: bool = False
) -> dict[str, Any]:
    """Returns the minimum, mean and maximum length in tokens of `prompt` and `answer` over a family's chats, and the
    share with `thinking`."""
    lengths: dict[str, list[int]] = {"prompt": [], "answer": []}
    thinking = 0
    for example in distinct_examples(family, count, seed, held_out):
        _, mask = chat_tokens(example, tokenizer)
        prompt = len(prompt_tokens(example, tokenizer))
        lengths["prompt"].append(prompt)
        lengths["answer"].append(sum(mask[prompt:]))
        thinking += example.thinking
    summary = {name: (min(found), round(sum(found) / count, 1), max(found)) for name, found in lengths.items()}
    return {"family": family.name, **summary, "thinking": thinking / count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, help="JSONL file to write chats to")
    parser.add_argument("--statistics", action="store_true", help="print lengths in tokens instead")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer of the statistics")
    parser.add_argument("--per_family", type=int, default=200, help="chats of each family")
    parser.add_argument("--held_out", action="store_true", help="held-out values and phrasings")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.statistics != (args.tokenizer is not None) or args.statistics == (args.output is not None):
        parser.error("give either --output FILE, or --statistics with --tokenizer FOLDER")
    if args.output is not None:
        print(f"{write_examples(args.output, args.per_family, args.seed, args.held_out)} chats in {args.output}")
        return
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    for family in FAMILIES:
        print(json.dumps(statistics(family, tokenizer, args.per_family, args.seed, args.held_out)))


if __name__ == "__main__":
    main()
