"""Steps of a round that are compiled whole, once for every shape, and called without guards within a call.

A step's code comes from an earlier process where it could be kept ([`kept`]), else from torch's compiler.
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

# Graphs of one step of one pair that may live side by side: one per batch size, capacity and draft tree.
MOST_GRAPHS = 64
TOO_MANY = (
    f"`heads.compiled` has met {MOST_GRAPHS} different shapes of rounds; further ones run uncompiled. Calls of "
    "similar batch size, length and draft tree share their graphs."
)
CHANGES_TOO_OFTEN = (
    "what `heads.compiled` compiles is another in every call (hooks that come and go, say), and was compiled anew too "
    "often: from now on it runs uncompiled."
)


class CompiledSteps:
    """Of one pair.

    Args:
        options: Of `torch.compile`.
        steps: Functions of modules.
        device: Of the pair, a CPU by default.

    Attributes:
        compiles: Whether a step since this was last set to `False` met shapes it had not met before, and so had to be
            compiled.
        calls: That have begun.
        kept: The code that other processes find as well; `None` where nothing can be kept.
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
        """From here on the target, the heads and the process may be others than they were."""
        self.calls += 1
        self._known_to_hold.clear()

    def begin_round(self) -> None:
        """No step has met new shapes in this round."""
        self.compiles = False

    def _call(self, step: Callable, shape: tuple, *args: Any, of: int | None = None) -> Any:
        """A step whose arguments have this shape.

        Args:
            step: One of those.
            shape: Whatever makes graphs differ.
            args: Of the step.
            of: Which of several modules alike it is given.
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
        """What a step returns that torch's compiler keeps itself, and its code without guards."""
        if (step, shape) not in self._steps:
            # A code object each: the compiler asks the guards of all graphs of one, in turn.
            own = own_copy(step)
            self._steps[step, shape] = own, torch.compile(own, **self.options)
        own, compiled = self._steps[step, shape]
        with torch._dynamo.config.patch(GUARD_HOOKS), quick_compiler() if self.compiles else nullcontext():
            result = compiled(*args)
        return result, without_guards(own)
