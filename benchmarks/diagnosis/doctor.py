"""Verdicts of `specheads doctor` on planted causes of low acceptance, and on sound heads.

    python -m benchmarks doctor --of shipped
    python -m benchmarks doctor --of tiny

Every planting changes heads, their target, their training or the prompts as one of the causes would. The doctor gets
only the result. Most causes are planted in the shipped pair; those that need a training of their own, and those of
block drafters, are planted in a tiny pair. `before` is teacher-forced acceptance as planted, and `after` under the
setting that the doctor proposes. On sound heads the doctor must report nothing. The largest gain of sound heads under
any alternative and the smallest gain of mended ones show whether the doctor's thresholds are well placed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from hf_specheads import diagnose
from hf_specheads.diagnosis.diagnosis import Diagnosis
from hf_specheads.diagnosis.trials import CLEAR_FIRST, CLEAR_LENGTH, CLEAR_LIKELIHOOD

from ..results import Result, footnote, markdown_table, number, percent
from ..setup import add_generation_arguments, display_name, load_prompts, load_target
from .lab import Case, Lab, recorded_names
from .plantings import PLANTINGS, Planting
from .tiny import METHOD_OPTIONS, tiny_target

SOURCES = ("hf_specheads", "hf_specheads/diagnosis", "benchmarks/diagnosis")
OTHER_TARGETS, OTHER_METHODS = (1, 2, 3), ("eagle3", "dflash")
PLANTED_AGAIN = ("labels off by one, tiny eagle3", "hidden states one layer up, tiny dflash")
MEASURES = ("position_1", "tau", "likelihood")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the heads, the folder of the pair and the amount of text."""
    said = "shipped heads, or tiny ones and those recorded from the authors' code"
    parser.add_argument("--of", choices=("shipped", "tiny"), default="shipped", help=said)
    parser.add_argument("--pair", type=Path, default=Path("model_cards"), help="folder of the heads' folders")
    add_generation_arguments(parser, None, ["chats_tuning"], repeats=None)
    parser.set_defaults(limit=6, max_new_tokens=64)


def measure(args: argparse.Namespace) -> Result:
    """Examines all plantings and all sound heads."""
    if shipped := args.of == "shipped":
        check_shipped(args.pair)
    target, tokenizer = load_target(args) if shipped else (None, None)
    prompts = load_prompts(args.prompts, tokenizer, args.limit) if shipped else []
    lab = Lab(target, [inputs["input_ids"] for inputs in prompts], args.max_new_tokens, args.pair, tokenizer)
    sound = {}
    for name, case in _sound_shipped(lab) if shipped else _sound_tiny(lab):
        sound[name] = said(examined(case))
        print(f"sound {name}: {sound[name]['causes']}")
    planted = []
    for planting, where in _plantings(lab, shipped):
        planted.append(_row(planting, examined(planting.make(where))))
        print(f"{planting.planted}, {planting.heads}: {planted[-1]['causes']}")
    return {
        "of": args.of, "num_prompts": len(prompts), "planted": planted, "sound": sound,
        "named": sum(row["named"] for row in planted), "margins": _margins(planted, sound.values()),
        "false_alarms": sum(bool(one["causes"]) for one in sound.values()),
    }  # fmt: skip


def check_shipped(pair: Path) -> None:
    """Checks, before any work, that the shipped heads exist that causes are planted in.

    Raises:
        ValueError: if some are missing.
    """
    wanted = {one.heads for one in PLANTINGS if not one.heads.startswith("tiny")}
    if missing := sorted(name for name in wanted if not (pair / name / "config.json").is_file()):
        raise ValueError(
            f"{pair} has no heads {', '.join(missing)}, in which causes are planted; name a folder with `--pair` that "
            f"has {', '.join(sorted(wanted))}."
        )


def variant(args: argparse.Namespace) -> str:
    """Stores the results of shipped and of tiny heads under names of their own."""
    return args.of


def _sound_shipped(lab: Lab) -> Iterator[tuple[str, Case]]:
    for folder in lab.folders():
        yield display_name(folder), lab.shipped(Path(folder).name)


def _sound_tiny(lab: Lab) -> Iterator[tuple[str, Case]]:
    for name in recorded_names():
        if (case := lab.recorded(name)) is not None:
            yield f"recorded {name}", case
    for method in ("eagle", *METHOD_OPTIONS):
        yield f"tiny {method}", lab.tiny(method)
    for seed, other in _others(lab):
        for method in OTHER_METHODS:
            yield f"tiny {method} of target {seed}", other.tiny(method)


def _others(lab: Lab) -> Iterator[tuple[int, Lab]]:
    """Yields tiny targets other than the one on which the thresholds were chosen."""
    for seed in OTHER_TARGETS:
        yield seed, Lab(lab.target, lab.prompts, lab.new_tokens, lab.pair, tiny_target=tiny_target(seed))


def _plantings(lab: Lab, shipped: bool) -> Iterator[tuple[Planting, Lab]]:
    """Yields the plantings of the selected pair; for tiny ones, also some again on other targets."""
    for one in PLANTINGS:
        if shipped != one.heads.startswith("tiny"):
            yield one, lab
    for seed, other in () if shipped else _others(lab):
        for one in PLANTINGS:
            if f"{one.planted}, {one.heads}" in PLANTED_AGAIN:
                yield replace(one, heads=f"{one.heads} of target {seed}"), other


def examined(case: Case) -> Diagnosis:
    """Returns the doctor's diagnosis of a case."""
    return diagnose(
        case.target, case.heads, case.prompts, tokenizer=case.tokenizer, evidence=case.evidence,
        max_new_tokens=case.new_tokens, positions=case.positions, speed=False,
    )  # fmt: skip


def said(found: Diagnosis) -> Result:
    """Summarises a diagnosis: causes, acceptance, and the largest gain of any alternative by measure."""
    gains = [trial.gain.to_dict() for trial in found.facts.trials]
    return {
        "causes": [one.cause for one in found.findings],
        "before": found.facts.score.position_1,
        "tau": found.facts.score.tau,
        "most": {name: max((one[name][0] for one in gains if one[name]), default=None) for name in MEASURES},
    }


def _row(planting: Planting, found: Diagnosis) -> Result:
    first = found.findings[0] if found.findings else None
    taus = first and first.tau
    winner = next((trial for trial in found.facts.trials if taus and trial.wins and trial.score.tau == taus[1]), None)
    return {
        "number": planting.number,
        "planted": planting.planted,
        "heads": planting.heads,
        "named": first is not None and first.cause in planting.named,
        "verdict": found.verdict,
        "mend": first and first.mend,
        "after": first and first.after,
        "tau_after": first and first.tau and first.tau[1],
        "gain": winner and winner.gain.to_dict(),
        **said(found),
    }


def _margins(planted: Iterable[Result], sound: Iterable[Result]) -> Result:
    """Returns the largest gain of sound heads under any alternative, and the smallest gain of planted heads by their
    mend."""
    sound, mended = list(sound), [row["gain"] for row in planted if row["gain"] and row["named"]]
    thresholds = dict(zip(MEASURES, (CLEAR_FIRST, CLEAR_LENGTH, CLEAR_LIKELIHOOD), strict=True))
    return {
        name: {
            "sound_most": max((one["most"][name] for one in sound if one["most"][name] is not None), default=None),
            "mended_least": min((gain[name][0] for gain in mended if gain[name]), default=None),
            "threshold": thresholds[name],
        }
        for name in MEASURES
    }


def texts_agree(result: Result) -> bool:
    """Tells whether every planted cause was named first, and none was named for sound heads."""
    return result["named"] == len(result["planted"]) and not result["false_alarms"]


def table(result: Result) -> str:
    """Plantings, then sound heads, then the margins between both."""
    rows = [
        (f"{row['number']}", row["planted"], row["heads"], ", ".join(row["causes"]) or "nothing",
         "yes" if row["named"] else "no", row["mend"] or "", _change(percent, row["before"], row["after"]),
         _change(number, row["tau"], row["tau_after"])) for row in result["planted"]
    ]  # fmt: skip
    header = ("cause", "planted", "in", "the doctor says", "named first", "mend", "position 1", "tau")
    lines = [markdown_table(header, rows)]
    names = ", ".join(f"{name} ({percent(one['before'])})" for name, one in result["sound"].items())
    alarms = f"False alarms on {len(result['sound'])} sound heads: {result['false_alarms']}"
    lines.append(f"{alarms}. Position 1 of {names}.\n")
    words = {"position_1": "position 1", "tau": "tau", "likelihood": "nats a token"}
    margins = [(words[name], *(_signed(one[key]) for key in ("sound_most", "threshold", "mended_least")))
               for name, one in result["margins"].items()]  # fmt: skip
    lines.append(markdown_table(("gain", "sound heads, at most", "clear from", "mended ones, at least"), margins))
    said = "{num_prompts} prompts, {max_new_tokens} tokens each, {dtype}"
    said = said if result["of"] == "shipped" else "tiny targets, float32"
    return "\n".join([*lines, footnote(result, said)])


def _change(shown: Callable[[float], str], before: float, after: float | None) -> str:
    return shown(before) if after is None else f"{shown(before)} → {shown(after)}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3f}"
