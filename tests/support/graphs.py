"""A backend of `torch.compile` that imposes the constraints of replayed CUDA graphs on compiled steps, on the CPU.

- Outputs of a step lie in the graph's own memory. The next step overwrites them once its beginning is marked.
- A graph may only write into tensors whose address is marked as fixed. If such a tensor lies elsewhere, the graph is
  captured anew.

The backend does not test kernels or streams.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig

from hf_specheads.generation.compiled.rounds import CompiledRounds

GARBAGE = {torch.bool: True}


class ReplayedGraphs:
    """Tracks the graphs that calls of a target compile from now on.

    Attributes:
        captures: Number of captures: one per graph, and one more whenever a tensor that the graph writes into has
            moved.
        loose: Shapes of the caller's tensors that a graph wrote into although they were not marked as fixed.
    """

    def __init__(self, target: Any, heads: Any, patch: pytest.MonkeyPatch):
        torch._dynamo.reset()
        self.captures = 0
        self.loose: list[tuple[int, ...]] = []
        self._live: list[torch.Tensor] = []
        heads.compiled = True

        def backend(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
            # a function, because `generate` deep-copies its config and would copy the object of a bound method
            return self._compile(graph, inputs)

        target.generation_config.compile_config = CompileConfig(backend=backend, mode="reduce-overhead")
        patch.setattr(torch.compiler, "cudagraph_mark_step_begin", self._overwrite)
        patch.setattr("hf_specheads.generation.ahead.QUEUES", ("cpu", "cuda"))
        # CPU-only drafting of links is off, as where graphs are replayed
        patch.setattr(CompiledRounds, "drafts_links", lambda *_: False)

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        known: set[tuple[int, ...]] = set()
        fixed = [getattr(each, "_dynamo_static_input_type", None) is not None for each in inputs]

        def replay(*given: Any) -> Any:
            versions = [each._version if isinstance(each, torch.Tensor) else 0 for each in given]
            outputs = graph.forward(*given)
            written = [index for index, each in enumerate(given)
                       if isinstance(each, torch.Tensor) and each._version != versions[index]]  # fmt: skip
            self.loose += [tuple(given[index].shape) for index in written if not fixed[index]]
            addresses = tuple(given[index].data_ptr() for index in written)
            if addresses not in known:
                self.captures += 1
                known.add(addresses)
            return self._owned(outputs, given)

        return replay

    def _owned(self, outputs: Any, given: tuple) -> tuple:
        """Copies outputs into the graph's memory. Views of inputs stay views."""
        theirs = {each.untyped_storage().data_ptr() for each in given if isinstance(each, torch.Tensor)}
        copies = []
        for each in outputs:
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in theirs:
                each = each.clone()
                self._live.append(each)
            copies.append(each)
        return tuple(copies)

    def _overwrite(self) -> None:
        """Begins a step: fills the outputs of earlier steps with garbage, as replayed graphs overwrite them."""
        for tensor in self._live:
            tensor.fill_(float("nan") if tensor.is_floating_point() else GARBAGE.get(tensor.dtype, -(10**9)))
        self._live.clear()
