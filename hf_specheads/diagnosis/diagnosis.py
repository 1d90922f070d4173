"""Result of a diagnosis, as a page of text and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..heads.base import DraftHead
from .alternative import put_into_force
from .findings import Facts, Finding
from .groups import Group

SOUND = "accepts as trained"


@dataclass
class Diagnosis:
    """Result of a diagnosis.

    Attributes:
        findings: Causes, of which the first is the verdict; empty for sound heads.
        facts: All measurements.
        positions: Teacher-forced acceptance per draft position, given that all earlier ones were right.
        chain: Where acceptance is lost, from the draft vocabulary to the speed-up.
        heads: The heads that were diagnosed.
        target_name: Name of the target.
        texts, tokens: Number of the target's own texts, and of their tokens, that were examined.
        problems: Reasons why real rounds could not be run.
        seconds: Wall seconds of the diagnosis.
    """

    findings: list[Finding]
    facts: Facts
    positions: list[float]
    chain: dict[str, float | None]
    heads: DraftHead
    target_name: str
    texts: int
    tokens: int
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def verdict(self) -> str:
        """The verdict, in one line."""
        if self.sound:
            return SOUND
        return f"{self.findings[0].kind}: {self.findings[0].said}"

    @property
    def changes(self) -> dict[str, Any]:
        """Config fields that repair the heads; empty if no config field can."""
        return next((dict(one.changes) for one in self.findings if one.changes), {})

    def write(self, folder: str | Path) -> None:
        """Applies the settings that repair the heads, and saves the heads with them.

        Raises:
            ValueError: If no such settings were found.
        """
        if not self.changes:
            raise ValueError(
                f"no setting repairs these heads ({self.verdict}), so there is nothing to write; see `findings`."
            )
        put_into_force(self.heads, self.changes)
        self.heads.save_pretrained(folder)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        facts = self.facts
        return {
            "verdict": self.verdict,
            "sound": self.sound,
            "findings": [one.to_dict() for one in self.findings],
            "hypotheses": [
                {"setting": trial.alternative.setting, "value": trial.alternative.value,
                 "in_force": trial.alternative.in_force, "position_1": trial.score.position_1,
                 "tau": trial.score.tau if trial.whole else None,
                 "likelihood": trial.score.log_likelihood, "gain": trial.gain.to_dict(),
                 "wins": trial.wins} for trial in facts.trials
            ],
            "position_1": facts.score.position_1,
            "teacher_forced_pos_acc": self.positions,
            "ceiling_chain": self.chain,
            "groups": [group.to_dict() for group in self._groups()],
            "label_offsets": {f"{offset:+d}": share for offset, share in facts.labels.items()},
            "stored": facts.stored,
            "surprise": facts.noise and facts.noise.to_dict(),
            "target": self.target_name,
            "heads": self.heads.config.name_or_path,
            "method": self.heads.config.method,
            "texts": self.texts,
            "tokens": self.tokens,
            "problems": self.problems,
            "seconds": self.seconds,
        }  # fmt: skip

    def _groups(self) -> list[Group]:
        facts = self.facts
        groups = [*facts.modes, *facts.turn, *facts.contexts, facts.given, facts.special]
        return [group for group in groups if group.count]

    def __str__(self) -> str:
        facts = self.facts
        lines = [f"{self.heads.config.method} heads {self.heads.config.name_or_path or ''} on {self.target_name}, "
                 f"{self.texts} texts, {self.tokens} tokens written by the target, {self.seconds:.0f} s", "",
                 f"Verdict  {self.verdict}"]  # fmt: skip
        for one in self.findings[1:]:
            lines.append(f"{'Error' if one.certain else 'Warning'}  {one.kind}: {one.said}")
        for one in self.findings:
            lines.append(f"To do  {one.mend}")
        lines += [f"Problem  {problem}" for problem in self.problems]
        lines += [
            "",
            "Where acceptance is lost",
            *(f"  {name:28s}{_number(name, value)}" for name, value in self.chain.items()),
        ]
        by_position = "  ".join(f"{position}: {value:.2f}" for position, value in enumerate(self.positions, start=1))
        lines += [f"  {'per draft position':28s}{by_position}"]
        if "position_1" in facts.stored:
            lines += [f"  {'stored with the heads':28s}{facts.stored['position_1']:.2f} at position 1 "
                      f"({facts.stored['from']}; other prompts)"]  # fmt: skip
        lines += [
            "",
            "Settings that the files do not determine (position 1, tau, log-likelihood; for bad ones only position 1)",
            *self._table(),
            "",
            "By group (position 1)",
        ]
        lines += [
            f"  {group.name:30s}{group.acceptance}   {group.count} tokens, target certainty {group.predictability:.2f}"
            for group in self._groups()
        ]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        score = self.facts.score
        lines = [f"  {'current settings':58s}{score}"]
        for trial in sorted(self.facts.trials, key=lambda trial: trial.alternative.setting):
            words = f"{trial.alternative.setting}: {trial.alternative.value}"
            mark = "  <- better" if trial.wins else ""
            lines.append(f"  {words[:57]:58s}{trial.score.shown(trial.whole)}{mark}")
        return lines


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0%}" if "coverage" in name or "position" in name else f"{value:.2f}"


def names(findings: Sequence[Finding]) -> list[str]:
    """Names of the causes."""
    return [one.cause for one in findings]
