"""What CUDA graphs ask of compiled steps, on the CPU: a backend of `torch.compile` that behaves as replayed graphs do.

- Outputs of a step lie in the graph's own memory: the next step, once its beginning was marked, writes over them.
- A graph writes only into tensors whose address it was told to be fixed; if they lie elsewhere it is captured anew.

It says nothing of kernels and streams.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig

from hf_specheads.generation.compiled.rounds import CompiledRounds

GARBAGE = {torch.bool: True}


class ReplayedGraphs:
    """The graphs that calls of a target compile from now on.

    Attributes:
        captures: How often a graph had to be captured: once, and again when a tensor it writes into lies elsewhere.
        loose: Tensors of the caller that a graph wrote into although nobody said that they stay where they are.
    """

    def __init__(self, target: Any, heads: Any, patch: pytest.MonkeyPatch):
        torch._dynamo.reset()
        self.captures = 0
        self.loose: list[tuple[int, ...]] = []
        self._live: list[torch.Tensor] = []
        heads.compiled = True

        def backend(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
            return self._compile(graph, inputs)  # no method: `generate` copies its config, and all that belongs to it

        target.generation_config.compile_config = CompileConfig(backend=backend, mode="reduce-overhead")
        patch.setattr(torch.compiler, "cudagraph_mark_step_begin", self._overwrite)
        patch.setattr("hf_specheads.generation.ahead.QUEUES", ("cpu", "cuda"))
        patch.setattr(CompiledRounds, "drafts_links", lambda *_: False)  # as where graphs are replayed: on no CPU

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
        """Copies in the graph's memory; views of what was given stay views of it."""
        theirs = {each.untyped_storage().data_ptr() for each in given if isinstance(each, torch.Tensor)}
        copies = []
        for each in outputs:
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in theirs:
                each = each.clone()
                self._live.append(each)
            copies.append(each)
        return tuple(copies)

    def _overwrite(self) -> None:
        """A step begins: whoever still looks at outputs of earlier ones sees garbage."""
        for tensor in self._live:
            tensor.fill_(float("nan") if tensor.is_floating_point() else GARBAGE.get(tensor.dtype, -(10**9)))
        self._live.clear()
