"""Questions that a measurement of acceptance answers: differences of tau between two heads, with their intervals.

The two heads of a question differ only in what it asks about; see `trainer/shipped_pair/runs.py`.
"""

from __future__ import annotations

from hf_specheads.bootstrap import Interval, difference_interval

from ..results import Result, footnote, markdown_table, number

Counts = tuple[list[float], list[float]]  # tokens and rounds of every prompt
SEED = "-seed"  # heads trained with another seed are called, for example, `poss3-seed1`
QUESTIONS = (
    ("HASS over EAGLE, equal compute", "hass", "eagle"),
    ("HASS over EAGLE, equal steps", "hass-equal-steps", "eagle"),
    ("POSS-3 over EAGLE, equal compute", "poss3", "eagle"),
    ("POSS-3 over HASS, equal compute", "poss3", "hass"),
    ("POSS-3 over HASS, equal steps", "poss3-equal-steps", "hass-equal-steps"),
    ("POSS-2 over POSS-3", "poss2", "poss3"),
    ("POSS-1 over POSS-3", "poss1", "poss3"),
    ("POSS-3 over one layer of the same size", "poss3", "control"),
    ("one layer of the size of POSS-3 over HASS", "control", "hass"),
    ("LoRA specialists over full ones", "poss3-lora", "poss3"),
    ("without the feature loss", "poss3-no-feature-loss", "poss3"),
    ("without the token loss", "poss3-no-token-loss", "poss3"),
    ("without the top-K loss", "poss3-no-top-k-loss", "poss3"),
    ("total variation instead of top-K", "poss3-total-variation", "poss3"),
    ("HASS with total variation", "hass-total-variation", "hass"),
    ("EAGLE with total variation", "eagle-total-variation", "eagle"),
    ("POSS-3 over HASS, both with total variation", "poss3-total-variation", "hass-total-variation"),
    ("fifteen times the compute, with total variation", "poss3-longer", "poss3-total-variation"),
    ("acceptance instead of top-K", "poss3-acceptance", "poss3"),
    ("the authors' masks", "poss3-upstream-masks", "poss3"),
    ("passes averaged instead of summed", "poss3-averaged-passes", "poss3"),
    ("POSS-3 from random weights", "poss3-cold", "poss3"),
    ("HASS from random weights", "hass-cold", "hass"),
    ("trained on the corpus's answers instead of the target's", "poss3-corpus", "poss3"),
    ("features and the current token instead of the next", "inputs-unshifted", "inputs-shifted"),
    ("features without any token", "inputs-feature", "inputs-shifted"),
    ("the next token without features", "inputs-token", "inputs-shifted"),
    ("EAGLE-3 over EAGLE", "eagle3", "eagle"),
    ("POSS-3 on EAGLE-3 over EAGLE-3", "poss3-eagle3", "eagle3"),
    ("DFlash over POSS-3", "dflash", "poss3"),
    ("DSpark over DFlash", "dspark", "dflash"),
    ("DSpark with twice the compute", "dspark-longer", "dspark"),
    ("DSpark with twice the compute over DFlash", "dspark-longer", "dflash"),
    ("P-EAGLE over EAGLE-3", "peagle", "eagle3"),
    ("Hydra++ over Hydra", "hydra-plus", "hydra"),
    ("Hydra over Medusa", "hydra", "medusa"),
)


def counts_as_text(counts: Counts) -> str:
    """Formats counts for a result file."""
    return " ".join(f"{tokens:.0f}/{rounds:.0f}" for tokens, rounds in zip(*counts, strict=True))


def counts_from(text: str) -> Counts:
    """Parses counts from a result file."""
    pairs = [one.split("/") for one in text.split()]
    return [float(tokens) for tokens, _ in pairs], [float(rounds) for _, rounds in pairs]


def difference(ours: Result, theirs: Result, depth: str) -> Interval:
    """Returns the difference of tau at one depth, paired by prompts, from the counts in a result."""
    return difference_interval(counts_from(ours[depth]["counts"]), counts_from(theirs[depth]["counts"]))


def verdict(found: Interval) -> str:
    """Puts the interval of a difference into words."""
    if found.low > 0:
        return "ahead"
    return "behind" if found.high < 0 else "not told apart"


def answers_table(result: Result) -> str:
    """Answers every question whose heads were measured, per seed. One table per mode, with the first tree."""
    tree, deepest = next(iter(result["trees"])), str(result["depths"][-1])
    parts = []
    for mode in result["modes"]:
        found = {name: facts["measured"][mode][tree] for name, facts in result["heads"].items()}
        rows = [_row(words, found[ours], found[theirs], result) for words, ours, theirs in _asked(found)]
        header = [f"difference of tau, {mode}, {tree}", *(f"depth {depth}" for depth in result["depths"])]
        parts += [markdown_table([*header, f"at depth {deepest}"], rows)] if rows else []
    note = "95 % intervals over {num_prompts} prompts, paired by prompts; every question is tested by itself"
    return "\n".join(parts) + footnote(result, note)


def _asked(found: dict[str, Result]) -> list[tuple[str, str, str]]:
    """Returns wording and both heads of every question that can be answered, once per seed that both heads have."""
    seeds = sorted({name.rpartition(SEED)[2] for name in found if SEED in name})
    suffixes = {"": "", **{f"{SEED}{seed}": f", seed {seed}" for seed in seeds}}
    return [
        (words + said, ours + suffix, theirs + suffix)
        for words, ours, theirs in QUESTIONS
        for suffix, said in suffixes.items()
        if ours + suffix in found and theirs + suffix in found
    ]


def _row(words: str, ours: Result, theirs: Result, result: Result) -> list[str]:
    cells = [difference(ours, theirs, str(depth)) for depth in result["depths"]]
    return [words, *(f"{number(c.mean)} ({number(c.low)} to {number(c.high)})" for c in cells), verdict(cells[-1])]
