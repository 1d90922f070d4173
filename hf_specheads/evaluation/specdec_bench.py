"""Adapter for ModelOpt's `specdec_bench` (NVIDIA's tool behind SPEED-Bench), whose runners call such a model.

    from hf_specheads.evaluation.specdec_bench import SpecheadsModel
    model = SpecheadsModel("my/target", 1, {"temperature": 0.0}, draft_model_dir="my/heads")

It returns the tokens, the times at which they came, and how many came at once. The tool's metrics need nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..checkpoints.load import load_heads
from ..tuning.turns import timed_generation
from .first_token import _Clock


class SpecheadsModel:
    """Target and heads behind the interface of `specdec_bench`, one request at a time.

    Args:
        model_dir: Folder or Hub id of the target, or a loaded model.
        max_concurrent_requests: Must be 1.
        sampling_kwargs: `temperature`, `top_p`, `top_k`; greedy if the temperature is 0 or missing.
        draft_model_dir: Folder or Hub id of the heads, or loaded heads; `None` for plain generation.
        dtype: Dtype of the target's weights.
        device: Device of the target.
        **tree_overrides: Fields of the draft tree, as for [`load_heads`]. Other arguments, which the runners pass for
            other engines, are ignored.

    Raises:
        ValueError: If `max_concurrent_requests` is not 1.
    """

    TREE = ("kind", "depth", "top_k", "total_tokens", "choices")

    def __init__(
        self,
        model_dir: Any,
        max_concurrent_requests: int = 1,
        sampling_kwargs: Mapping[str, Any] | None = None,
        *,
        draft_model_dir: Any = None,
        dtype: str = "auto",
        device: str = "cpu",
        **tree_overrides: Any,
    ):
        if max_concurrent_requests != 1:
            raise ValueError(f"requests are served one at a time, got {max_concurrent_requests}; pass 1.")
        from transformers import AutoModelForCausalLM

        options = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype), "device_map": device}
        loads = isinstance(model_dir, str)
        self.target = AutoModelForCausalLM.from_pretrained(model_dir, **options).eval() if loads else model_dir
        self.heads = draft_model_dir
        if isinstance(draft_model_dir, str):
            tree = {name: value for name, value in tree_overrides.items() if name in self.TREE}
            self.heads = load_heads(draft_model_dir, dtype=self.target.dtype, **tree)
        if self.heads is not None:
            self.heads.adaptive = False  # the tool measures rounds, so every step should draft
        self.sampling = _generate_options(sampling_kwargs or {})

    async def run(
        self, prompt_ids: Sequence[int], max_length: int, end_id: int, request_id: Any = None, turn_id: Any = None
    ) -> dict[str, Any]:
        """Serves one request.

        Args:
            prompt_ids: Token ids of the prompt.
            max_length: Maximum number of new tokens.
            end_id: Token that ends the text; -1 for none.
            request_id, turn_id: Ignored.

        Returns:
            `output_ids` (one list of new tokens), `chunk_lengths` (one list: numbers of tokens that came at once,
            beginning with the prefill) and `token_times` (time of the start, then of every chunk).
        """
        return await asyncio.to_thread(self._generate, list(prompt_ids), max_length, end_id)

    def _generate(self, prompt_ids: list[int], max_length: int, end_id: int) -> dict[str, Any]:
        clock = _Clock()
        ends = {"eos_token_id": None if end_id < 0 else end_id}
        options = {**self.sampling, **ends, "max_new_tokens": max_length, "streamer": clock}
        started = time.perf_counter()
        (tokens,), _ = timed_generation(self.target, [prompt_ids], assistant_model=self.heads, **options)
        chunks = [1] * len(tokens) if self.heads is None else _chunks(self.heads.last_stats, len(tokens))
        moments, at = [started], 0
        for length in chunks:
            at += length
            moments.append(clock.times[at - 1])
        return {"output_ids": [tokens], "chunk_lengths": [chunks], "token_times": moments}

    def stop(self) -> None:
        """Releases the models."""
        self.target = self.heads = None


def _chunks(stats: Any, tokens: int) -> list[int]:
    """Numbers of tokens that came at once: in the prefill, then in every round up to the end of the text."""
    lengths, left = [min(1, tokens)], tokens - 1
    for accepted in stats.num_accepted[0] if stats.num_accepted else ():
        if left > 0:
            lengths.append(min(accepted + 1, left))
            left -= lengths[-1]
    return [length for length in [*lengths, *([1] * max(left, 0))] if length]


def _generate_options(sampling: Mapping[str, Any]) -> dict[str, Any]:
    temperature = float(sampling.get("temperature") or 0.0)
    if temperature == 0:
        return {"do_sample": False}
    chosen = {name: sampling[name] for name in ("top_p", "top_k") if sampling.get(name) is not None}
    return {"do_sample": True, "temperature": temperature, **chosen}
