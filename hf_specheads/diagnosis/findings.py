"""Rules that turn measurements into causes: what is wrong, by how much, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from .groups import Group
from .noise import Noise
from .trials import CLEAR_LENGTH, Score, Trial

LOADED, TRAINED_FOR, TRAINED = "loaded wrongly", "trained for something else", "trained too little or wrongly"
UNKNOWN = "loaded wrongly for a reason that was not tried, or trained too little"
KIND = {
    "taps": LOADED, "norm flags": LOADED, "rope": LOADED, "draft vocabulary": LOADED, "token shift": LOADED,
    "damaged weights": LOADED, "serving": LOADED, "row order": LOADED, "anchor slot": LOADED, "block mask": LOADED,
    "mask token": LOADED, "embedding scale": LOADED, "attention shape": LOADED,
    "activation": LOADED, "norm weights": LOADED, "window": LOADED, "another target": TRAINED_FOR,
    "mode": TRAINED_FOR, "turns": TRAINED_FOR, "context": TRAINED_FOR, "not text": TRAINED_FOR,
    "coverage": TRAINED_FOR,
    "unexplained": UNKNOWN, "under-trained": TRAINED,
    "training labels": TRAINED, "not its own answers": TRAINED, "training gap": LOADED,
}  # fmt: skip
# Acceptance at position 1 below which heads are of little use: relative to predictability, and absolutely.
LOW, LOW_ANYWAY = 0.5, 0.1
GROUP_GAP, FEWEST = 0.15, 16
TURN_GAP = 0.25  # larger, because beginnings are harder for heads, which see less context there than the target
LABEL_GAP, STORED_GAP, SERVING_GAP = 0.1, 0.2, 0.25
# A gap between texts that heads were equally trained on must be wider by this factor, as it may come from the texts.
WITHIN_TRAINING = 2
GOOD, MUCH = 0.7, 0.15  # acceptance relative to predictability of good heads; a gain that is an explanation by itself
LEAST_COVERAGE = 0.85


@dataclass(frozen=True)
class Finding:
    """One cause of low acceptance.

    Attributes:
        cause: A key of [`KIND`].
        said: What is wrong, in one sentence with the evidence.
        mend: What to do about it.
        before, after: Acceptance of draft position 1 now, and after the repair if it was tried.
        tau: Teacher-forced tau now and after the repair.
        changes: Config fields that repair it.
        certain: Whether this is an error; otherwise it is a warning.
    """

    cause: str
    said: str
    mend: str
    before: float | None = None
    after: float | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    certain: bool = True
    tau: tuple[float, float] | None = None

    @property
    def kind(self) -> str:
        """Kind of the cause, with which the verdict begins."""
        return KIND[self.cause]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        return {"kind": self.kind, **asdict(self)}


@dataclass
class Facts:
    """All measurements, for the rules below.

    Attributes:
        score: Score with the current settings.
        trials: Trials of hypotheses, including those about the vocabulary.
        labels: Result of [`trials.label_offsets`].
        turn: Groups of the first and of the later tokens of answers.
        answers: Whether an answer begins where the prompts end, according to the tokenizer's chat template.
        contexts, modes: Groups by context and by form of the prompt; the given form comes first.
        special, given, own: Groups of special tokens, of the prompts' tokens, and of the target's own tokens.
        coverage: Share of the target's tokens that are in the draft vocabulary.
        identity: Evidence that the heads were made for another target, or `None`.
        stored: Result of [`stored.stored_numbers`].
        noise: Whether the prompts are text to the target; `None` if unknown.
        untouched: Whether norms and biases look freshly initialised; `None` if there are none.
        free_running, forced: tau of a chain in real rounds, and teacher-forced tau on the same texts.
        train_max_length: Longest text that the heads were trained on, if known.
    """

    score: Score
    trials: list[Trial]
    labels: dict[int, float]
    turn: tuple[Group, Group]
    contexts: list[Group]
    modes: list[Group]
    special: Group
    given: Group
    own: Group
    coverage: float
    identity: str | None
    stored: dict[str, Any]
    noise: Noise | None
    free_running: float | None
    forced: float | None
    train_max_length: int | None
    answers: bool = False
    untouched: bool | None = None

    @property
    def low(self) -> bool:
        """Whether acceptance is low, given how predictable the text is."""
        return self.score.position_1 < _least(self.own)


def _least(group: Group) -> float:
    """Acceptance below which heads are of little use."""
    return max(LOW * group.predictability, LOW_ANYWAY)


def _clearly_worse(here: Group, there: Group, gap: float, fewest: int = FEWEST, surely: float = 1 / 3) -> bool:
    """Whether acceptance is clearly lower in one group than in another, in which the heads are good.

    The heads must be good in the other group, because heads that are bad everywhere always fall short most where the
    text is most predictable.
    """
    if min(here.count, there.count) < fewest or there.acceptance.mean < _least(there):
        return False
    worse = here.worse_than(there)
    return worse.mean >= gap and worse.low >= gap * surely


def findings(facts: Facts) -> list[Finding]:
    """Returns the causes, the most certain first; empty if nothing is wrong."""
    elsewhere = [*_modes(facts), *_policy(facts)]
    settings = [one for one in _settings(facts) if not _good_elsewhere(one, elsewhere)]
    labels = list(_labels(facts, settings))  # wrong training labels explain more than any setting
    found = [*_identity(facts), *labels, *(() if labels else settings), *_serving(facts)]
    explained = bool(found)
    found += [*_texts(facts), *(one for one in elsewhere if one.cause == "mode" or not explained)]
    found += [*_turns(facts), *_contexts(facts), *_coverage(facts)]
    if facts.low and not explained and not elsewhere:
        found.append(_unexplained(facts))
    return found


def _good_elsewhere(setting: Finding, elsewhere: list[Finding]) -> bool:
    """Whether acceptance on other texts, with current settings, is at least that on these texts with another setting.

    In this case the heads are loaded correctly, and the setting only compensates a little for the kind of text.
    """
    return any((one.after or 0.0) >= (setting.after or 0.0) for one in elsewhere)


def _settings(facts: Facts) -> Iterator[Finding]:
    """Finds the best of the settings that clearly win; others may win because they compensate for the same error."""
    winners = [trial for trial in facts.trials if trial.wins and _explains(trial, facts)]
    if not winners:
        return
    best = max(winners, key=lambda trial: (round(trial.score.tau, 1), trial.score.log_likelihood or -math.inf))
    best = _simplest(best, winners)
    if best.alternative.setting == "lm_head":  # a wrong map from rows to tokens also looks like a damaged `lm_head`
        best = next((trial for trial in winners if trial.alternative.cause == "draft vocabulary"), best)
    one, now = best.alternative, facts.score
    yield Finding(
        one.cause,
        f"{one.setting}: {one.value} accepts {best.score.position_1:.1%} at position 1 and {best.score.tau:.2f} "
        f"tokens per round; {one.in_force} (in force) accepts {now.position_1:.1%} and {now.tau:.2f}",
        one.what_to_do,
        now.position_1,
        best.score.position_1,
        dict(one.changes),
        tau=(now.tau, best.score.tau),
    )


def _simplest(best: Trial, winners: list[Trial]) -> Trial:
    """Returns the first winner than which the best one is neither much nor certainly better.

    The list begins with the most frequent errors, and few texts hardly distinguish similar settings such as
    neighbouring hidden states.
    """
    for trial in winners:
        gain = best.score.gain_over(trial.score)
        surely = max(gain.length.low, -math.inf if gain.likelihood is None else gain.likelihood.low) > 0
        if gain.length.mean < CLEAR_LENGTH and not surely:
            return trial
    return best


def _explains(trial: Trial, facts: Facts) -> bool:
    """Whether heads are good with the setting, or much better; some settings improve bad heads only a little.

    A fitted vocabulary map must make them much better: it compensates for any systematic error a little, and a wrong
    map is wrong for nearly all tokens.
    """
    now, then = facts.score.position_1, trial.score.position_1
    much = then >= max(now + MUCH, 1.5 * now)
    if "fitted" in trial.alternative.value:
        return much
    return much or then >= GOOD * facts.own.predictability


def _labels(facts: Facts, settings: list[Finding]) -> Iterator[Finding]:
    right = facts.labels.get(0, 0.0)
    offset, share = max(facts.labels.items(), key=lambda item: item[1])
    explained = any((one.after or 0.0) >= share for one in settings)  # e.g. by reading drafts from the wrong slot
    if offset and share >= right + LABEL_GAP and not explained:
        yield Finding(
            "training labels",
            f"the first draft is the token at offset {offset:+d} from the right one in {share:.0%} of cases, and the "
            f"right one in {right:.0%}; the labels in training were off by {abs(offset)}",
            f"train with labels moved by {-offset:+d}, so that the label of a row with feature t and token t + 1 is "
            "token t + 2",
            right,
        )


def _identity(facts: Facts) -> Iterator[Finding]:
    if facts.identity:
        mend = (
            "load the target that the heads were trained with, in the same precision and without rotation, or train "
            "heads for this target"
        )
        yield Finding("another target", facts.identity, mend, facts.score.position_1)


def _serving(facts: Facts) -> Iterator[Finding]:
    if facts.free_running is None or facts.forced is None:
        return
    if facts.free_running - 1 < (1 - SERVING_GAP) * (facts.forced - 1) - 0.2:
        yield Finding(
            "serving",
            f"rounds accept {facts.free_running:.2f} tokens, but the forward of training over the same texts accepts "
            f"{facts.forced:.2f}; drafting does not compute what training computes",
            "report it with the output of `specheads doctor --json`",
            facts.score.position_1,
        )


def _texts(facts: Facts) -> Iterator[Finding]:
    noise = facts.noise
    if noise is not None and noise.found and facts.given.count >= FEWEST:
        yield Finding(
            "not text",
            f"the prompts are as unlikely to the target as their tokens in random order ({noise.prompts:.1f} and "
            f"{noise.shuffled:.1f} nats per token, plain text {noise.known:.1f}), so acceptance after them says "
            "nothing",
            "measure on prompts like those in use",
            facts.score.position_1,
            certain=False,
        )


def _modes(facts: Facts) -> Iterator[Finding]:
    if len(facts.modes) < 2:
        return
    given, others = facts.modes[0], facts.modes[1:]
    best = max(others, key=lambda group: given.worse_than(group).mean)
    if _clearly_worse(given, best, GROUP_GAP):
        yield Finding(
            "mode",
            f"with the prompts as {best.name}, {best.acceptance.mean:.0%} are accepted at position 1, but as "
            f"{given.name} (as given) only {given.acceptance.mean:.0%}; the heads were trained for the former",
            f"use the heads on {best.name}, or train them on prompts of the form '{given.name}'",
            given.acceptance.mean,
            best.acceptance.mean,
            certain=False,
        )


def _turns(facts: Facts) -> Iterator[Finding]:
    if not facts.answers:  # the beginning of other texts is as hard as the prompt is unusual
        return
    early, later = facts.turn
    if _clearly_worse(early, later, TURN_GAP):
        yield Finding(
            "turns",
            f"of the {early.name}, {early.acceptance.mean:.0%} are accepted at position 1, but of {later.name} "
            f"{later.acceptance.mean:.0%}, although the target is as sure of both; the beginning of answers was not "
            "supervised in training, or the chat templates differ",
            "check the loss mask of the training, and the text of the chat template before an answer",
            early.acceptance.mean,
            later.acceptance.mean,
            certain=False,
        )
    special = facts.special
    if special.count >= 4 and special.acceptance.mean < 0.1 and later.acceptance.mean > 0.4:
        yield Finding(
            "turns",
            f"of {special.count} special tokens that the target wrote, {special.acceptance.mean:.0%} were guessed, "
            f"but of other tokens {later.acceptance.mean:.0%}; the ends of turns were not supervised in training",
            "let the loss mask of the training include the tokens that end a turn",
            special.acceptance.mean,
            certain=False,
        )


def _contexts(facts: Facts) -> Iterator[Finding]:
    bins = [group for group in facts.contexts if group.count >= 2 * FEWEST]
    if len(bins) < 2:
        return
    first = bins[0]
    for group in bins[1:]:
        seen = group.longest is not None and (facts.train_max_length or 0) >= group.longest
        if _clearly_worse(group, first, GROUP_GAP * (WITHIN_TRAINING if seen else 1), 2 * FEWEST):
            known = (
                f"; the longest text in training had {facts.train_max_length} tokens" if facts.train_max_length else ""
            )
            yield Finding(
                "context",
                f"at {group.name} tokens, {group.acceptance.mean:.0%} are accepted at position 1, but at {first.name} "
                f"tokens {first.acceptance.mean:.0%}{known}",
                "train on texts of that length, or leave `heads.adaptive` on to decode plainly where drafts fail",
                group.acceptance.mean,
                first.acceptance.mean,
                certain=False,
            )
            return


def _coverage(facts: Facts) -> Iterator[Finding]:
    if facts.coverage < LEAST_COVERAGE:
        yield Finding(
            "coverage",
            f"only {facts.coverage:.0%} of the target's tokens are in the draft vocabulary, and no other tokens can "
            "be accepted",
            "train with a draft vocabulary that was counted on texts like these, or with a larger one",
            facts.score.position_1,
            certain=False,
        )


def _policy(facts: Facts) -> Iterator[Finding]:
    if _clearly_worse(facts.own, facts.given, 2 * GROUP_GAP, 4 * FEWEST, surely=1 / 2):
        yield Finding(
            "not its own answers",
            f"on text that the target did not write, {facts.given.acceptance.mean:.0%} of its favourites are guessed, "
            f"but on its own text {facts.own.acceptance.mean:.0%}; the heads were not trained on the target's answers",
            "let the target answer the prompts of the training set, and train on its answers",
            facts.own.acceptance.mean,
            facts.given.acceptance.mean,
            certain=False,
        )


def _unexplained(facts: Facts) -> Finding:
    score, stored = facts.score, facts.stored
    sure = facts.own.predictability
    low = f"{score.position_1:.0%} are accepted at position 1, on texts of which the target is {sure:.0%} sure"
    if "position_1" in stored and stored["position_1"] >= score.position_1 + STORED_GAP:
        return Finding(
            "training gap",
            f"{low}, but {stored['from']} says {stored['position_1']:.0%}, and no setting explains the gap; weights, "
            "target or forward are not those that were measured then",
            "compare the files with the published ones, and the target with that of the training",
            score.position_1,
        )
    seen = f"; the files say that the heads were trained on {stored['tokens']:,} tokens" if "tokens" in stored else ""
    if facts.untouched:
        return Finding(
            "under-trained",
            f"{low}, and norms and biases have their initial values; these heads were not trained",
            "train them on the target's own answers; hundreds of thousands of answers are usual",
            score.position_1,
        )
    return Finding(
        "unexplained",
        f"{low}, and nothing that was tried explains it{seen}",
        "compare the files with what was trained (target, code, missing tensors); if the files are right, train "
        "longer on the target's own answers, of which hundreds of thousands are usual",
        score.position_1,
    )
