"""Models of the page: one target, its tokenizer, and heads by name, which are loaded when first requested."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..heads.base import DraftHead
from ..target.positions import context_limit
from ..texts import token_ids_of
from ..tree.config import DraftTreeConfig

AUTOMATIC = "automatic"
SAVED = "as saved"
TREES = (AUTOMATIC, SAVED, "chain", "dynamic")


@dataclass
class Models:
    """Target and heads of a page.

    Attributes:
        target, tokenizer: The target and its tokenizer.
        loaders: Functions that load the heads, by name; each is called at most once.
        target_name: Name of the target, for display.
        lock: Lock that is held while generating, because the models serve one call at a time.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    loaders: Mapping[str, Callable[[], DraftHead]]
    target_name: str = "the target"
    lock: threading.Lock = field(default_factory=threading.Lock)
    _loaded: dict[str, DraftHead] = field(default_factory=dict)

    def heads(self, name: str) -> DraftHead:
        """Returns heads by name, bound to the target.

        Raises:
            ValueError: If the page has no heads of this name.
            WrongTargetError: If the heads were made for another target.
        """
        return self.unbound_heads(name).bind(self.target)

    def unbound_heads(self, name: str) -> DraftHead:
        """Returns heads by name, without checking that they were made for the target."""
        if name not in self.loaders:
            raise ValueError(f"there are no heads named {name!r}; choose one of {list(self.loaders)}.")
        if name not in self._loaded:
            self._loaded[name] = self.loaders[name]()
        return self._loaded[name]

    @property
    def chats(self) -> bool:
        """Whether the tokenizer has a chat template; without one, the target continues texts as they are."""
        return bool(self.tokenizer.chat_template)

    def inputs(self, messages: list[dict[str, str]], max_new_tokens: int) -> dict[str, torch.Tensor]:
        """Token ids and mask [1, T] of a chat, or of its last message if there is no chat template.

        Raises:
            ValueError: If the message is empty, or the context leaves no room for the reply.
        """
        text = messages[-1]["content"]
        if not text.strip():
            raise ValueError("the prompt is empty; write something for the target to answer or continue.")
        ids = token_ids_of(messages if self.chats else text, self.tokenizer)[None].to(self.target.device)
        limit = context_limit(self.target)
        if limit is not None and ids.shape[1] + max_new_tokens > limit:
            raise ValueError(
                f"{ids.shape[1]} tokens of prompt and {max_new_tokens} new ones exceed the target's context of "
                f"{limit}; shorten the prompt, start a new chat, or ask for fewer tokens."
            )
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def decode(self, token_ids: list[int]) -> str:
        """Decodes tokens of a reply, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def text_of(self, token_id: int) -> str:
        """Decodes one token, also special tokens. Parts of a character become the replacement character."""
        return self.tokenizer.decode([token_id])

    def prompts(self, texts: list[str]) -> list[Any]:
        """Makes prompts for the target: chats of one message if there is a chat template, else the texts."""
        return [[{"role": "user", "content": text}] for text in texts] if self.chats else list(texts)


@dataclass(frozen=True)
class Settings:
    """Values of the page's controls.

    Attributes:
        heads: Name of the heads.
        tree: One of [`TREES`]; with `"automatic"`, the engine chooses among several trees.
        depth, top_k, total_tokens: Sizes of a chain or a dynamic tree.
        adaptive: Whether plain steps are taken if drafts do not pay.
        temperature: Sampling temperature; 0 for greedy decoding.
        verification: Name of the verification rule.
        max_new_tokens: Maximum number of tokens of a reply.
        seed: Seed for sampling.
        compare: Whether to generate plainly as well, after the reply with heads.
    """

    heads: str
    tree: str = AUTOMATIC
    depth: int = 5
    top_k: int = 4
    total_tokens: int = 16
    adaptive: bool = True
    temperature: float = 0.0
    verification: str = "lossless"
    max_new_tokens: int = 128
    seed: int = 0
    compare: bool = True

    def apply(self, heads: DraftHead) -> DraftHead:
        """Returns a copy of the heads with these settings; the weights are shared.

        Raises:
            ValueError: If the tree is impossible, or the rule is unknown.
        """
        copied = heads.with_tree()
        copied.verification = self.verification
        copied.adaptive = self.adaptive
        if self.tree not in TREES:
            raise ValueError(f"the draft tree must be one of {list(TREES)}, got {self.tree!r}.")
        if self.tree == SAVED:
            copied.tree_config = copied.tree_config  # an explicitly assigned tree is drafted in every round
        elif self.tree != AUTOMATIC:
            sizes = {"depth": int(self.depth)}
            if self.tree == "dynamic":
                sizes |= {"top_k": int(self.top_k), "total_tokens": int(self.total_tokens)}
            copied.tree_config = DraftTreeConfig(kind=self.tree, **sizes)
        return copied

    @property
    def generate_options(self) -> dict[str, Any]:
        """Arguments for `generate`.

        Raises:
            ValueError: If the temperature is below 0, or the number of tokens below 1.
        """
        if self.temperature is None or self.temperature < 0:
            raise ValueError(f"the temperature must be a number of at least 0, got {self.temperature!r}.")
        if not self.max_new_tokens or self.max_new_tokens < 1:
            raise ValueError(f"a reply must have at least one new token, got {self.max_new_tokens!r}.")
        options: dict[str, Any] = {"max_new_tokens": int(self.max_new_tokens), "do_sample": self.temperature > 0}
        if self.temperature > 0:
            options["temperature"] = float(self.temperature)
        return options
