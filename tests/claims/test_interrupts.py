"""Ctrl-C at any line of a round: the cache comes back in the state of plain decoding at the last streamed token, and
the next call works."""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from types import FrameType
from typing import Any

import pytest
from support.faults import At, FaultyStreamer, assert_same_contents
from support.scenes import Scene

# Modules in which a round changes its state.
STATE = ("/cache/", "/generation/loop.py", "/generation/sequences.py", "/generation/committed.py", "/metrics.py")
# The state cannot be restored after an interrupt while the cache is given back, or while transformers removes rows
# from its own layers, one layer after the other.
NOT_WHOLE = {"close", "give_back", "_drop_rejected"}
Line = tuple[str, int]


def names_of_callers(frame: FrameType | None) -> set[str]:
    names = set()
    while frame is not None and "/hf_specheads/" in frame.f_code.co_filename:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


class Interrupt:
    """Raises KeyboardInterrupt at the k-th execution of a line. With `None` it counts the executions of all lines."""

    def __init__(self, line: Line | None = None, k: int = 0):
        self.wanted, self.k = line, k
        self.counts: dict[Line, int] = defaultdict(int)
        self.raised = False

    def __enter__(self) -> Interrupt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if "/hf_specheads/" not in name or not any(part in name for part in STATE):
            return None
        return None if NOT_WHOLE & names_of_callers(frame) else self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "line" or self.raised:
            return self._line
        line = (frame.f_code.co_filename, frame.f_lineno)
        self.counts[line] += 1
        if line == self.wanted and self.counts[line] == self.k:
            self.raised = True
            raise KeyboardInterrupt
        return self._line


def interrupted_at(scene: Scene, line: Line, k: int) -> None:
    scene.attempt = copy.deepcopy(scene.cache)
    streamer, interrupt = FaultyStreamer(At()), Interrupt(line, k)
    with pytest.raises(KeyboardInterrupt), interrupt:
        scene.call(assistant_model=scene.heads, streamer=streamer)
    held, prompt_length = scene.attempt.get_seq_length(), scene.ids.shape[1]
    if held < prompt_length:
        assert_same_contents(scene.attempt, scene.cache)
        return
    # The cache holds one more token if the interrupt came in place of a `put`, as in plain decoding.
    assert held - max(len(streamer.tokens) - 1, prompt_length) in (0, 1)
    assert_same_contents(scene.attempt, scene.plain_cache(held))


def every_nth_line(family: str, step: int) -> int:
    scene, counting = Scene(family, 30), Interrupt()
    scene.attempt = copy.deepcopy(scene.cache)
    with counting:
        scene.call(assistant_model=scene.heads, streamer=FaultyStreamer(At()))
    lines = list(counting.counts.items())
    bad = []
    for index, (line, times) in enumerate(lines[::step]):
        try:
            interrupted_at(scene, line, 1 + index % times)
        except AssertionError as error:
            bad.append((line, 1 + index % times, str(error).partition("\n")[0]))
    assert not bad
    scene.check_next_call()
    return len(lines)


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["bloom", "mistral", "lfm2"])
def test_ctrl_c_at_any_line(family, step):
    assert every_nth_line(family, step) > 60
