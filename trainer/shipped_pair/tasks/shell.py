"""Shell commands with an explanation of their parts."""

import shlex
from collections.abc import Callable
from typing import Any

from .draw import Draw
from .example import Family, Written, chat, fenced
from .words import FIRST_NAMES, THINGS, TOPICS

ASKS = (
    "Which shell command can {task}? Explain its parts.",
    "I want to {task}. Give me the command and explain it.",
    "Shell: {task}. With an explanation, please.",
    "How do I {task} in the shell?",
    "Please {task} with one command, and say what each part does.",
    "Bash command to {task}, explained.",
    "On Linux, how can I {task}?",
    "Show me a command line to {task}. What do the parts mean?",
    "What do I type to {task}? Explain the options too.",
    "Write a command that can {task}, then explain.",
)
SUFFIXES = ("txt", "csv", "log", "json", "py", "md", "html", "xml")

Command = tuple[str, list[str], list[tuple[str, str]]]  # task, words of the command, (part, explanation) pairs


def _find(draw: Draw) -> Command:
    folder, suffix, days = f"{draw.word(TOPICS)}/{draw.word(THINGS)}s", draw.choice(SUFFIXES), draw.number(2, 60)
    words = ["find", folder, "-name", f"'*.{suffix}'", "-mtime", f"-{days}"]
    return f"find {suffix} files in {folder} changed in the last {days} days", words, [
        (f"find {folder}", f"searches in {folder}"),
        (f"-name '*.{suffix}'", f"keeps names that end in .{suffix}"),
        (f"-mtime -{days}", f"keeps files changed in the last {days} days"),
    ]  # fmt: skip


def _count(draw: Draw) -> Command:
    word, file = draw.word(FIRST_NAMES), f"{draw.word(TOPICS)}.{draw.choice(SUFFIXES)}"
    return f"count the lines of {file} with the word {word}", ["grep", "-c", "-w", word, file], [
        ("grep", f"searches for lines in {file}"),
        ("-c", "prints how many lines match"),
        (f"-w {word}", f"matches {word} as a whole word"),
    ]  # fmt: skip


def _pack(draw: Draw) -> Command:
    folder, archive = f"{draw.word(TOPICS)}s", f"{draw.word(THINGS)}.tar.gz"
    return f"pack the folder {folder} into {archive}", ["tar", "-c", "-z", "-f", archive, folder], [
        ("tar -c", "creates an archive"),
        ("-z", "compresses it with gzip"),
        (f"-f {archive}", f"writes it to {archive}"),
        (folder, "is the folder to pack"),
    ]  # fmt: skip


def _first(draw: Draw) -> Command:
    count, file = draw.number(5, 90), f"{draw.word(THINGS)}_{draw.word(TOPICS)}.{draw.choice(SUFFIXES)}"
    words = ["sort", "-r", "-n", file, "|", "head", "-n", str(count)]
    return f"show the {count} largest numbers of {file}", words, [
        ("sort -n", f"sorts the lines of {file} as numbers"),
        ("-r", "puts the largest first"),
        (f"head -n {count}", f"shows the first {count} lines"),
    ]  # fmt: skip


def _copy(draw: Draw) -> Command:
    source, target = f"{draw.word(TOPICS)}/{draw.word(THINGS)}s", f"{draw.word(FIRST_NAMES)}_copy"
    return f"copy the folder {source} to {target} and list the files", ["cp", "-r", "-v", source, target], [
        ("cp -r", f"copies {source} with all it contains"),
        ("-v", "lists every file that is copied"),
        (target, "is the name of the copy"),
    ]  # fmt: skip


def _replace(draw: Draw) -> Command:
    (old, new), file = draw.words(THINGS, 2), f"{draw.word(TOPICS)}.{draw.choice(SUFFIXES)}"
    return f"replace {old} by {new} everywhere in {file}", ["sed", "-i", f"'s/{old}/{new}/g'", file], [
        ("sed -i", f"changes {file} in place"),
        (f"s/{old}/{new}/", f"replaces {old} by {new}"),
        ("g", "replaces it everywhere in a line"),
    ]  # fmt: skip


def _size(draw: Draw) -> Command:
    folder, depth = f"{draw.word(TOPICS)}/{draw.word(FIRST_NAMES)}", draw.number(1, 4)
    return f"show the sizes of folders in {folder} up to depth {depth}", ["du", "-h", "-d", str(depth), folder], [
        (f"du {folder}", f"measures the folders in {folder}"),
        ("-h", "prints sizes that people can read"),
        (f"-d {depth}", f"goes down to depth {depth}"),
    ]  # fmt: skip


COMMANDS: tuple[Callable[[Draw], Command], ...] = (_find, _count, _pack, _first, _copy, _replace, _size)


def write(draw: Draw) -> Written:
    """Writes one command task; the answer explains each part."""
    task, words, parts = draw.choice(COMMANDS)(draw)
    question = draw.phrasing("ask", ASKS).format(task=task)
    explained = [f"- `{part}` {meaning}." for part, meaning in parts]
    answer = f"```sh\n{' '.join(words)}\n```\n" + "\n".join(explained)
    return Written(chat(question, answer), {"command": " ".join(words), "explained": explained})


def _parsed(command: str) -> list[tuple[str, list[tuple[str, ...]], list[str]]]:
    """Parses a pipe into commands: name, sorted options with their values, and other words in order.

    Raises:
        ValueError: for a command that a shell cannot parse, or that uses operators other than pipes.
    """
    found = []
    words = list(shlex.shlex(command, posix=True, punctuation_chars="|;&<>"))
    pipes = [index for index, word in enumerate(words) if set(word) <= set("|;&<>")]
    if any(words[index] != "|" for index in pipes):
        raise ValueError("only pipes join commands here")
    for start, end in zip([0, *(i + 1 for i in pipes)], [*pipes, len(words)], strict=True):
        name, *rest = words[start:end] or [""]
        found.append((name, *_options(name, rest)))
    return found


# Options that take a value. Bundled letters such as `-czf` are separated, except for `find`, which has no bundles.
VALUED = {"find": {"-name", "-mtime"}, "tar": {"-f"}, "head": {"-n"}, "du": {"-d"}}


def _options(name: str, words: list[str]) -> tuple[list[tuple[str, ...]], list[str]]:
    valued = VALUED.get(name, set())
    options: list[tuple[str, ...]] = []
    others: list[str] = []
    waiting = iter(words)
    for word in waiting:
        if word in valued:
            options.append((word, next(waiting, "")))
        elif word.startswith("-") and name != "find":
            options += [(f"-{letter}",) for letter in word[1:]]
        else:
            others.append(word)
    return sorted(options), others


def problem(facts: dict[str, Any], answer: str) -> str | None:
    """Parses the command as a shell does, with options in any order, and compares the explanation line by line."""
    command = fenced(answer, "sh")
    if command is None or not answer.startswith("```"):
        return "the answer does not begin with exactly one fenced block of sh."
    try:
        same = _parsed(command) == _parsed(facts["command"])
    except ValueError as error:
        return f"a shell cannot read {command!r}: {error}."
    if not same:
        return f"the command is {command!r}, not {facts['command']!r}."
    explained = answer.rpartition("```")[2].strip().splitlines()
    return None if explained == facts["explained"] else f"the explanation is {explained}, not {facts['explained']}."


FAMILY = Family("shell command", write, problem)
