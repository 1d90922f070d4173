"""Tables from results, and documents kept in step with them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import __main__ as runner
from benchmarks import results
from benchmarks.results import (
    RESULTS,
    ROOT,
    documents,
    draft_tree,
    hash_of,
    identical,
    markdown_table,
    pos_acc,
    provenance_of,
    render,
    same_text,
    texts_agree,
    value_at,
)

PROVENANCE = {
    "command": "python -m benchmarks stream", "commit": "0123456789abcdef", "uncommitted_changes": True,
    "date": "2026-01-02", "processor": "a processor", "threads": 2,
    "versions": {"torch": "2", "transformers": "5", "python": "3", "hf-specheads": "0"},
}  # fmt: skip
CHAIN = {"kind": "chain", "depth": 3, "top_k": 1, "total_tokens": 4}
RESULT = {
    "provenance": PROVENANCE, "dtype": "float32", "num_prompts": 9, "repeats": 3, "max_batch": 2, "limits": [16, 96],
    "sides": {"poss3": {"tokens_per_second": 123.4, "speed_up": 1.55, "speed_up_range": [1.5, 1.7],
                        "identical": True}},
}  # fmt: skip
BLOCK = "<!-- results:stream -->\n{}<!-- /results:stream -->\n"
NUMBER = "<!-- value:stream.sides.poss3.speed_up:.1f -->{}<!-- /value -->"


# ---------------------------------------------------------------------- pieces
def test_markdown_table():
    assert markdown_table(("a", "b"), [("x", "1")]) == "| a | b |\n|---|---:|\n| x | 1 |\n"


def test_pos_acc():
    assert pos_acc([1.0, 0.998, 0.05, 0.714]) == "1. 1. .05 .71"
    assert pos_acc([]) == pos_acc(None) == "-"


def test_draft_tree():
    assert draft_tree(CHAIN) == "chain of 3"
    assert draft_tree({**CHAIN, "kind": "dynamic", "top_k": 2}) == "depth 3, top-k 2, 4 nodes"


def test_one_text_that_differs_is_found_however_deep():
    sides = {"plain": {"identical": True}, "eagle": {"identical": True, "rows": {"x": {"identical": False}}}}
    assert not identical({"sides": sides})
    assert identical({"sides": {"plain": sides["plain"]}, "texts": ["identical"]})
    assert not identical({"measured": [{"sides": sides}]}) and not identical([sides["eagle"]])


def test_texts_may_differ_in_fewer_bits():
    sides = {"eagle": {"identical": False}}
    assert texts_agree({"dtype": "bfloat16", "sides": sides})
    assert not texts_agree({"dtype": "float32", "sides": sides}) and not texts_agree({"sides": sides})


def test_where_texts_differ_ties_must_be_why():
    tie, bug = ({"identical": False, "differing": 2, "ties": ties} for ties in (2, 1))
    assert texts_agree({"dtype": "bfloat16", "sides": {"eagle": tie}})
    assert not texts_agree({"dtype": "bfloat16", "sides": {"eagle": tie, "medusa": bug}})
    assert not texts_agree({"dtype": "float32", "sides": {"eagle": tie}})
    assert same_text({"identical": True}, tie) == "up to ties"
    assert same_text(tie, bug) == same_text({"identical": False}) == "no" and same_text({"identical": True}) == "yes"


def test_a_result_is_rounded_as_its_file_holds_it():
    found = results.rounded({"a": [1.23456789, 7, True, None], "b": {3: (2.0, "1.23456789")}})
    assert found == {"a": [1.2346, 7, True, None], "b": {"3": [2.0, "1.23456789"]}}


# ---------------------------------------------------------------------- provenance
def test_a_table_says_where_it_comes_from():
    text = runner.table_of("stream", RESULT)
    assert "| poss3 | 123 | 1.55x (1.50-1.70) | yes |" in text
    assert "commit 0123456789+, 2026-01-02" in text
    assert "`python -m benchmarks stream`" in text


def test_results_name_no_folder_outside_the_repository():
    words = ["round", "--heads", str(ROOT / "model_cards" / "poss3"), "/away/heads/poss3", "eagle"]
    facts = provenance_of(words, ["hf_specheads"])
    assert facts["command"] == "python -m benchmarks round --heads model_cards/poss3 poss3 eagle"
    assert {"commit", "uncommitted_changes", "date", "processor", "threads", "versions", "accelerators"} <= set(facts)
    assert facts["sources"] == hash_of(["hf_specheads"])


def test_a_table_of_changed_code_is_marked():
    """A result without a hash was measured before there were any."""
    sources = ["hf_specheads", "hf_specheads/generation/streams"]
    remark = "earlier engine: `hf_specheads` or `hf_specheads/generation/streams` has changed since.\n"
    assert runner.table_of("stream", RESULT).endswith(remark)
    present = {**RESULT, "provenance": {**PROVENANCE, "sources": hash_of(sources)}}
    assert runner.table_of("stream", present).endswith("`python -m benchmarks stream`\n")
    before = {**RESULT, "provenance": {**PROVENANCE, "sources": "0" * 16}}
    assert runner.table_of("stream", before) == runner.table_of("stream", RESULT)


def test_the_hash_is_of_what_numbers_depend_on(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    engine, command = (
        tmp_path / "hf_specheads" / "generation" / "loop.py",
        tmp_path / "hf_specheads" / "cli" / "env.py",
    )
    for path in (engine, command):
        path.parent.mkdir(parents=True)
        path.write_text("1\n")
    before = hash_of(["hf_specheads"])
    command.write_text("2\n")
    assert hash_of(["hf_specheads"]) == before
    engine.write_text("2\n")
    changed = hash_of(["hf_specheads"])
    assert changed != before
    engine.rename(engine.with_name("rounds.py"))
    assert hash_of(["hf_specheads"]) == changed, "files that move are the files they were"
    engine.with_name("rounds.py").write_text('"""Says what 2 is."""\nfrom .elsewhere import three  # a comment\n\n2\n')
    assert hash_of(["hf_specheads"]) == changed
    kept = engine.parent / "compiled" / "kept.py"
    kept.parent.mkdir()
    kept.write_text("3\n")
    assert hash_of(["hf_specheads"]) == changed
    assert hash_of(["hf_specheads/generation/compiled"]) != hash_of(["hf_specheads/generation/verification"])


def test_a_result_belongs_to_the_measurement_it_is_named_after():
    for name, module in (("round", "round"), ("round_shape", "round"), ("assistant/speedup", "speedup")):
        assert runner.measurement_of(name) is runner.MEASUREMENTS[module]
    with pytest.raises(ValueError, match="'speed_up' is not the result of a measurement"):
        runner.measurement_of("speed_up")


# ---------------------------------------------------------------------- documents
def test_render_replaces_marked_parts_only():
    old, table = "old\n", "| table |\n"
    text = f"before\n{BLOCK.format(old)}{NUMBER.format('9.9')} times, <!-- a comment --> after\n"
    rendered = render(text, {"stream": RESULT}, {"stream": table})
    assert rendered == f"before\n{BLOCK.format(table)}{NUMBER.format('1.6')} times, <!-- a comment --> after\n"
    assert render(rendered, {"stream": RESULT}, {"stream": table}) == rendered


def test_keys_of_values_may_hold_spaces_and_dots():
    values = {"round": {"top 0.5": {"tau": 2.5}, "top 0": 1}, "list": [1, {"x": "text"}], "medusa2/speedup": {"n": 3}}
    assert value_at(values, "round.top 0.5.tau") == 2.5
    assert value_at(values, "round.top 0") == 1
    assert value_at(values, "list.1.x") == "text"
    assert render("<!-- value:medusa2/speedup.n --><!-- /value -->", values, {}) == (
        "<!-- value:medusa2/speedup.n -->3<!-- /value -->"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- results:stream -->\n", "needs a following"),
        (
            "<!-- results:nonsense -->\n<!-- /results:nonsense -->\n",
            r"unknown results \['nonsense'\], expected one",
        ),
        ("<!-- value:stream.max_batch -->9\n", "needs a following <!-- /value -->"),
        (
            "<!-- value:stream.nothing -->9<!-- /value -->",
            "does not name a value that can be shown: .*'nothing', expected one",
        ),
        ("<!-- value:stream.limits -->9<!-- /value -->", "the path ends at a list of 2 values"),
        ("<!-- value:stream.limits.7 -->9<!-- /value -->", "'7', expected one of \\['0', '1'\\]"),
        ("<!-- value:stream.dtype:.2f -->9<!-- /value -->", "Unknown format code 'f'"),
    ],
)
def test_render_refuses_broken_marks(text, message):
    with pytest.raises(ValueError, match=message):
        render(text, {"stream": RESULT}, {"stream": "| table |\n"})


@pytest.fixture
def repository(tmp_path: Path) -> list[str]:
    """Arguments of the runner for a folder of one result and a document that shows it, both rendered."""
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "stream.json").write_text(json.dumps(RESULT))
    (folder / "notes.json").write_text("{}")  # no result: it has no provenance
    (tmp_path / "README.md").write_text(f"{BLOCK.format('')}It is {NUMBER.format('')} times as fast.\n")
    words = ["--results", str(folder), "--documents", str(tmp_path / "README.md")]
    assert runner.main([*words, "--check"]) == 1
    assert runner.main([*words, "--render"]) == 0
    return words


def test_what_was_rendered_passes_the_check(repository, tmp_path, capsys):
    assert runner.main([*repository, "--check"]) == 0
    assert "| poss3 | 123 | 1.55x (1.50-1.70) | yes |" in (tmp_path / "README.md").read_text()
    assert "-->1.6<!-- /value --> times as fast" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("file", "old", "new", "stale"),
    [
        ("README.md", "1.55x", "1.75x", {"README.md"}),
        ("README.md", "-->1.6<", "-->1.8<", {"README.md"}),
        ("results/stream.md", "1.55x", "1.75x", {"stream.md"}),
        ("results/stream.json", "1.55", "1.75", {"README.md", "stream.md"}),
    ],
)
def test_the_check_fails_on_a_changed_number(repository, tmp_path, capsys, file, old, new, stale):
    path = tmp_path / file
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    capsys.readouterr()
    assert runner.main([*repository, "--check"]) == 1
    named = re.findall(r"stale: .*/(\S+)", capsys.readouterr().out)
    assert set(named) == stale
    assert runner.main([*repository, "--render"]) == 0
    assert runner.main([*repository, "--check"]) == 0


def test_nothing_to_do_is_an_error(capsys):
    with pytest.raises(SystemExit):
        runner.main([])
    assert "NAME of a measurement, --render or --check" in capsys.readouterr().err


def test_committed_tables_and_documents_are_what_the_committed_results_say():
    stale = [
        str(path.relative_to(ROOT))
        for path, text in runner.rendered(RESULTS, documents()).items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    assert not stale, "run `python -m benchmarks --render`"


@pytest.mark.parametrize("name", list(results.read(RESULTS)))
def test_a_committed_result_says_by_which_command_it_came_about(name):
    words = shlex.split(results.read(RESULTS)[name]["provenance"]["command"])
    assert words[:3] == ["python", "-m", "benchmarks"]
    assert runner.MEASUREMENTS[words[3]] is runner.measurement_of(name)
    args = runner.make_parser().parse_args(words[3:])
    assert name.rpartition("/")[2] == runner.result_name(words[3], args)


def test_every_refusal_of_a_family_is_explained() -> None:
    table = runner.table_of("families", results.read(RESULTS)["families"])
    numbers = {int(number) for number in re.findall(r"\((\d+)\)(?= \|)", table)}
    explained = {int(number) for number in re.findall(r"^(\d+)\. ", table, re.MULTILINE)}
    assert numbers and numbers <= explained


SOURCE = '''"""A module."""

import os  # of the system


class One:
    """A class.

    With more to say.
    """

    def path(self):  # nothing new
        """One line."""
        # A comment.
        return "# no comment", """not a docstring"""
'''


def test_words_about_code_run_nowhere() -> None:
    assert results.what_runs(SOURCE) == (
        'class One:\n    def path(self):\n        return "# no comment", """not a docstring"""'
    )
    other = SOURCE.replace("nothing new", "something new").replace("One line.", "Two lines.\n\n        Really.")
    assert other != SOURCE and results.what_runs(other) == results.what_runs(SOURCE)
    refusing = SOURCE.replace(
        "        # A comment.\n",
        """        if os:
            raise ValueError(
                "said differently"
            )
""",
    )
    otherwise = refusing.replace("said differently", "in other words").replace(
        "            )", "            ) from None"
    )
    assert otherwise != refusing and results.what_runs(otherwise) == results.what_runs(refusing)
    assert results.what_runs(refusing) != results.what_runs(SOURCE), "whether anything is raised counts"
    logging = SOURCE.replace("# A comment.", "logger.warning('a word')")
    assert results.what_runs(logging) == results.what_runs(SOURCE)
    elsewhere = SOURCE.replace("import os", "from elsewhere import os")
    assert elsewhere != SOURCE and results.what_runs(elsewhere) == results.what_runs(SOURCE)
    assert results.what_runs(SOURCE.replace("no comment", "comment")) != results.what_runs(SOURCE)
