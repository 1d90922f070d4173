"""Evidence for trying hypotheses: texts of the target, its hidden states and its predictions, captured once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..texts import Text, all_token_ids
from ..tuning.progress import bar
from ..unroll.rows import TrainingRows, row_positions

BEFORE_NORM = "before the final norm"
Level = int | str


@dataclass(frozen=True)
class Evidence:
    """Right-padded texts, and the target's computations on them.

    Attributes:
        token_ids: int64 [B, T].
        lengths: Number of tokens of every text.
        starts: Number of tokens of every text's prompt, which the target did not write.
        states: Hidden states [B, T, H] by index 0 to N (as in transformers; N is after the final norm), and by
            [`BEFORE_NORM`] if the target's final norm could be found.
        favourites: int64 [B, T], the target's most likely token after every token.
        confidence: fp32 [B, T], probability of that most likely token.
        surprise: fp32 [B, T], negative log-probability of every token; 0 for the first.
    """

    token_ids: torch.Tensor
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    states: dict[Level, torch.Tensor]
    favourites: torch.Tensor
    confidence: torch.Tensor
    surprise: torch.Tensor

    @property
    def depth(self) -> int:
        """Number N of layers of the target."""
        return max(level for level in self.states if isinstance(level, int))

    def features(self, levels: Sequence[Level]) -> torch.Tensor | None:
        """Features [B, T, F], hidden states side by side, where level -1 is the last; `None` without levels."""
        if not levels:
            return None
        chosen = [self.states[self.depth if level == -1 else level] for level in levels]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=-1)

    def rows(
        self, features: torch.Tensor | None, embed: Any, lm_head: Any, anchors: torch.Tensor | None = None
    ) -> TrainingRows:
        """Teacher-forced rows [B, T - 1] of all texts: the feature of a token, and the token after it.

        Rounds start at the rows `anchors` int64 [B, A], or at all rows.
        """
        places = torch.arange(self.token_ids.shape[1] - 1, device=self.token_ids.device)
        lengths = torch.tensor(self.lengths, device=self.token_ids.device)[:, None]
        documents = torch.where(places[None] < lengths - 1, 0, -1)
        if features is None:
            features = torch.zeros(*self.token_ids.shape, 1, dtype=torch.float32, device=self.token_ids.device)
        return TrainingRows(
            features=features[:, :-1],
            token_ids=self.token_ids[:, :-1],
            next_token_ids=self.token_ids[:, 1:],
            documents=documents,
            position_ids=row_positions(documents),
            embed=embed,
            lm_head=lm_head,
            anchors=anchors,
        )

    def part(self, sequences: Sequence[int]) -> Evidence:
        """Evidence of some of the texts, given by index."""
        index = list(sequences)
        return Evidence(
            self.token_ids[index],
            tuple(self.lengths[i] for i in index),
            tuple(self.starts[i] for i in index),
            {level: state[index] for level, state in self.states.items()},
            self.favourites[index],
            self.confidence[index],
            self.surprise[index],
        )


def prompts_of(prompts: Sequence[Text], tokenizer: Any, longest: int | None) -> list[torch.Tensor]:
    """Token ids [1, T] of the prompts, cut to their last `longest` tokens."""
    texts = all_token_ids(prompts, tokenizer)
    return texts if longest is None else [ids[:, -longest:] for ids in texts]


@torch.no_grad()
def continue_texts(
    target: PreTrainedModel, prompts: Sequence[torch.Tensor], max_new_tokens: int, at_once: int = 8
) -> list[torch.Tensor]:
    """Generates the target's own greedy continuations: int64 [T] each, prompt included.

    `at_once` prompts are generated together, left-padded.
    """
    texts: list[torch.Tensor] = []
    ends = target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    for first in bar(range(0, len(prompts), at_once), "the target's own texts"):
        some = [ids[0] for ids in prompts[first : first + at_once]]
        longest = max(map(len, some))
        ids = torch.stack([torch.nn.functional.pad(one, (longest - len(one), 0)) for one in some]).to(target.device)
        mask = torch.stack(
            [torch.nn.functional.pad(torch.ones_like(one), (longest - len(one), 0)) for one in some]
        ).to(target.device)
        pad = target.generation_config.pad_token_id
        options = {} if pad is not None else {"pad_token_id": next(iter(ends), 0)}
        written: Any = target.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, **options
        )
        for prompt, row in zip(some, written, strict=True):
            new = row[longest:].tolist()
            end = next((place + 1 for place, token in enumerate(new) if token in ends), len(new))
            texts.append(torch.cat([prompt.to(row.device), row[longest : longest + end]]))
    return texts


@torch.no_grad()
def capture(target: PreTrainedModel, texts: Sequence[torch.Tensor], starts: Sequence[int]) -> Evidence:
    """Captures all hidden states and predictions of the target, with one forward per text.

    Args:
        target: The target.
        texts: int64 [T] each, at least 3 tokens.
        starts: Number of tokens of each text's prompt.
    """
    longest = max(map(len, texts))
    captured: list[dict[Level, torch.Tensor]] = []
    favourites, confidence, surprise = [], [], []
    for text in bar(texts, "hidden states of the target"):
        states, logits = _forward(target, text[None].to(target.device))
        captured.append({level: _padded(state[0], longest) for level, state in states.items()})
        favourites.append(_padded(logits.argmax(-1), longest))
        sure, unlikely = _probabilities(logits, text.to(logits.device))
        confidence.append(_padded(sure, longest))
        surprise.append(_padded(unlikely, longest))
    return Evidence(
        torch.stack([_padded(text.to(target.device), longest) for text in texts]),
        tuple(map(len, texts)),
        tuple(starts),
        {level: torch.stack([one[level] for one in captured]) for level in captured[0]},
        torch.stack(favourites),
        torch.stack(confidence),
        torch.stack(surprise),
    )


def _probabilities(logits: torch.Tensor, ids: torch.Tensor, rows: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Confidence and surprise of every token, fp32 [T] each, from logits [T, V], a few rows at a time."""
    following = ids.roll(-1)
    sure, unlikely = [], []
    for part, after in zip(logits.split(rows), following.split(rows), strict=True):
        probabilities = part.float().log_softmax(-1)
        sure.append(probabilities.amax(-1).exp())
        unlikely.append(-probabilities.gather(-1, after[:, None])[:, 0])
    surprise = torch.cat(unlikely).roll(1)
    surprise[0] = 0.0
    return torch.cat(sure), surprise


def _forward(target: PreTrainedModel, ids: torch.Tensor) -> tuple[dict[Level, torch.Tensor], torch.Tensor]:
    """Computes all hidden states of one text [1, T], the input of the final norm, and the logits [T, V]."""
    before: list[torch.Tensor] = []
    norm = final_norm(target)
    hook = None if norm is None else norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
    try:
        outputs = target(
            input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True, use_cache=False
        )
    finally:
        if hook is not None:
            hook.remove()
    states: dict[Level, torch.Tensor] = dict(enumerate(state.to(ids.device) for state in outputs.hidden_states))
    if before and before[-1].shape == states[0].shape:
        states[BEFORE_NORM] = before[-1].to(ids.device)
    return states, outputs.logits[0].to(ids.device)


def final_norm(target: PreTrainedModel) -> torch.nn.Module | None:
    """Finds the norm before a target's `lm_head` by its usual names; `None` if it has another name."""
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else None
    names = ("norm", "final_layer_norm", "final_layernorm", "ln_f")
    return next((norm for name in names if isinstance(norm := getattr(decoder, name, None), torch.nn.Module)), None)


def _padded(values: torch.Tensor, length: int) -> torch.Tensor:
    room = [0, 0] * (values.dim() - 1) + [0, length - values.shape[0]]
    return torch.nn.functional.pad(values, room)
