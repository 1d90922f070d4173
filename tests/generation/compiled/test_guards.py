"""Work that is skipped while the compiler runs, and restored afterwards."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from torch._dynamo import symbolic_convert

from hf_specheads.generation.compiled.guards import no_collections, no_names_of_lines, quick_compiler


def lines_looked_up(monkeypatch: pytest.MonkeyPatch, context) -> list[str]:
    """Returns the files for whose lines the compiler looks up the function name while it traces something new."""
    asked: list[str] = []
    real = symbolic_convert.get_funcname
    with monkeypatch.context() as patch:
        patch.setattr(symbolic_convert, "get_funcname", lambda *line: asked.append(line[0]) or real(*line))
        wrapped = symbolic_convert.get_funcname
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
        with context():
            assert torch.equal(compiled(torch.ones(2)), torch.ones(2).sin() + 1)
        assert symbolic_convert.get_funcname is wrapped
    return asked


def test_no_line_is_looked_up_for_a_log_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_looked_up(monkeypatch, quick_compiler) == []


@pytest.mark.parametrize("log", ["trace_call_log", "trace_source_log"])
def test_a_log_that_is_on_gets_its_lines(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getattr(symbolic_convert, log), "isEnabledFor", lambda level: level >= logging.DEBUG)
    assert __file__ in lines_looked_up(monkeypatch, no_names_of_lines)


def test_within_another_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilations of two threads overlap: the thread that began first restores torch's own function, and the other
    changes nothing."""
    real = symbolic_convert.get_funcname
    first, second = no_names_of_lines(), no_names_of_lines()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert symbolic_convert.get_funcname is real
    second.__exit__(None, None, None)
    assert symbolic_convert.get_funcname is real


def test_another_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(symbolic_convert, "get_funcname")
    with no_names_of_lines():
        assert not hasattr(symbolic_convert, "get_funcname")


@pytest.mark.parametrize("on", [True, False])
def test_collections_are_as_they_were(on: bool) -> None:
    was_on = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with no_collections():
            assert not gc.isenabled()
        assert gc.isenabled() == on
    finally:
        (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize("on", [True, False])
def test_collections_begin_again_when_nobody_minds_any_more(on: bool) -> None:
    """Compilations of two threads overlap: the thread that ends first does not switch collections on for the other."""
    was_on = gc.isenabled()
    (gc.enable if on else gc.disable)()
    first, second = no_collections(), no_collections()
    try:
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not gc.isenabled()
        second.__exit__(None, None, None)
        assert gc.isenabled() == on
    finally:
        (gc.enable if was_on else gc.disable)()


def test_the_compiler_collects_nothing_of_its_own_accord() -> None:
    """torch collects garbage after every compilation, even if collections are switched off."""
    collected: list[str] = []

    def note(phase: str, info: dict) -> None:
        if not gc.isenabled():
            collected.append(phase)

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.cos() - 1, backend="eager")
    gc.callbacks.append(note)
    try:
        with quick_compiler():
            compiled(torch.ones(2))
    finally:
        gc.callbacks.remove(note)
    assert collected == []
