"""Ctrl-C at any line of a round: the cache comes back as plain decoding has it at the last token that was streamed,
and the next call works."""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from types import FrameType
from typing import Any

import pytest
from support.faults import At, FaultyStreamer, assert_same_contents
from support.scenes import Scene

# Where a round changes what it has. An interrupt of the giving back itself cannot be made good.
STATE = ("/cache/", "/generation/loop.py", "/generation/sequences.py", "/generation/committed.py", "/metrics.py")
ENDS = ("close", "give_back", "leave_room")
Line = tuple[str, int]


class Interrupt:
    """Raises KeyboardInterrupt where a line is executed for the k-th time; with `None` it counts them all."""

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
        if "/hf_specheads/" not in name or frame.f_code.co_name in ENDS or not any(part in name for part in STATE):
            return None
        return self._line

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
    assert held == max(len(streamer.tokens) - 1, prompt_length)
    assert_same_contents(scene.attempt, scene.plain_cache(held))


def every_nth_line(family: str, step: int) -> int:
    scene, counting = Scene(family, 30), Interrupt()
    scene.attempt = copy.deepcopy(scene.cache)
    with counting:
        scene.call(assistant_model=scene.heads, streamer=FaultyStreamer(At()))
    lines = list(counting.counts.items())
    for index, (line, times) in enumerate(lines[::step]):
        try:
            interrupted_at(scene, line, 1 + index % times)
        except AssertionError as error:
            raise AssertionError(f"interrupted at {line}, time {1 + index % times} of {times}") from error
    scene.check_next_call()
    return len(lines)


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["bloom", "mistral", "lfm2"])
def test_ctrl_c_at_any_line(family, step):
    assert every_nth_line(family, step) > 60
