"""Explains where a text with draft heads differs from the plain one: a tie that rounding decides, or a bug."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..contract import DraftingContract
from ..errors import UnsupportedGenerationError
from ..target.recurrence import recurrence_problem
from .reproducer import write_reproducer
from .rounding import Rounding, logit_shifts, measure_rounding

# Rounding is measured at a few positions only; at others, errors up to this multiple still count as rounding.
MARGIN = 4.0
FEWEST_STEPS = 4.0  # rounding steps of a logit in the target's dtype that are always allowed, even if none is measured


@dataclass(frozen=True)
class Difference:
    """Comparison of a generation with heads to the plain generation from the same prompt.

    Attributes:
        verdict: `"same"`, `"tie"` (two tokens so close that rounding decides; both texts are the target's) or
            `"bug"`.
        because: Reason for the verdict, in one sentence.
        position: Index of the first new token that differs, from 0; `None` for equal texts.
        token, plain_token: Tokens at that position with heads and plainly; `None` if the text has ended.
        logits: Logits of `plain_token` and `token` in the plain run (`plain`) and in the round that verified them
            (`heads`); `None` for equal texts.
        gap, gap_with_heads: Logit of the plain token minus that of the other, in either run.
        allowed_gap: Largest gap at which rounding may decide.
        first_wrong: Index of the first new token whose logits with heads are off by more than rounding; `None` if
            there is none.
        first_wrong_token: Token at that index with heads.
        shift, allowed_shift: Largest root mean square error of logits up to `position`, and the error that rounding
            allows.
        rounding: Rounding as measured on this target with this text.
        full_forward_token: Most likely token of one forward over the whole text, as third evidence; `None` for equal
            texts.
        token_ids, plain_token_ids: New tokens of both texts.
        words: Both texts around the difference, if there is a tokenizer.
    """

    verdict: str
    because: str
    position: int | None
    token: int | None
    plain_token: int | None
    logits: dict[str, tuple[float, float]] | None
    gap: float | None
    gap_with_heads: float | None
    allowed_gap: float
    first_wrong: int | None
    first_wrong_token: int | None
    shift: float
    allowed_shift: float
    rounding: Rounding
    full_forward_token: int | None
    token_ids: list[int]
    plain_token_ids: list[int]
    words: dict[str, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.verdict.upper()}: {self.because}"]
        if self.position is not None:
            lines += [f"first differing token  new token {self.position}: {self.token} with heads, "
                      f"{self.plain_token} in plain decoding"]  # fmt: skip
        if self.logits is not None:
            plain, ours = self.logits["plain"], self.logits["heads"]
            lines += [
                f"logits of {self.plain_token} and {self.token}  plain {plain[0]:.6g} and {plain[1]:.6g} (gap "
                f"{self.gap:.3g}), with heads {ours[0]:.6g} and {ours[1]:.6g} (gap {self.gap_with_heads:.3g})",
                f"one forward over the whole text favours {self.full_forward_token}",
            ]
        lines += [
            f"rounding  {self.rounding.nodes} tokens per forward instead of one change the gap of the two favourites "
            f"by up to {self.rounding.gap:.3g} (median {self.rounding.typical_gap:.3g}), at {self.rounding.positions} "
            f"positions; a gap of up to {self.allowed_gap:.3g} is called a tie",
            f"logits with heads  off by up to {self.shift:.3g} (rounding explains up to {self.allowed_shift:.3g})",
        ]
        if self.first_wrong is not None:
            lines += [f"first wrong logits  at new token {self.first_wrong} (token {self.first_wrong_token})"]
        if self.words is not None:
            lines += [f"{name}  ...{text!r}" for name, text in self.words.items()]
        return "\n".join(lines)


@torch.no_grad()
def explain_difference(
    target: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    heads: DraftingContract,
    *,
    max_new_tokens: int = 128,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reproducer: str | Path | None = None,
    **generate_options: Any,
) -> Difference:
    """Generates greedily with heads and plainly, and explains where and why the texts differ.

    The comparison uses the logits that decided: those of the round that verified the token, and those of the plain
    step. A forward over several tokens rounds differently from a forward over one token. The difference is measured
    for this target, dtype and number of nodes ([`rounding`]). A larger error is a bug, of this package or of the
    target's attention.

    Args:
        target: The target.
        inputs: Output of a tokenizer for one prompt: `input_ids` [1, T], `attention_mask`.
        heads: Draft heads of the target. They draft in every round, whether or not that pays, and without the probe
            that refuses targets with wrong logits.
        max_new_tokens: Number of tokens to generate.
        tokenizer: Tokenizer of the target, to show the texts in words.
        reproducer: File to write: a script that repeats this comparison, whatever its result.
        **generate_options: Arguments of both `generate` calls, e.g. logits processors.

    Raises:
        UnsupportedGenerationError: For sampling or several sequences, which cannot be compared this way, and for calls
            that draft heads cannot serve.
    """
    if generate_options.get("do_sample") or inputs["input_ids"].shape[0] != 1:
        raise UnsupportedGenerationError(
            f"differences are explained for greedy texts of one prompt, got do_sample="
            f"{bool(generate_options.get('do_sample'))} and {inputs['input_ids'].shape[0]} prompt(s); a sampled text "
            "may differ by chance. Generate greedily, one prompt at a time."
        )
    measured = heads.with_tree()
    measured.adaptive = measured.probe = False
    inputs = {name: value.to(target.device) for name, value in inputs.items()}
    options = {"max_new_tokens": max_new_tokens, **generate_options, "do_sample": False}
    plain = _Run.of(target, inputs, options)
    ours = _Run.of(target, inputs, {**options, "assistant_model": measured})
    text = torch.cat([inputs["input_ids"][0], torch.tensor(plain.token_ids, device=target.device)])
    rounding = measure_rounding(target, text[None], measured.tree_config.num_nodes)
    found = _compare(target, inputs["input_ids"], plain, ours, rounding, tokenizer)
    if reproducer is not None:
        write_reproducer(Path(reproducer), target, inputs, measured, options, found.to_dict())
    return found


@torch.no_grad()
def part_at_a_tie(
    target: PreTrainedModel,
    prompt: torch.Tensor,
    token_ids: list[int],
    plain_token_ids: list[int],
    nodes: int,
    **generate_options: Any,
) -> bool:
    """Whether two existing greedy texts first differ at a tie that rounding may decide.

    Errors before the first difference are not detected; [`explain_difference`] finds them. The result is `False` if
    rounding cannot be measured: for targets whose recurrent states do not allow a forward over several tokens, and for
    a text of one token.

    Args:
        target: The target.
        prompt: int64 [1, T], without padding.
        token_ids: New tokens with heads.
        plain_token_ids: New tokens of plain generation.
        nodes: Largest number of nodes of the forwards that verified the tokens.
        **generate_options: Arguments of the `generate` call that computes the scores of both tokens.
    """
    position = first_difference(token_ids, plain_token_ids)
    if position is None:
        return True
    if position >= min(len(token_ids), len(plain_token_ids)):
        return False
    before = torch.tensor([plain_token_ids[:position]], dtype=torch.long, device=target.device)
    text = torch.cat([prompt.to(target.device), before], dim=1)
    if recurrence_problem(target) is not None or text.shape[1] < 2:
        return False
    asked = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    options = {**generate_options, **asked, "max_new_tokens": 1, "do_sample": False}
    outputs = target.generate(input_ids=text, attention_mask=torch.ones_like(text), **options)
    plain, ours = outputs.scores[0][0, [plain_token_ids[position], token_ids[position]]].tolist()
    rounding = measure_rounding(target, text, nodes)
    return abs(plain - ours) <= MARGIN * rounding.gap + _least_allowed(target, outputs.logits[0].float())


def _least_allowed(target: PreTrainedModel, logits: torch.Tensor) -> float:
    """Error that is always allowed for logits of this size: [`FEWEST_STEPS`] rounding steps."""
    return FEWEST_STEPS * float(torch.finfo(target.dtype).eps) * float(logits.abs().median())


@dataclass(frozen=True)
class _Run:
    """New tokens of a generation, their raw logits [T, V], and the scores [T, V] by which they were chosen."""

    token_ids: list[int]
    logits: torch.Tensor
    scores: torch.Tensor

    @classmethod
    def of(cls, target: PreTrainedModel, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> _Run:
        asked = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
        outputs = target.generate(**inputs, **options, **asked)
        new = outputs.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        logits, scores = (torch.cat(list(one))[: len(new)].float() for one in (outputs.logits, outputs.scores))
        return cls(new, logits, scores)

    def not_chosen_by_scores(self, end: int) -> int | None:
        """Index of the first token before `end` that does not have the highest score; `None` if there is none."""
        chosen = self.scores[:end].gather(-1, torch.tensor(self.token_ids[:end], device=self.scores.device)[:, None])
        wrong = (chosen[:, 0] < self.scores[:end].amax(-1)).nonzero()
        return int(wrong[0]) if len(wrong) else None


def _compare(
    target: PreTrainedModel,
    prompt: torch.Tensor,
    plain: _Run,
    ours: _Run,
    rounding: Rounding,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Difference:
    position = first_difference(ours.token_ids, plain.token_ids)
    both = min(len(plain.token_ids), len(ours.token_ids))
    end = both if position is None else min(position + 1, both)
    step = _least_allowed(target, plain.logits)
    allowed_gap, allowed_shift = MARGIN * rounding.gap + step, MARGIN * rounding.logits + step
    shifts = logit_shifts(plain.logits[:end], ours.logits[:end])
    wrong = (~(shifts <= allowed_shift)).nonzero()
    first_wrong = int(wrong[0]) if len(wrong) else None
    unchosen = ours.not_chosen_by_scores(end)
    gaps = _gaps(plain, ours, position) if position is not None and position < both else None
    verdict, because = _verdict(position, both, first_wrong, unchosen, gaps, allowed_gap, ours, plain)
    token, plain_token = (_at(run.token_ids, position) for run in (ours, plain))
    pair = [one for one in (plain_token, token) if one is not None]
    differ = position is not None and len(pair) == 2
    return Difference(
        verdict=verdict,
        because=because,
        position=position,
        token=token,
        plain_token=plain_token,
        logits={"plain": _pair(plain, position, pair), "heads": _pair(ours, position, pair)} if differ else None,
        gap=gaps[0] if gaps else None,
        gap_with_heads=gaps[1] if gaps else None,
        allowed_gap=allowed_gap,
        first_wrong=first_wrong,
        first_wrong_token=_at(ours.token_ids, first_wrong),
        shift=float(shifts.max()) if len(shifts) else 0.0,
        allowed_shift=allowed_shift,
        rounding=rounding,
        full_forward_token=_full_forward(target, prompt, plain.token_ids[:position]) if differ else None,
        token_ids=ours.token_ids,
        plain_token_ids=plain.token_ids,
        words=_words(tokenizer, ours.token_ids, plain.token_ids, position),
    )


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Index of the first token that differs, or at which only one of the texts has ended; `None` for equal texts."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _verdict(
    position: int | None,
    both: int,
    first_wrong: int | None,
    unchosen: int | None,
    gaps: tuple[float, float, float] | None,
    allowed_gap: float,
    ours: _Run,
    plain: _Run,
) -> tuple[str, str]:
    if unchosen is not None:
        token = ours.token_ids[unchosen]
        return "bug", f"new token {unchosen} ({token}) was taken although the scores favour another token"
    if first_wrong is not None:
        return "bug", (
            f"logits of the rounds differ by more than rounding from those of plain decoding, first at new token "
            f"{first_wrong}; the mask, positions or cache of the verifying forward are wrong"
        )
    if position is None:
        return "same", f"both texts are the same {len(plain.token_ids)} tokens"
    if position >= both or gaps is None:
        return "bug", f"one text ends after {both} tokens and the other continues"
    if gaps[2] > allowed_gap:
        return "bug", (
            f"the plain favourite leads by {gaps[2]:.3g}, which is more than rounding explains ({allowed_gap:.3g} at "
            "most)"
        )
    return "tie", (
        f"at new token {position} the two favourites are {gaps[2]:.3g} apart, and rounding in a forward over several "
        f"tokens explains such a gap (up to {allowed_gap:.3g}); both texts are equally the target's"
    )


def _gaps(plain: _Run, ours: _Run, position: int) -> tuple[float, float, float]:
    """Lead of the plain token over ours, in the plain logits, in the logits with heads, and in the plain scores."""
    pair = [plain.token_ids[position], ours.token_ids[position]]
    sides = [(*_pair(run, position, pair),) for run in (plain, ours)]
    scores = plain.scores[position, pair].tolist()
    return sides[0][0] - sides[0][1], sides[1][0] - sides[1][1], scores[0] - scores[1]


def _pair(run: _Run, position: int | None, pair: list[int]) -> tuple[float, float]:
    first, second = run.logits[position, pair].tolist()
    return first, second


def _at(token_ids: list[int], position: int | None) -> int | None:
    return None if position is None or position >= len(token_ids) else token_ids[position]


def _full_forward(target: PreTrainedModel, prompt: torch.Tensor, token_ids: list[int]) -> int:
    text = torch.cat([prompt, torch.tensor([token_ids], dtype=torch.long, device=prompt.device)], dim=1)
    return int(target(input_ids=text, attention_mask=torch.ones_like(text), use_cache=False).logits[0, -1].argmax())


def _words(
    tokenizer: PreTrainedTokenizerBase | None, ours: list[int], plain: list[int], position: int | None
) -> dict[str, str] | None:
    if tokenizer is None or position is None:
        return None
    around = slice(max(0, position - 8), position + 8)
    return {"with heads": str(tokenizer.decode(ours[around])), "plainly": str(tokenizer.decode(plain[around]))}
