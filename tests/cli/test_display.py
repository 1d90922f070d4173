"""Marked text and tables."""

from __future__ import annotations

import io

from hf_specheads.cli.display import marked_text, number, pos_acc_text, spans, table, use_colour


def decode(ids: list[int]) -> str:
    return "".join(chr(ord("a") + i) for i in ids)


def test_spans_cover_every_token() -> None:
    """First the prefill's token; then per round the accepted ones and one of the target's own."""
    assert spans([(1, 0), (3, 2), (1, 0), (3, 2)]) == [
        (0, 1, False), (1, 3, True), (3, 4, False), (4, 5, False), (5, 7, True), (7, 8, False),
    ]  # fmt: skip
    assert spans([(1, 0), (2, 2)]) == [(0, 1, False), (1, 3, True)]  # stopped inside the accepted run
    assert spans([]) == []


def test_marked_text() -> None:
    assert marked_text([0, 1, 2, 3, 4], [(1, 0), (3, 2), (1, 0)], decode, colour=False) == "a⟦bc⟧de"
    assert marked_text([0, 1, 2], [(1, 0), (2, 1)], decode, colour=True) == "a\x1b[32mb\x1b[0mc"
    assert marked_text([], [], decode, colour=False) == ""


def test_characters_of_several_tokens_stay_whole() -> None:
    pieces = [b"x", "é".encode()[:1], "é".encode()[1:], b"y"]

    def decode_bytes(ids: list[int]) -> str:
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    assert marked_text([0, 1, 2, 3], [(1, 0), (2, 1), (1, 0)], decode_bytes, colour=False) == "xéy"
    assert marked_text([0, 1, 2, 3], [(1, 0), (3, 2)], decode_bytes, colour=False) == "x⟦é⟧y"


def test_tables_and_numbers() -> None:
    assert table(("name", "n"), [("long name", "1"), ("x", "22")]) == (
        "name        n\n-------------\nlong name   1\nx          22"
    )
    assert number(None) == "-" and number(1.239, 2, "x") == "1.24x"
    assert pos_acc_text([0.5, 1.0]) == "1: 0.50  2: 1.00" and pos_acc_text([]) == "-"


def test_colour_only_on_terminals(monkeypatch) -> None:
    assert not use_colour(io.StringIO())
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert use_colour(terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_colour(terminal)
