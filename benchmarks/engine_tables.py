"""Tables of the engine's benchmarks: batches, compiled rounds, contexts, caches."""

from __future__ import annotations

from .formatting import Result, footnote, markdown_table, number, percent


def batch(result: Result) -> str:
    """Rows are sides, columns batch sizes."""
    sizes = result["batch_sizes"]
    names = list(next(iter(sizes.values())))
    header = ["speed-up over plain at the same batch", *(f"batch {size}" for size in sizes), "tau", "same text"]
    rows = [["plain generate, tokens/s", *(number(one[names[0]]["tokens_per_second"], 0) for one in sizes.values()),
             "", ""]]  # fmt: skip
    for name in names[1:]:
        cells = [one[name] for one in sizes.values()]
        rows.append(
            [name]
            + [f"{number(c['speed_up'])}x ({'-'.join(number(r) for r in c['speed_up_range'])})" for c in cells]
            + [number(cells[0]["acceptance_length"]), "yes" if all(c["identical"] for c in cells) else "no"]
        )
    return markdown_table(header, rows) + footnote(
        result, f"Greedy, {result['dtype']}, {result['max_new_tokens']} new tokens per row, {result['num_prompts']} "
        f"prompts, median of {result['repeats']} repeats in turns; tau at the first batch size",
    )  # fmt: skip


def context(result: Result) -> str:
    """Rows are sides, columns lengths of the context."""
    lengths = result["lengths"]
    names = list(next(iter(lengths.values())))[1:]
    sampled = result["sampled"]
    header = ["speed-up (tau)", *(f"{length} tokens" for length in lengths)]
    header += [f"temperature {sampled['temperature']:g}, {sampled['length']} tokens", "plain steps there"]
    rows = []
    for name in names:
        cells = [one[name] for one in lengths.values()]
        drawn = sampled["sides"][name]
        row = [f"{number(c['speed_up'])}x ({number(c.get('acceptance_length'))})" for c in cells]
        last = f"{number(drawn['speed_up'])}x ({number(drawn.get('acceptance_length'))})"
        rows.append([name, *row, last, percent(drawn.get("plain_share"))])
    return markdown_table(header, rows) + footnote(
        result, f"{result['dtype']}, batch 1, {result['max_new_tokens']} new tokens, {result['num_prompts']} prompts, "
        f"heads trained on contexts of {result['trained_length']:g} tokens; tau counts the rounds that drafted; "
        f"slowest adaptive side {number(result['slowest_adaptive'])}x",
    )  # fmt: skip


def cache(result: Result) -> str:
    """Rows are lengths, columns numbers of nodes."""
    lengths = result["lengths"]
    nodes = list(next(iter(lengths.values())))
    header = ["context", *(f"{n} node{'s' * (n != '1')}: ms on slots, on DynamicCache, ratio" for n in nodes)]
    rows = [
        [f"{length} tokens"]
        + [
            f"{number(c['slots_milliseconds'], 1)}, {number(c['dynamic_milliseconds'], 1)}, {number(c['ratio'])}x"
            for c in cells.values()
        ]
        for length, cells in lengths.items()
    ]
    size = f"{result['parameters'] / 1e6:.0f} M parameters"
    return markdown_table(header, rows) + footnote(
        result, f"Random Llama of {size} and {result['layers']} layers, keys {result['key_value_width']} wide; "
        f"{result['dtype']}; whole rounds (forward and kept path), median of {result['rounds']} in turns",
    )  # fmt: skip


def compile_(result: Result) -> str:
    """Rows are sides."""
    text = ""
    for name, table in result["tables"].items():
        header = [name, "tokens/s", "/ plain eager", "/ plain compiled", "tau", "ms per round", "same text"]
        rows = [
            [
                side,
                number(s["tokens_per_second"], 1),
                f"{number(s['over_plain_eager'])}x",
                f"{number(s['over_plain_compiled'])}x",
                number(s.get("acceptance_length")),
                number(s.get("round_milliseconds"), 1),
                "yes" if s["identical"] else f"no ({s['differing']} of {result['num_prompts']} differ)",
            ]
            for side, s in table.items()
        ]
        text += markdown_table(header, rows) + "\n"
    if floor := result.get("floor"):
        text += floor_table(floor) + "\n"
    return text.rstrip("\n") + "\n" + footnote(
        result, f"Greedy, {result['dtype']}, batch 1, {result['max_new_tokens']} new tokens, {result['num_prompts']} "
        f"prompts, median of {result['repeats']} repeats in turns; first compiled calls took "
        f"{'; '.join(f'{name} {number(s, 0)} s' for name, s in result['compile_seconds'].items())}",
    )  # fmt: skip


def compile_floor(result: Result) -> str:
    """The floor alone."""
    return floor_table(result["floor"]) + footnote(result, f"{result['dtype']}, computed, nothing was run")


def floor_table(floor: Result) -> str:
    """What memory bandwidth allows, computed from bytes read."""
    rows = [
        [head, number(f["target_ms"], 2), number(f["draft_ms"], 2), number(f["round_ms"], 2)]
        + [number(value, 0) for value in f["tokens_per_second"].values()]
        for head, f in floor["heads"].items()
    ]
    taus = next(iter(floor["heads"].values()))["tokens_per_second"]
    title = f"floor of {floor['name']} at {floor['bytes_per_second'] / 1e12:.2f} TB/s"
    header = [title, "target, ms", "draft, ms", "round, ms"]
    return markdown_table([*header, *(f"tokens/s at tau {tau}" for tau in taus)], rows)
