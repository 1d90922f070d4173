"""The session of docs/checkpoints.md, command by command as written, against the local Hub."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

from support.hub.endpoint import WRITER, HubEndpoint

from hf_specheads.cli import main

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", DOCUMENT, flags=re.DOTALL)


def session(folder: Path) -> list[tuple[str, int, str]]:
    """Runs all blocks in a folder that looks like a checkout: each with its exit code and what it printed. Runs in the
    client's process, where torch is imported once and for all commands."""
    os.chdir(folder)
    names: dict = {}
    results = []
    for language, block in BLOCKS[1:]:
        for command in block.splitlines() if language == "bash" else [block]:
            printed, errors = io.StringIO(), io.StringIO()
            words, _, file = command.partition(" > ") if language == "bash" else (command, "", "")
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
                code = main(shlex.split(words)[1:]) if language == "bash" else exec(command, names)
            if file:
                Path(file).write_text(printed.getvalue(), encoding="utf-8")
            results.append((command, code or 0, printed.getvalue() + errors.getvalue()))
    return results


def test_the_session(hub: HubEndpoint, tmp_path: Path) -> None:
    for name in ("model_cards", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    results = hub.run(session, tmp_path)
    assert [(command, printed) for command, code, printed in results if code] == []
    printed = "\n".join(text for _, _, text in results)
    for words in ("from the name", '"identical": true', "pushed PossHead (poss) to", "def add(a, b):"):
        assert words in printed
    assert {"custom_generate/generate.py", "figures/pos_acc.png", "eval_results.json"} <= set(
        hub.files("lab/poss3-stdlib")
    )
    card = hub.files("lab/poss3-stdlib")["README.md"].decode()
    assert "| chats |" in card and "base_model" not in card  # `model_cards/target` looks like a Hub id and is none
    commands = [command for command, _, _ in results if command.startswith("specheads")]
    steps = ["export", "inspect", "convert", "inspect", "eval", "export", "push", "inspect", "generate"]
    assert [shlex.split(command)[1] for command in commands] == steps


def test_the_endpoint_is_started_as_it_says(hub: HubEndpoint) -> None:
    """The first block, which the session's process has been given already."""
    language, block = BLOCKS[0]
    start, export = block.splitlines()
    assert language == "bash" and start.split()[:2] == ["python", "tests/support/hub/endpoint.py"]
    given = dict(part.split("=", 1) for part in shlex.split(export)[1:])
    assert given["HF_ENDPOINT"].endswith(f":{start.split()[2]}") and given["HF_TOKEN"] == WRITER
    assert given.keys() <= hub.environment().keys()
