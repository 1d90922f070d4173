"""Documents tell the truth: README code runs or names what exists, public names are documented, words are ours."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
from pathlib import Path

import pytest
from PIL import Image

import hf_specheads
import hf_specheads.trainer
from benchmarks import __main__ as runner
from benchmarks import figure
from hf_specheads.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *PAGES]
# Ambiguous words the vocabulary rules out, and traces of the machine a file was written on.
BANNED = (r"\baccept length\b", r"\bacceptance rate\b", r"(?<![\w.])/(tmp|work|root)/")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", code_blocks("python"))
def test_python_blocks_use_what_exists(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("hf_specheads"):
            module = hf_specheads.trainer if node.module.endswith("trainer") else hf_specheads
            assert all(hasattr(module, alias.name) for alias in node.names)


def test_the_first_screen() -> None:
    """Claim, what has not been run, and the whole quickstart; the README stays short."""
    lines = README.splitlines()
    assert len(lines) <= 200
    first = "\n".join(lines[:35])
    assert "Not run yet" in first and "assistant_model=heads" in first and first.count("```") == 4


def test_the_pictures_are_of_the_committed_results() -> None:
    assert f"]({figure.PICTURE.relative_to(ROOT)})" in README
    assert not figure.redraws(), "run `python -m benchmarks --render`"


def test_pictures_of_other_results_are_drawn_again(tmp_path: Path, monkeypatch, capsys) -> None:
    """What a measurement makes stale is named by `--check` and mended by `--render`, like its table."""
    path = tmp_path / "accepted.png"
    older = figure.read_results()
    older["batch"]["provenance"]["commit"] = "0" * 40
    figure.draw(path, older)
    monkeypatch.setattr(figure, "PICTURES", {path: figure.PICTURES[figure.PICTURE]})
    monkeypatch.setattr(runner, "rendered", lambda *_: {})  # a test writes none of the repository's files
    assert runner.main(["--check"]) == 1 and f"stale: {path}" in capsys.readouterr().out
    assert runner.main(["--render"]) == 0 and f"written: {path}" in capsys.readouterr().out
    assert runner.main(["--check"]) == 0


def test_the_picture_shows_the_results(tmp_path: Path) -> None:
    results = figure.read_results()
    figure.draw(tmp_path / "same.png", results)
    results["batch"]["batch_sizes"]["8"]["eagle"] = {"speed_up": 1.0, "speed_up_range": [1.0, 1.0]}
    figure.draw(tmp_path / "other.png", results)
    same, other = (Image.open(tmp_path / f"{name}.png").tobytes() for name in ("same", "other"))
    assert same != other


def test_commands_and_make_targets_exist() -> None:
    shell = "\n".join(code_blocks("bash"))
    assert set(re.findall(r"^specheads (\w+)", shell, flags=re.MULTILINE)) == set(COMMANDS)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", shell, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_the_quickstart_runs(target, poss_heads, tokenizer, tmp_path: Path) -> None:
    """As written, but for the names of the models."""
    for model in (target, tokenizer):
        model.save_pretrained(tmp_path / "target")
    poss_heads.save_pretrained(tmp_path / "heads")
    code = next(block for block in code_blocks("python") if "load_heads(" in block and "generate" in block)
    code = re.sub(r'^name = ".*"$', f"name = {str(tmp_path / 'target')!r}", code, flags=re.MULTILINE)
    code = re.sub(r'load_heads\(".*?"\)', f"load_heads({str(tmp_path / 'heads')!r})", code)
    code = code.replace('device_map="auto"', 'device_map="cpu"').replace("max_new_tokens=256", "max_new_tokens=9")
    code = code.replace("The three laws of robotics are", "w5 w6 w7")
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["out"].shape[1] == 3 + 9
    assert names["heads"].last_stats.acceptance_length >= 1


@pytest.mark.parametrize("name", DOCUMENTS)
def test_local_links(name: str) -> None:
    """Files that are linked exist, and so do the headings."""
    for link in re.findall(r"\]\((?!https?://)([^)]+)\)", (ROOT / name).read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        linked = (ROOT / name).parent / path if path else ROOT / name
        assert linked.exists(), f"{name} links to {link}"
        headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), flags=re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, link


@pytest.mark.parametrize("package", [hf_specheads, hf_specheads.trainer], ids=lambda package: package.__name__)
def test_public_names_are_documented(package) -> None:
    for name in package.__all__:
        public = getattr(package, name)
        if inspect.isclass(public) or inspect.isfunction(public):
            assert inspect.getdoc(public), name


def test_words() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix not in (".py", ".md", ".yaml", ".toml") or not path.exists() or path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8")
        for pattern in BANNED:
            assert not (match := re.search(pattern, text)), f"{name}: {match[0]!r}"


# ---------------------------------------------------------------------- numbers
# What a measurement looks like in prose: ratios, tau, shares, times, sizes of memory, throughputs, small differences.
MEASURED = re.compile(
    r"\d+(?:\.\d+)?x\b|\btau(?: of| is| below| above)?\s+\d|\d[\d.]*(?: to \d[\d.]*)?\s?%"
    r"|\b\d+(?:\.\d+)?e-\d+"
    r"|\d[\d.]*\s(?:tokens/s|ms|s|seconds|minutes|hours|MB|GB|TFLOP)\b"
    r"|\d\s(?:times|per cent) (?:as|faster|slower|of)\b"
)
RENDERED = r"<!-- (results|table|value)[: ].*?<!-- (?:/\1|end \1?)[^>]*?-->|<!-- table .*?<!-- end .*?-->"
RENDERED_WHOLE = ("docs/figures.md",)  # by `specheads figures --page`
# Rules of the code, tolerances of tests, and facts of others: sentences that hold without a measurement.
NOT_MEASURED = (
    "Trials may lose 2 % of the time, 0.8 % where plain steps are best",
    "Gradients equal those of dense masks to 1e-5.",
    "less than 95% of the favourites stay",
    "of trees within 2 % of it the smallest",
    "differ by 1e-6 relative to values of 5",
)


def measured_in_prose(text: str) -> list[str]:
    """Measured numbers that no result file renders, each with the words around it."""
    text = re.sub(RENDERED, "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    text = " ".join(" ".join(line for line in text.splitlines() if not line.startswith("|")).split())
    for sentence in NOT_MEASURED:
        text = text.replace(sentence, "")
    return [text[max(0, found.start() - 60) : found.end() + 30] for found in MEASURED.finditer(text)]


@pytest.mark.parametrize("name", [*(n for n in DOCUMENTS if n not in RENDERED_WHOLE), "model_cards/README.md"])
def test_measured_numbers_come_from_results(name: str) -> None:
    """`python -m benchmarks --render` fills in `<!-- value:result.path:.2f -->1.23<!-- /value -->`, or a table."""
    assert not measured_in_prose((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "claim",
    ["contexts gain 2.0x to 2.2x", "it has tau 4.2 there", "tau\nof 4",
     "keeps 98.8 to 99.6% of the rows", "takes 45 s", "at 310 tokens/s",
     "at most 1.5e-05 of a logit", "needs 12 MB", "is 3 times as fast", "saves 40 %"],
)  # fmt: skip
def test_numbers_in_prose_are_found(claim: str) -> None:
    assert measured_in_prose(f"Some words, and it {claim}, they say.")
    rendered = "It is <!-- value:a.b:.2f -->1.23x<!-- /value --> so, `depth 4 %` too.\n| 1.2x |\n"
    assert not measured_in_prose(rendered)


def test_sentences_that_are_no_measurements_are_still_there() -> None:
    """An allowance for a sentence that is gone would let another number in."""
    documents = " ".join(" ".join((ROOT / name).read_text(encoding="utf-8").split()) for name in DOCUMENTS)
    assert not [sentence for sentence in NOT_MEASURED if sentence not in documents]
