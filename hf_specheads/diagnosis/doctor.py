"""Diagnoses the acceptance of heads on the user's own target: one pass over its texts, many hypotheses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UnsupportedGenerationError, WrongTargetError
from ..heads.base import DraftHead
from ..metrics import acceptance_length
from ..target.positions import context_limit
from ..target.statistics import FeatureStatistics, statistics_problem
from ..texts import Text
from ..tuning.turns import take_turns, timed_generation
from .diagnosis import Diagnosis
from .evidence import Evidence, Level, capture, continue_texts, prompts_of
from .findings import Facts, findings
from .groups import (
    Group,
    begins_turns,
    by_context,
    by_turn,
    coverage,
    given_mode,
    given_text,
    group_of,
    modes,
    special_tokens,
)
from .noise import measure_noise
from .stored import stored_numbers, untouched
from .teacher_forced import Drafts, draft_everywhere, guessed_text, own_text
from .trials import Score, label_offsets, mapping_trials, try_all

POSITIONS = 4  # draft positions that hypotheses are scored on
MODE_TOKENS = 64  # new tokens per prompt in another mode
RUN_PROMPTS, RUN_TOKENS = 4, 64  # prompts, and new tokens of each, for real rounds
LONGEST_PROMPT = 4096


@torch.no_grad()
def diagnose(
    target: PreTrainedModel,
    heads: DraftHead,
    prompts: Sequence[Text],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 256,
    positions: int = POSITIONS,
    speed: bool = True,
    evidence: Evidence | None = None,
) -> Diagnosis:
    """Finds out why few drafts are accepted.

    The target's own texts and hidden states are captured once, and every setting that the files do not determine is
    tried on them.

    Args:
        target: The target.
        heads: Loaded heads. If they were made for another target, this is among the findings.
        prompts: Strings, chats or token ids; 8 are enough for effects that matter.
        tokenizer: Tokenizer of the target, for strings and chats, and for trying other forms of the prompts.
        max_new_tokens: Number of tokens that the target writes per prompt.
        positions: Number of draft positions to examine.
        speed: Also run real rounds, to measure tau in use and the speed-up.
        evidence: Result of [`gather`] for this target and these prompts, for diagnosing several heads.

    Returns:
        The diagnosis; `print(...)` shows it as a page. The heads are left unchanged, but bound to the target.

    Raises:
        WrongTargetError: If the sizes of the heads do not fit the target.
        ValueError: If there are no prompts, or the target ends all texts at once.
    """
    started = time.perf_counter()
    if not prompts:
        raise ValueError("heads are diagnosed on prompts: expected at least one, got none.")
    with bound_anyway(heads, target) as wrong_target, _as_it_drafts(heads):
        if evidence is None:
            evidence = gather(target, prompts, tokenizer, max_new_tokens)
        drafts, facts = measure(target, heads, evidence, prompts, tokenizer, positions, wrong_target)
        runs = _rounds(target, heads, evidence, drafts.positions) if speed else {}
        facts.free_running, facts.forced = runs.get("chain"), runs.get("forced")
        return Diagnosis(
            findings=findings(facts),
            facts=facts,
            positions=_conditional(drafts, evidence),
            chain=_ceiling_chain(facts, runs),
            heads=heads,
            target_name=target.config.name_or_path or type(target).__name__,
            texts=len(evidence.lengths),
            tokens=int(guessed_text(drafts, evidence).sum()),
            problems=runs.get("problems", []),
            seconds=time.perf_counter() - started,
        )


@contextmanager
def bound_anyway(heads: DraftHead, target: PreTrainedModel) -> Iterator[str | None]:
    """Binds heads to any target of fitting size; yields the reason if they were made for another target."""
    identity, adapter = heads.config.target, heads.config.target_adapter
    said = None
    try:
        heads.bind(target)
    except WrongTargetError as error:
        heads.check_sizes(target)
        said = str(error)
        heads.config.target = heads.config.target_adapter = None
        heads.bind(target)
    try:
        yield said
    finally:
        heads.config.target, heads.config.target_adapter = identity, adapter


@contextmanager
def _as_it_drafts(heads: DraftHead) -> Iterator[None]:
    training, adaptive = heads.training, heads.adaptive
    heads.eval()
    heads.adaptive = False
    try:
        yield
    finally:
        heads.train(training)
        heads.adaptive = adaptive


def gather(target: PreTrainedModel, prompts: Sequence[Text], tokenizer: Any, max_new_tokens: int) -> Evidence:
    """Generates the target's continuations of prompts, and captures its hidden states and predictions on them."""
    limit = context_limit(target)
    longest = LONGEST_PROMPT if limit is None else max(1, min(LONGEST_PROMPT, limit - max_new_tokens))
    given = prompts_of(prompts, tokenizer, longest)
    texts = continue_texts(target, given, max_new_tokens)
    pairs = [(text, ids.shape[1]) for text, ids in zip(texts, given, strict=True) if len(text) >= ids.shape[1] + 2]
    if not pairs:
        raise ValueError(
            f"the target ends its text after at most one token on all {len(given)} prompts; give other prompts, or "
            "chats if the target is a chat model."
        )
    return capture(target, [text for text, _ in pairs], [start for _, start in pairs])


def measure(
    target: PreTrainedModel,
    heads: DraftHead,
    evidence: Evidence,
    prompts: Sequence[Text],
    tokenizer: Any,
    positions: int,
    wrong_target: str | None,
) -> tuple[Drafts, Facts]:
    """Measures everything except real rounds."""
    positions = min(positions, _most_positions(heads))
    levels = tuple(heads.feature_layers)
    drafts = draft_everywhere(heads, evidence, levels, positions)
    score = Score.of(drafts, evidence)
    trials = try_all(heads, target, evidence, drafts.positions, score)
    trials += mapping_trials(heads, drafts, evidence, score)
    text = own_text(evidence, 0)
    own = group_of(given_mode(prompts), drafts, evidence, text)
    others = _other_modes(target, prompts, tokenizer)
    return drafts, Facts(
        score=score,
        trials=trials,
        labels=label_offsets(drafts, evidence),
        turn=by_turn(drafts, evidence),
        contexts=by_context(drafts, evidence),
        modes=[own, *(_group_of_mode(heads, *mode) for mode in others.items())],
        special=special_tokens(drafts, evidence, getattr(tokenizer, "all_special_ids", ())),
        given=given_text(drafts, evidence),
        own=own,
        coverage=coverage(heads, evidence),
        identity=wrong_target or _statistics_differ(heads, [evidence, *others.values()]),
        stored=stored_numbers(heads),
        noise=measure_noise(target, evidence, tokenizer),
        free_running=None,
        forced=None,
        train_max_length=heads.config.train_max_length,
        answers=begins_turns(prompts, tokenizer),
        untouched=untouched(heads),
    )


def _most_positions(heads: DraftHead) -> int:
    """Number of draft positions in use, since later ones may be untrained.

    For block drafters, the number must be possible with either first drafting slot.
    """
    most = heads.config.block_size - 1 if heads.trains_at_anchors else heads.max_draft_positions
    depth = heads.tree_config.depth
    return depth if most is None else min(depth, most)


def _statistics_differ(heads: DraftHead, forms: Sequence[Evidence]) -> str | None:
    """Says how the target's feature statistics differ from those stored with the heads in training, or `None`.

    The hidden states read in training are compared, which may differ from those read now. Unusual text also changes
    the features, so the target counts as the same if the statistics agree for any form of the prompts.
    """
    stored = heads.config.feature_statistics
    if not stored or not heads.feature_layers:
        return None
    levels = stored.get("levels") or heads.feature_layers
    if missing := [level for level in levels if level != -1 and level not in forms[0].states]:
        return f"the heads were trained on hidden state {missing[0]}, but the target has {forms[0].depth} layers"
    problems = [statistics_problem(stored, measured_statistics(evidence, levels)) for evidence in forms]
    if None in problems:
        return None
    return f"the target's features are not those of the training target: {problems[0]}"


def measured_statistics(evidence: Evidence, levels: Sequence[Level]) -> dict[str, Any]:
    """Statistics of some hidden states over the target's own texts."""
    statistics = FeatureStatistics(levels)
    features = evidence.features(levels)
    assert features is not None
    statistics.add(features, own_text(evidence, 0))
    found = statistics.to_dict()
    assert found is not None
    return found


def _other_modes(target: PreTrainedModel, prompts: Sequence[Text], tokenizer: Any) -> dict[str, Evidence]:
    """Evidence of the target's texts after the same prompts in other forms, by name of the form."""
    found = {}
    for name, texts in modes(prompts, tokenizer).items():
        with suppress(ValueError):  # the target writes nothing in this form
            found[name] = gather(target, texts, tokenizer, MODE_TOKENS)
    return found


def _group_of_mode(heads: DraftHead, name: str, evidence: Evidence) -> Group:
    drafts = draft_everywhere(heads, evidence, tuple(heads.feature_layers))
    return group_of(name, drafts, evidence, own_text(evidence, 0))


def _conditional(drafts: Drafts, evidence: Evidence) -> list[float]:
    """Teacher-forced pos-acc, from position 1."""
    from .teacher_forced import accepted

    count, roots = accepted(drafts, evidence)
    found = []
    for position in range(drafts.positions):
        reached = roots & (count >= position)
        if not bool(reached.any()):
            break
        found.append(float((count[reached] > position).float().mean()))
    return found


# ---------------------------------------------------------------------- real rounds
def _rounds(target: PreTrainedModel, heads: DraftHead, evidence: Evidence, depth: int) -> dict[str, Any]:
    """Runs real rounds on some of the prompts: measures tau of a chain and of the current tree, and the speed-up.

    Also computes teacher-forced tau of the same texts.
    """
    some = evidence.part(range(min(RUN_PROMPTS, len(evidence.lengths))))
    prompts = [some.token_ids[i, :start][None] for i, start in enumerate(some.starts)]
    longest = max(length - start for length, start in zip(some.lengths, some.starts, strict=True))
    new_tokens = min(RUN_TOKENS, longest)  # not beyond the captured texts
    sides = {"plain": None, "tree": heads.with_tree(), "chain": heads.with_tree(**_chain(depth))}
    stats: dict[str, list[list[int]]] = {"tree": [], "chain": []}

    def run(name: str, prompt: torch.Tensor, turn: int) -> tuple[int, float]:
        tokens, seconds = timed_generation(target, prompt, assistant_model=sides[name], max_new_tokens=new_tokens)
        side = sides[name]
        if side is not None and side.last_stats is not None:
            stats[name] += side.last_stats.num_accepted
        return len(tokens[0]), seconds

    def warm(name: str, prompt: torch.Tensor) -> None:
        timed_generation(target, prompt, assistant_model=sides[name], max_new_tokens=4)

    try:
        outcomes = take_turns(sides, prompts, run, 1, warm, what="rounds")
    except UnsupportedGenerationError as error:
        return {"problems": [str(error)]}
    seconds = {name: sum(one for _, one in runs[0]) for name, runs in outcomes.items()}
    found: dict[str, Any] = {name: acceptance_length(rows) for name, rows in stats.items() if any(rows)}
    found["speed_up"] = seconds["plain"] / max(seconds["tree"], 1e-9)
    if depth > 1:
        drafts = draft_everywhere(heads, _beginnings(some), tuple(heads.feature_layers), depth)
        found["forced"] = Score.of(drafts, _beginnings(some)).tau
    return found


def _beginnings(evidence: Evidence) -> Evidence:
    """Cuts the texts to the length of those in real rounds."""
    lengths = tuple(min(length, start + RUN_TOKENS)
                    for length, start in zip(evidence.lengths, evidence.starts, strict=True))  # fmt: skip
    return Evidence(evidence.token_ids, lengths, evidence.starts, evidence.states, evidence.favourites,
                    evidence.confidence, evidence.surprise)  # fmt: skip


def _chain(depth: int) -> dict[str, Any]:
    return {"kind": "chain", "depth": depth, "top_k": 1, "total_tokens": depth + 1}


def _ceiling_chain(facts: Facts, runs: dict[str, Any]) -> dict[str, float | None]:
    """Shows where acceptance is lost: each number bounds the next, except for trees, which offer more than a chain."""
    return {
        "draft vocabulary coverage": facts.coverage,
        "teacher-forced position 1": facts.score.position_1,
        "teacher-forced tau": facts.score.tau,
        "free-running tau (chain)": runs.get("chain"),
        "tau of the tree in force": runs.get("tree"),
        "speed-up": runs.get("speed_up"),
    }
