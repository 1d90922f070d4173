"""Answers prompts with the target in this process, with or without draft heads, or with a server with OpenAI's API.

Both take and return token ids, so that draft heads are trained on the tokens that the target generated, which may
differ from the tokenization of their text.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specheads.heads.base import DraftHead

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
ATTEMPTS = 5


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of a reply.

    Attributes:
        temperature: Sampling temperature; 0 for greedy decoding.
        max_new_tokens: Longest reply in tokens.
        top_p, top_k: As in `generate`; `None` samples from the whole distribution.
    """

    temperature: float
    max_new_tokens: int
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True)
class Answer:
    """A reply.

    Attributes:
        token_ids: Generated token ids, the end of turn included.
        finish_reason: `"stop"`, `"length"` if the reply was cut, or `"error"`.
        problem: Why there is no reply; `None` if there is one.
    """

    token_ids: list[int]
    finish_reason: str
    problem: str | None = None


class Answerer(Protocol):
    """Answers batches of prompts that share sampling settings."""

    def answer(self, prompts: Sequence[list[int]], sampling: Sampling, seed: int) -> list[Answer]:
        """Returns one reply per prompt, in the order of the prompts."""
        ...


class TargetInProcess:
    """Answers prompts with the target itself, in batches.

    Args:
        target: The target.
        pad_token_id: Token id that pads shorter prompts on the left.
        heads: Draft heads of the target, e.g. those of an earlier round of training. They speed up generation and do
            not change the target's distribution.
    """

    def __init__(self, target: PreTrainedModel, pad_token_id: int, heads: DraftHead | None = None):
        self.target, self.pad_token_id, self.heads = target.eval(), pad_token_id, heads
        ends = target.generation_config.eos_token_id
        self.ends = set(ends) if isinstance(ends, list) else {ends} - {None}

    @torch.no_grad()
    def answer(self, prompts: Sequence[list[int]], sampling: Sampling, seed: int) -> list[Answer]:
        """Answers as [`Answerer`] does. Sampled replies depend on the seed and on all prompts of the batch."""
        longest = max(map(len, prompts))
        padded = [[self.pad_token_id] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self.target.get_input_embeddings().weight.device
        options: dict[str, Any] = {"do_sample": sampling.temperature > 0, "pad_token_id": self.pad_token_id}
        if options["do_sample"]:
            options |= {"temperature": sampling.temperature, "top_p": sampling.top_p or 1.0}
            options |= {"top_k": sampling.top_k or 0}
        if self.heads is not None:
            options["assistant_model"] = self.heads
        torch.manual_seed(seed)
        try:
            output = cast(Any, self.target).generate(
                input_ids=torch.tensor(padded, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=sampling.max_new_tokens,
                **options,
            )
        except (RuntimeError, ValueError) as error:  # e.g. out of memory, or a prompt longer than the context
            return [Answer([], "error", f"{type(error).__name__}: {error}")] * len(prompts)
        return [self._cut(row, sampling.max_new_tokens) for row in output[:, longest:].tolist()]

    def _cut(self, ids: list[int], limit: int) -> Answer:
        end = next((index for index, token in enumerate(ids) if token in self.ends), None)
        if end is None:
            return Answer(ids[:limit], "length")
        return Answer(ids[: end + 1], "stop")


class Server:
    """Answers prompts with a server that has OpenAI's completions API (vLLM, SGLang, ...), which is sent token ids.

    Args:
        url: Base URL, e.g. `http://localhost:8000/v1`.
        model: Name of the target at the server.
        concurrency: Number of simultaneous requests.
        api_key: Bearer token.
        timeout: Seconds per request.
        tokenizer: Tokenizer for the texts of servers that return no token ids; its ids may differ from the generated
            ones. `None` refuses such servers.
        pause: Seconds before the first retry of a failed request; doubles with every retry.
    """

    def __init__(
        self,
        url: str,
        model: str,
        concurrency: int = 32,
        api_key: str | None = None,
        timeout: float = 600.0,
        tokenizer: PreTrainedTokenizerBase | None = None,
        pause: float = 1.0,
    ):
        self.url, self.model, self.concurrency = url.rstrip("/"), model, concurrency
        self.api_key, self.timeout, self.tokenizer, self.pause = api_key, timeout, tokenizer, pause

    def answer(self, prompts: Sequence[list[int]], sampling: Sampling, seed: int) -> list[Answer]:
        """Answers as [`Answerer`] does. A request that fails in every attempt gives an answer with a `problem`."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(lambda pair: self._ask(pair[1], sampling, seed + pair[0]), enumerate(prompts)))

    def _ask(self, prompt: list[int], sampling: Sampling, seed: int) -> Answer:
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": sampling.max_new_tokens}
        body |= {"temperature": sampling.temperature, "seed": seed, "return_token_ids": True}
        body |= {"skip_special_tokens": False}
        if sampling.temperature > 0:
            body |= {name: value for name in ("top_p", "top_k") if (value := getattr(sampling, name)) is not None}
        try:
            return self._read(self._post("/completions", body))
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            return Answer([], "error", f"{type(error).__name__}: {error}")

    def _read(self, response: dict[str, Any]) -> Answer:
        choice = response["choices"][0]
        reason = str(choice.get("finish_reason") or "stop")
        ids = choice.get("token_ids") or choice.get("output_ids")
        if ids is None:
            if self.tokenizer is None:
                raise ValueError(
                    "the server returned no token ids (vLLM and SGLang do, for `return_token_ids`); pass "
                    "--retokenize to tokenize its text instead, which may give other tokens than it generated"
                )
            ids = self.tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
            if reason == "stop" and self.tokenizer.eos_token_id is not None:
                ids = [*ids, self.tokenizer.eos_token_id]
        return Answer([int(token) for token in ids], reason)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                if error.code not in RETRIED or attempt == ATTEMPTS:
                    raise OSError(
                        f"{error.code} {error.reason}: {error.read().decode(errors='replace')[:300]}"
                    ) from error
            except OSError:
                if attempt == ATTEMPTS:
                    raise
            time.sleep(self.pause * 2 ** (attempt - 1))
        raise AssertionError("unreachable")
