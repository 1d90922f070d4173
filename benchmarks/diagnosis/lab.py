"""Pairs in which causes are planted: the shipped pair, whose texts are captured once, and a tiny one."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hf_specheads import DraftHead, load_heads
from hf_specheads.diagnosis.doctor import gather
from hf_specheads.diagnosis.evidence import Evidence
from tests.support.tokenizers import word_tokenizer

from ..results import ROOT
from .tiny import NEW_TOKENS, PROMPT_TOKENS, VOCABULARY, fresh_heads, learn, texts_of, tiny_prompts, tiny_target

RECORDINGS = ROOT / "tests" / "recordings" / "goldens"
RECORDED_PROMPTS, RECORDED_TOKENS = 8, 48
TEMPLATE = "{% for message in messages %}w7 w8 {{ message['content'] }} w9 w11 w13 {% endfor %}"


@dataclass
class Case:
    """A case for the doctor.

    Attributes:
        target: The target.
        heads: Its heads, with the planted cause.
        prompts: Token ids [1, T] each, or texts.
        new_tokens: Tokens generated per prompt.
        positions: Number of draft positions to examine.
        evidence: Texts of the target after the prompts, if already captured; `None` after a change of target or
            prompts.
        tokenizer: Tokenizer of the target, for prompts that are texts.
    """

    target: PreTrainedModel
    heads: DraftHead
    prompts: list[Any]
    new_tokens: int
    positions: int = 4
    evidence: Evidence | None = None
    tokenizer: Any = None


@dataclass
class Lab:
    """The shipped pair and the tiny one.

    Attributes:
        target: The shipped target.
        prompts: Prompts for the shipped target.
        new_tokens: Tokens generated per prompt.
        pair: Folder of the shipped heads.
        tokenizer: Tokenizer of the shipped target.
    """

    target: PreTrainedModel
    prompts: list[torch.Tensor]
    new_tokens: int
    pair: Path
    tokenizer: Any = None
    tiny_target: PreTrainedModel = field(default_factory=tiny_target)
    _kept: dict[Any, Any] = field(default_factory=dict)

    def _once(self, key: Any, make: Any) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def folders(self) -> list[str]:
        """Returns the folders of all shipped heads."""
        configs = sorted(self.pair.glob("*/config.json"))
        return [str(path.parent) for path in configs if '"specheads_' in path.read_text(encoding="utf-8")]

    def shipped(self, name: str) -> Case:
        """Returns sound heads with the shipped target. Heads that come with an adapter get their own copy of the
        target."""
        heads = load_heads(str(self.pair / name), dtype=self.target.dtype)
        case = Case(self.target, heads, self.prompts, self.new_tokens, tokenizer=self.tokenizer)
        if heads.config.target_adapter is not None:
            case.target = copy.deepcopy(self.target)
            heads.load_target_adapter(case.target)
        else:
            case.evidence = self._once("shipped", lambda: gather(self.target, self.prompts, None, self.new_tokens))
        return case

    def recorded(self, name: str) -> Case | None:
        """Returns heads recorded with the authors' code and their tiny target; `None` if the recording has no
        weights."""
        case = json.loads((RECORDINGS / name / "case.json").read_text(encoding="utf-8"))
        target_at, draft_at = (RECORDINGS / name / case.get(key, key) for key in ("target", "draft"))
        if not (target_at.is_dir() and draft_at.is_dir()):
            return None
        target = self._once(target_at.resolve(), lambda: _recorded_target(target_at))
        specialists = case["settings"].get("position_per_layer")
        options = {"method": "mtp"} if case.get("method") == "mtp" else {"positions_per_specialist": specialists}
        heads = load_heads(str(draft_at), dtype=torch.float32, **options)
        # The prompts are pieces from all over the only text. If all were its beginnings, they would have the same
        # continuation.
        text = torch.tensor([[*case["prompt_ids"], *case["output_ids"]]])
        last = max(text.shape[1] - PROMPT_TOKENS, 1)
        prompts = [text[:, at : at + PROMPT_TOKENS] for at in range(0, last, max(1, last // RECORDED_PROMPTS))]
        return Case(target, heads, prompts, RECORDED_TOKENS)

    def texts(self) -> Evidence:
        """Returns the texts of the tiny target."""
        return self._once("tiny", lambda: texts_of(self.tiny_target, tiny_prompts()))

    def tiny(self, method: str, options: dict[str, Any] | None = None, **training: Any) -> Case:
        """Returns heads that have learnt the tiny target's texts, trained by [`tiny.learn`] with these arguments."""
        told = {name: one.tolist() if isinstance(one, torch.Tensor) else one for name, one in training.items()}

        def make() -> DraftHead:
            return learn(fresh_heads(self.tiny_target, method, **(options or {})), self.texts(), **training)

        heads = copy.deepcopy(self._once(repr((method, options, told)), make)).bind(self.tiny_target, follow=False)
        return Case(self.tiny_target, heads, tiny_prompts(), NEW_TOKENS, 2, self.texts())


def recorded_names() -> list[str]:
    """Returns the names of recorded generations."""
    return sorted(path.parent.name for path in RECORDINGS.glob("*/case.json"))


def _recorded_target(folder: Path) -> PreTrainedModel:
    target = AutoModelForCausalLM.from_pretrained(folder.resolve(), dtype=torch.float32).eval()
    target.generation_config.eos_token_id = None
    return target


def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one word per token of the tiny target, and a chat template."""
    tokenizer = word_tokenizer(["<pad>", "<unk>", *(f"w{token}" for token in range(2, VOCABULARY))])
    tokenizer.chat_template = template
    return tokenizer
