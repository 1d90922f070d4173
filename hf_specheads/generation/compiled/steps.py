"""Steps of a round, each compiled as one graph per shape and called without guards within a call.

The code of a step comes from an earlier process if it could be kept ([`kept`]), otherwise from torch's compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from transformers.utils import logging

from ...errors import UnsupportedGenerationError
from .guards import GUARD_HOOKS, let_go_at_exit, own_copy, quick_compiler, without_guards
from .kept import KeptSteps, keeps

logger = logging.get_logger(__name__)

# Most graphs that one step of one pair may have: one per batch size, capacity and draft tree.
MOST_GRAPHS = 64
TOO_MANY = (
    f"`heads.compiled` has met {MOST_GRAPHS} different shapes of rounds; further ones run uncompiled. Calls of "
    "similar batch size, length and draft tree share their graphs."
)
CHANGES_TOO_OFTEN = (
    "what `heads.compiled` compiles changes from call to call (for example by hooks that come and go) and was "
    "compiled again too often: from now on it runs uncompiled."
)


class CompiledSteps:
    """The compiled steps of one pair of target and draft head.

    Args:
        options: Options of `torch.compile`.
        steps: The steps: functions defined at module level.
        device: Device of the pair, a CPU by default.

    Attributes:
        compiles: Whether a step met new shapes, and had to be compiled, since this was last set to `False`.
        calls: Number of calls that have begun.
        kept: Code that other processes find as well; `None` where nothing can be kept.
    """

    def __init__(self, options: dict[str, Any], steps: Iterable[Callable], device: torch.device | None = None):
        self.options = options
        self.compiles, self.calls = False, 0
        self.kept = KeptSteps(options) if keeps(options, device or torch.device("cpu")) else None
        self._steps: dict[tuple, tuple[Callable, Callable]] = {}
        self._known_to_hold: dict[tuple, Callable | None] = {}
        let_go_at_exit(self, self._steps, self._known_to_hold, *([self.kept.codes] if self.kept else []))
        self._shapes: dict[Callable, set[tuple]] = {step: set() for step in steps}

    def begin_call(self) -> None:
        """Begins a call. The target, the draft head and the process may have changed since the last one, so guards are
        evaluated again."""
        self.calls += 1
        self._known_to_hold.clear()

    def begin_round(self) -> None:
        """Begins a round, in which no step has met new shapes yet."""
        self.compiles = False

    def _call(self, step: Callable, shape: tuple, *args: Any, of: int | None = None) -> Any:
        """Runs a step, compiled for arguments of this shape.

        Args:
            step: One of the steps.
            shape: Everything that makes graphs of the step differ.
            args: Arguments of the step.
            of: Number of the module it is given, if several modules that are alike share the graph.
        """
        if (unguarded := self._known_to_hold.get((step, shape, of))) is not None:
            return unguarded(*args)
        known = self._shapes[step]
        if shape not in known:
            if len(known) >= MOST_GRAPHS:
                logger.warning_once(TOO_MANY)
                return step(*args)
            known.add(shape)
            self.compiles = True
        try:
            kept = None if self.kept is None else self.kept.get(step, shape, args)
            result, code = self._guarded(step, shape, args) if kept is None else (kept(*args), kept)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            logger.warning_once(CHANGES_TOO_OFTEN)
            self._steps[step, shape] = step, step
            result, code = step(*args), step
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise UnsupportedGenerationError(
                f"`heads.compiled` compiles rounds whole, which torch.compile cannot do for this pair ({reason}); set "
                "`heads.compiled = False`."
            ) from error
        self._known_to_hold[step, shape, of] = code
        return result

    def _guarded(self, step: Callable, shape: tuple, args: tuple) -> tuple[Any, Callable | None]:
        """Runs a step that torch's compiler keeps in this process; returns its result and its code without guards."""
        if (step, shape) not in self._steps:
            # Each shape gets a code object of its own: the compiler checks the guards of all graphs of one in turn.
            own = own_copy(step)
            self._steps[step, shape] = own, torch.compile(own, **self.options)
        own, compiled = self._steps[step, shape]
        with torch._dynamo.config.patch(GUARD_HOOKS), quick_compiler() if self.compiles else nullcontext():
            result = compiled(*args)
        return result, without_guards(own)
