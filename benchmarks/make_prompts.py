"""Cuts benchmark prompts from held-out files of the shipped pair's corpus (never from files it was trained on).

    python -m benchmarks.make_prompts --tokenizer model_cards/target

A prompt is the beginning of a top-level function or class, cut at the end of a line. Files, definitions and lengths
are drawn by hashes, so the same Python version gives the same prompts. `held_out.jsonl` is for reporting;
`tuning.jsonl`, cut from other files, is for choosing options such as the default draft tree. `long.jsonl` holds whole
beginnings of held-out files, longer than what heads were trained on.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import platform
import sysconfig
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_specheads.trainer.shipped_pair.corpus import corpus_files, is_held_out

PROMPTS = Path(__file__).parent / "prompts"
MIN_TOKENS, MAX_TOKENS = 40, 200
SIZES = {"held_out": 24, "tuning": 12}
LONG_TOKENS, LONG_FILES = 1536, 12
PER_FILE = 2
LINES_AFTER = 8  # of the definition must remain, so that there is something to continue


def draw(*key: str) -> int:
    """A number decided by a key alone."""
    return int.from_bytes(hashlib.sha256("/".join(key).encode()).digest()[:8], "big")


def cut(lines: list[str], tokenizer: PreTrainedTokenizerBase, wanted: int) -> str | None:
    """The first lines of a definition with about `wanted` tokens, at least MIN_TOKENS; `None` if it is too short."""
    for end in range(1, len(lines) - LINES_AFTER + 1):
        text = "\n".join(lines[:end]).rstrip()
        length = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        if length > MAX_TOKENS:
            return None
        if length >= wanted:
            return text
    return None


def prompts_of(path: Path, root: Path, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """Up to PER_FILE prompts of one file."""
    name = path.relative_to(root).as_posix()
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    nodes.sort(key=lambda node: draw(name, node.name))
    prompts: list[dict[str, str]] = []
    for node in nodes:
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        wanted = MIN_TOKENS + draw(name, node.name, "length") % 100
        text = cut(lines[first : node.end_lineno], tokenizer, wanted)
        if text is not None and len(prompts) < PER_FILE:
            prompts.append({"name": f"{name}:{node.name}", "prompt": text})
    return prompts


def make(tokenizer: PreTrainedTokenizerBase, root: Path) -> dict[str, list[dict[str, str]]]:
    """Prompts of both sets, from disjoint files; every file gives one before any gives a second."""
    ranked: dict[str, list[tuple[int, int, dict[str, str]]]] = {name: [] for name in SIZES}
    for path in corpus_files(root):
        if is_held_out(path, root):
            chosen = "tuning" if draw(path.relative_to(root).as_posix(), "set") % 3 == 0 else "held_out"
            for rank, prompt in enumerate(prompts_of(path, root, tokenizer)):
                ranked[chosen].append((rank, draw(prompt["name"]), prompt))
    sets = {}
    for name, size in SIZES.items():
        best = [prompt for *_, prompt in sorted(ranked[name], key=lambda entry: entry[:2])[:size]]
        sets[name] = sorted(best, key=lambda prompt: prompt["name"])
    return sets


def make_long(tokenizer: PreTrainedTokenizerBase, root: Path) -> list[dict[str, str]]:
    """The first LONG_TOKENS tokens, at least, of held-out files that go on after them."""
    prompts = []
    for path in corpus_files(root):
        lines = path.read_text(encoding="utf-8").splitlines() if is_held_out(path, root) else []
        for end in range(LINES_AFTER, len(lines) - 4 * LINES_AFTER, LINES_AFTER):
            text = "\n".join(lines[:end]).rstrip()
            if len(tokenizer(text, add_special_tokens=False)["input_ids"]) >= LONG_TOKENS:
                prompts.append({"name": path.relative_to(root).as_posix(), "prompt": text})
                break
    prompts.sort(key=lambda prompt: draw(prompt["name"], "long"))
    return sorted(prompts[:LONG_FILES], key=lambda prompt: prompt["name"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokenizer", type=Path, default=Path("model_cards/target"))
    args = parser.parse_args()
    root = Path(sysconfig.get_paths()["stdlib"])
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    for name, prompts in {**make(tokenizer, root), "long": make_long(tokenizer, root)}.items():
        text = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
        (PROMPTS / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{name}: {len(prompts)} prompts from Python {platform.python_version()}'s standard library")


if __name__ == "__main__":
    main()
