"""Results (the dicts in `benchmarks/results/*.json`) as Markdown. Pure functions, so the README can be re-rendered."""

from __future__ import annotations

from collections.abc import Callable

from . import engine_tables
from .formatting import Result, footnote, markdown_table, millions, number, percent, pos_acc_text, tree_text

TERA = 1e12


def speedup(result: Result) -> str:
    """One table per prompt set."""
    text = ""
    for name, sides in result["prompt_sets"].items():
        rows = [
            (
                side,
                number(s["tokens_per_second"], 0),
                f"{number(s['speed_up'], 2, 'x')} ({'-'.join(number(r) for r in s['speed_up_range'])})",
                number(s.get("acceptance_length")),
                pos_acc_text(s.get("pos_acc")),
                percent(s["forwards_saved"]),
                "yes" if s["identical"] else f"no ({len(s['differing_prompts'])} differ)",
            )
            for side, s in sides.items()
        ]
        header = (name, "tokens/s", "speed-up (range)", "tau", "pos-acc", "forwards saved", "same text")
        text += markdown_table(header, rows) + "\n"
    trees = "; ".join(f"{name}: {tree_text(tree)}" for name, tree in result["trees"].items())
    return text.rstrip("\n") + "\n" + footnote(
        result, f"Greedy, {result['dtype']}, batch 1, at most {result['max_new_tokens']} new tokens, "
        f"median of {result['repeats']} interleaved repeats", f"draft trees: {trees}",
    )  # fmt: skip


def acceptance(result: Result) -> str:
    """One table per family of trees: rows are heads, columns are depths."""
    depths = result["depths"]
    text = ""
    for family, tree in result["families"].items():
        rows = []
        for name, facts in result["heads"].items():
            cells = [facts["measured"][family][str(depth)] for depth in depths]
            flops = number(facts.get("training_flops", 0) / TERA or None, 1)
            base = facts.get("starts_from")
            row = [name, millions(facts["parameters"]), f"{flops} after {base}" if base else flops]
            row += [f"{number(c['acceptance_length'])} ± {number(c['standard_error'])}" for c in cells]
            rows.append([*row, pos_acc_text(cells[-1]["pos_acc"])])
        header = [f"{tree['total_tokens']} nodes, top-k {tree['top_k']}", "parameters", "training TFLOP"]
        header += [f"tau, depth {depth}" for depth in depths] + [f"pos-acc, depth {depths[-1]}"]
        text += markdown_table(header, rows) + "\n"
    text += _differences(result)
    sets = ", ".join(result["prompts"])
    return text.rstrip("\n") + "\n" + footnote(result, f"Greedy, prompts: {sets} ({result['num_prompts']})")


def _differences(result: Result) -> str:
    """Paired differences of tau to the first head."""
    names, depths = list(result["heads"]), result["depths"]
    rows = []
    for name in names[1:]:
        for family in result["families"]:
            cells = [result["heads"][name]["measured"][family][str(depth)]["difference"] for depth in depths]
            rows.append([name, family, *(f"{c['mean']:+.2f} [{c['low']:+.2f}, {c['high']:+.2f}]" for c in cells)])
    if not rows:
        return ""
    header = [f"tau minus {names[0]}'s", "tree", *(f"depth {depth}" for depth in depths)]
    return markdown_table(header, rows) + "\n(95 % bootstrap intervals over prompts, paired.)\n"


def methods(result: Result) -> str:
    """One row per head: what it is, what it cost, what it accepts and what that buys, by mode."""
    modes = result["modes"]
    header = ["heads", "parameters", "training TFLOP", "minutes"]
    header += [f"{what}, {mode}" for mode in modes for what in ("tau", "speed-up")]
    header += [f"pos-acc 1 to {result['wide_tree']['depth']}", "draft tree"]
    rows = []
    for name, facts in sorted(result["heads"].items(), key=lambda item: -_speed_up(result, item[0])):
        flops, hours, base = facts.get("training_flops"), facts.get("hours"), facts.get("starts_from")
        compute = number(flops and flops / TERA, 1) + (f" after {base}" if base else "")
        row = [name, millions(facts["parameters"]), compute, number(hours and 60 * hours, 0)]
        for sides in modes.values():
            side = sides[name]
            low, high = side["speed_up_range"]
            row += [number(side["acceptance_length"]), f"{number(side['speed_up'])}x ({number(low)}-{number(high)})"]
        rows.append([*row, pos_acc_text(facts["wide"]["pos_acc"]), tree_text(facts["tree"])])
    sets = ", ".join(result["prompts"])
    return markdown_table(header, rows) + footnote(
        result, f"{result['dtype']}, batch 1, at most {result['max_new_tokens']} new tokens, {result['num_prompts']} "
        f"prompts ({sets}), median of {result['repeats']} interleaved repeats",
        f"pos-acc with {result['wide_tree']['total_tokens']} nodes, greedy, as deep as the heads draft",
    )  # fmt: skip


def _speed_up(result: Result, name: str) -> float:
    """Of the first mode measured."""
    return next(iter(result["modes"].values()))[name]["speed_up"]


def tree_kinds(result: Result) -> str:
    """One row per head and kind of tree; for the optimal tree also what the search expected."""
    rows = []
    for name, kinds in result["heads"].items():
        for kind, s in kinds.items():
            expected = s.get("expected")
            note = (
                f"expected {number(expected['acceptance_length'])}, {number(expected['speed_up'])}x"
                if expected
                else ""
            )
            rows.append((name, kind, tree_text(s["tree"]), number(s["acceptance_length"]),
                         f"{number(s['speed_up'])}x ({'-'.join(number(r) for r in s['speed_up_range'])})",
                         "yes" if s["identical"] else "no", note))  # fmt: skip
    header = ("heads", "kind", "draft tree", "tau", "speed-up (range)", "same text", "search")
    return markdown_table(header, rows) + footnote(
        result, f"Greedy, {result['dtype']}, batch 1, {result['num_prompts']} prompts",
        f"at most {result['max_new_tokens']} new tokens, median of {result['repeats']} interleaved repeats",
    )  # fmt: skip


def round_(result: Result) -> str:
    """Milliseconds of a round by stage."""
    rows = [
        (stage, number(s["milliseconds"], 2), number(s["bare_forwards"], 2), number(s["outside"], 2),
         percent(s["outside"] / result["round_milliseconds"]))
        for stage, s in result["stages"].items()
    ]  # fmt: skip
    table = markdown_table(("stage of a round", "ms", "bare forwards, ms", "outside, ms", "outside / round"), rows)
    return table + footnote(
        result, f"{result['heads']}, {tree_text(result['tree'])}, {result['rounds']} rounds",
        f"bare target forward of {result['nodes']} nodes replayed on a fresh cache: "
        f"{number(result['replayed_target_milliseconds'])} ms",
    )  # fmt: skip


def choose_tree(result: Result) -> str:
    """The fastest trees."""
    rows = [
        (tree_text(row["tree"]), number(row["tokens_per_second"], 0), number(row["speed_up"], 2, "x"),
         number(row["acceptance_length"]))
        for row in result["ranking"]
    ]  # fmt: skip
    return markdown_table(("draft tree", "tokens/s", "speed-up", "tau"), rows) + footnote(
        result, f"{result['heads']}, the best of {result['candidates']} trees, prompts: {', '.join(result['prompts'])}"
    )


def n_alpha(result: Result) -> str:
    """One row per head, one column per number of drafted features."""
    rows = []
    for name, facts in result["heads"].items():
        cells = zip(facts["n_alpha"], facts["standard_error"], strict=True)
        row = [name, facts["inputs"] or "-", number(facts["trained_positions"], 0)]
        row += [f"{number(value, 3)} ± {number(error, 3)}" for value, error in cells]
        rows.append(row + ["-"] * (3 + result["max_n"] + 1 - len(row)))
    header = ["heads", "inputs", "trained positions", *(f"{n}-alpha" for n in range(result["max_n"] + 1))]
    sets = ", ".join(result["prompts"])
    return markdown_table(header, rows) + footnote(
        result, f"Greedy, {result['positions']} positions of {result['num_prompts']} texts (prompts: {sets}), "
        "standard errors bootstrapped over texts",
    )  # fmt: skip


def training_curve(result: Result) -> str:
    """tau at a few shares of each run's own compute; the whole curve is in the JSON and in the figure."""
    axis = result["axis"]
    unit, scale = ("TFLOP", TERA) if axis == "training_flops" else (axis, 1)
    rows = []
    for name, curve in result["curves"].items():
        points = curve["points"]
        taus = " ".join(number(point["acceptance_length"]) for point in points)
        spent = number(points[-1][axis] / scale, 1)
        rows.append((name, curve["starts_from"] or "random", str(points[-1]["step"]), spent, taus))
    header = ("heads", "started from", "steps", f"{unit}, warm start included", "tau along the run")
    return markdown_table(header, rows) + footnote(result)


def bench_train(result: Result) -> str:
    """One row per family, length and depth: seconds and peak memory of a step, ours and the dense one's."""
    rows = []
    for cell in result["cells"]:
        dense, ours = cell["sides"]["dense"], cell["sides"]["ours"]
        apart = cell["sides"].get("per_pass", {})
        rows.append((
            cell["family"], str(cell["rows"]), str(cell["passes"]), _seconds(dense), _seconds(ours),
            _range(ours.get("speed_up")), number(_megabytes(dense), 0), number(_megabytes(ours), 0),
            percent(ours.get("memory_share")), _range(apart.get("speed_up")), percent(apart.get("memory_share")),
            percent(cell["products_seconds"] / ours["seconds"]["median"]),
        ))  # fmt: skip
    header = ("heads", "rows T", "passes D", "dense, s", "ours, s", "dense / ours (range)", "dense, MB", "ours, MB",
              "ours / dense", "per pass: dense / ours", "per pass: memory", "products / ours")  # fmt: skip
    first = result["cells"][0]
    return markdown_table(header, rows) + footnote(
        result, f"Forward and backward, batch {result['batch']}, hidden size {first['hidden_size']}, vocabulary "
        f"{first['vocab_size']}, median of {result['repeats']} alternating repeats",
        "a dash: the dense step needs more memory than the machine has",
    )  # fmt: skip


def _seconds(side: Result) -> str:
    return number(side["seconds"] and side["seconds"]["median"])


def _range(ratio: Result | None) -> str:
    return f"{ratio['median']:.2f}x ({ratio['low']:.2f}-{ratio['high']:.2f})" if ratio else "-"


def _megabytes(side: Result) -> float | None:
    return None if side["peak_bytes"] is None else side["peak_bytes"] / 1e6


def bench_tune(result: Result) -> str:
    """Tuned, grid's best, saved, default and published trees of each head."""
    rows = [
        [head, name, tree_text(row["tree"]), number(row["acceptance_length"]), number(row["tokens_per_second"], 1),
         number(row["speed_up"], suffix="x"), "yes" if row["identical"] else "no"]
        for head, found in result["heads"].items() for name, row in found["trees"].items()
    ]  # fmt: skip
    header = ["heads", "tree", "", "tau", "tokens/s", "speed-up", "same text"]
    notes = [
        f"{head}: tuned / best of {found['grid_size']} = {number(found['tuned_over_grid'], 3)}, "
        f"{found['candidates']} trees considered in {number(found['tuning_seconds'], 0)} s"
        for head, found in result["heads"].items()
    ]
    return markdown_table(header, rows) + footnote(
        result, *notes, f"{result['num_prompts']} prompts, {result['dtype']}"
    )


def bench_vocabulary(result: Result) -> str:
    """Heads by size of their draft vocabulary; the random target, where only times mean something."""
    rows = [
        [head, size, percent(row["coverage"]), number(row["acceptance_length"]), number(row["draft_milliseconds"]),
         number(row["tokens_per_second"], 1), number(row["speed_up"], suffix="x"), "yes" if row["identical"] else "no"]
        for head, sizes in result["heads"].items() for size, row in sizes.items()
    ]  # fmt: skip
    header = ["heads", "draft vocabulary", "of the counted", "tau", "draft ms", "tokens/s", "speed-up", "same text"]
    text = markdown_table(header, rows)
    if random := result["random"]:
        times = random["draft_milliseconds"].items()
        text += "\n" + markdown_table(["draft vocabulary", "draft ms"], [[size, number(ms)] for size, ms in times])
        text += (
            f"\nA random target of {millions(random['parameters'])} parameters and {random['vocabulary']} tokens, "
            f"{tree_text(random['tree'])}; its own forward over 5 tokens takes "
            f"{number(random['target_milliseconds'])} ms. Acceptance means nothing there.\n"
        )
    return text + footnote(result, f"{result['counted_tokens']} tokens counted, {result['dtype']}")


def bench_quantised(result: Result) -> str:
    """Formats of the target's weights, plain and with heads."""
    rows = [
        [name, side, number(row.get("acceptance_length")), number(row["tokens_per_second"], 1),
         number(row["speed_up"], suffix="x"), "yes" if row["identical"] else "no",
         ", ".join(number(gap, 3) for gap in row.get("gaps", ())) or "-"]
        for name, sides in result["formats"].items() for side, row in sides.items()
    ]  # fmt: skip
    header = ["weights", "", "tau", "tokens/s", "over plain", "same text", "gaps"]
    return markdown_table(header, rows) + footnote(result, f"{result['num_prompts']} prompts, {result['dtype']}")


RENDERERS: dict[str, Callable[[Result], str]] = {
    "methods": methods,
    "tree_kinds": tree_kinds,
    "speedup": speedup,
    "acceptance": acceptance,
    "round": round_,
    "round_shape": round_,
    "choose_tree": choose_tree,
    "n_alpha": n_alpha,
    "training_curve": training_curve,
    "bench_train": bench_train,
    "bench_tune": bench_tune,
    "bench_vocabulary": bench_vocabulary,
    "bench_quantised": bench_quantised,
    "batch": engine_tables.batch,
    "context": engine_tables.context,
    "cache": engine_tables.cache,
    "compile": engine_tables.compile_,
    "compile_floor": engine_tables.compile_floor,
    "compile_shape": engine_tables.compile_,
}
