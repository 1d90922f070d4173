"""Published suites of prompts, by name: from the Hub through `datasets`, from a folder that mirrors it, or our own.

Prompts are formatted as in the papers on draft heads of 2026: the first turn of every entry, a request for a boxed
answer after tasks of mathematics, a sentence and a code fence around HumanEval's stubs. If the target has a chat
template, it is applied.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..texts import Text, chat_token_ids

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
HUMANEVAL = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
OURS = "ours"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Suite:
    """Source of a suite, and the form of its prompts.

    Attributes:
        repository: Hub id of the data set, or the URL of a file.
        config, split: Configuration and split of the data set.
        prompt: Function that makes the text of the first turn from a row.
        category: Function that returns the category of a row; `None` if the suite has no categories.
    """

    repository: str
    config: str | None
    split: str
    prompt: Callable[[Row], str]
    category: Callable[[Row], str] | None = None


def _first_turn(row: Row) -> str:
    turns = row.get("turns") or row.get("prompt")
    return turns if isinstance(turns, str) else turns[0]


def _alpaca(row: Row) -> str:
    return row["instruction"] + (f"\n\nInput:\n{row['input']}" if row.get("input") else "")


SUITES = {
    "mt_bench": Suite("HuggingFaceH4/mt_bench_prompts", None, "train", _first_turn, lambda row: row["category"]),
    "humaneval": Suite("openai/openai_humaneval", None, "test", lambda row: HUMANEVAL.format(row["prompt"])),
    "gsm8k": Suite("openai/gsm8k", "main", "test", lambda row: row["question"] + BOXED),
    "math500": Suite("HuggingFaceH4/MATH-500", None, "test", lambda row: row["problem"] + BOXED),
    "mbpp": Suite("google-research-datasets/mbpp", "full", "test", lambda row: row["text"]),
    "alpaca": Suite("tatsu-lab/alpaca", None, "train", _alpaca),
    # Spec-Bench is a file in a GitHub repository, not a data set on the Hub.
    "spec_bench": Suite("https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
                        None, "train", _first_turn, lambda row: row["category"]),
}  # fmt: skip


@dataclass(frozen=True)
class SuitePrompt:
    """One prompt of a suite: the name of the suite, a category, and the text."""

    suite: str
    category: str
    text: str


def load_suite(name: str, limit: int | None = None, mirror: Path | None = None) -> list[SuitePrompt]:
    """Loads the prompts of a suite.

    Args:
        name: A key of [`SUITES`], `"ours"`, or a `.jsonl` file with `turns` (a list) or `prompt`, and optionally
            `category`.
        limit: Maximum number of prompts; they are drawn with a fixed seed and keep their order.
        mirror: Folder that holds the data sets under their Hub ids, used instead of the Hub.

    Raises:
        ValueError: If the suite is unknown, or an entry lacks a field.
        ImportError: If `datasets` is not installed, for suites on the Hub.
    """
    if name == OURS or name.endswith(".jsonl"):
        path = Path(__file__).with_name("ours.jsonl") if name == OURS else Path(name)
        rows: list[Any] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        suite = Suite(str(path), None, "", _first_turn, lambda row: row.get("category") or path.stem)
    elif name in SUITES:
        suite = SUITES[name]
        rows = _rows(suite, mirror)
    else:
        raise ValueError(f"unknown suite {name!r}; expected some of {[OURS, *SUITES]}, or a .jsonl file.")
    if limit is not None and limit < len(rows):
        chosen = sorted(random.Random(0).sample(range(len(rows)), limit))
        rows = [rows[index] for index in chosen]
    return [_prompt(name, suite, row, number) for number, row in enumerate(rows)]


def _rows(suite: Suite, mirror: Path | None) -> list[Any]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            "suites on the Hub are read with `datasets`; install it (`pip install datasets`), or use --suite ours."
        ) from error
    if "://" in suite.repository:
        file = suite.repository if mirror is None else str(mirror / suite.repository.rpartition("/")[2])
        return list(load_dataset("json", data_files=file, split="train"))
    if mirror is None:
        return list(load_dataset(suite.repository, suite.config, split=suite.split))
    folder = mirror / suite.repository / (suite.config or "")
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is not a folder; a mirror holds data sets under their Hub ids and configs.")
    return list(load_dataset(str(folder), split=suite.split))


def _prompt(name: str, suite: Suite, row: Row, number: int) -> SuitePrompt:
    try:
        text = suite.prompt(row)
        return SuitePrompt(Path(name).stem, suite.category(row) if suite.category else name, text)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"entry {number} of suite {name!r} lacks a field that its prompt needs ({error}); it has {sorted(row)}."
        ) from error


def prompts_for(prompts: list[SuitePrompt], tokenizer: Any, thinking: bool | None = None) -> list[Text]:
    """Converts prompts to inputs of the target: token ids of a user's message in its chat template, or plain texts.

    Texts are used if the tokenizer has no chat template.

    Args:
        prompts: Prompts of suites.
        tokenizer: Tokenizer of the target.
        thinking: `enable_thinking` of the chat template; `None` for the template's default.

    Raises:
        ValueError: If `thinking` is given but the template does not support it.
    """
    template = getattr(tokenizer, "chat_template", None)
    if thinking is not None and "enable_thinking" not in str(template or ""):
        raise ValueError(
            "the target's chat template has no `enable_thinking`, so thinking can be neither switched on nor off; "
            "leave --thinking out."
        )
    if not template:
        return [one.text for one in prompts]
    options = {} if thinking is None else {"enable_thinking": thinking}
    return [chat_token_ids([{"role": "user", "content": one.text}], tokenizer, **options) for one in prompts]
