"""Compiled rounds against eager ones, and both against plain `generate`, eager and compiled with a static cache.

    python -m benchmarks compiled --heads model_cards/poss3 model_cards/eagle
    python -m benchmarks compiled --shape llama-3-8b --dtype bfloat16 --device cuda --tau 3 4 5
    python -m benchmarks compiled --shape llama-3-8b --dtype bfloat16 --on_paper 4.8e12

The first command runs the shipped pair. `--shape` makes a target and heads of given sizes with random weights instead.
Only their time is meaningful, so a stub sets the acceptance length to the values of `--tau`: drafts are computed as
always, then a path of the tree is replaced by the target's own continuation. The floor is the time to read every
weight once per use at the device's memory bandwidth, which a copy measures. `--on_paper` computes the floor for a
bandwidth in bytes per second, without making or running anything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from transformers import CompileConfig, PreTrainedModel, StaticCache

from hf_specheads import DraftHead, DraftHeadCandidateGenerator
from hf_specheads.cache.names import CACHE_NAME
from hf_specheads.cache.slots import to_device
from hf_specheads.generation import ahead
from hf_specheads.generation.compiled.rounds import bucket
from hf_specheads.generation.drafting.lookup import TextLookup
from hf_specheads.generation.loop import RoundLoop
from hf_specheads.tree.draft_tree import DraftTree
from hf_specheads.tree.shape import TreeShape
from hf_specheads.tuning.turns import generate_text, take_turns

from .. import setup
from ..results import Result, column_table, footnote, number, percent, same_texts
from ..setup import Inputs
from ..sides import TO_THE_END, Options, Run, generate_once, summarise, timed_in_turns

SOURCES = ("hf_specheads", "hf_specheads/generation/compiled")  # a call asks whether kept code still holds

PLAIN, PLAIN_COMPILED = "plain, eager", "plain, compiled, static cache"
STAGES = ("draft", "target", "accept", "commit")
COPIES = 8  # copies queued at once when the bandwidth of a device is measured
KEPT = -1  # marks a token that the stub leaves as it was drafted
_parents: WeakKeyDictionary[TreeShape, list[int]] = WeakKeyDictionary()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair or its sizes, the prompts, and what to run."""
    setup.add_generation_arguments(parser, heads=["poss3", "eagle"], prompts=["chats"])
    setup.add_shape_arguments(parser, depth=7)
    parser.add_argument(
        "--tau", type=float, nargs="+", default=[3.0, 4.0, 5.0], help="acceptance lengths set with --shape"
    )
    parser.add_argument("--compiled_only", action="store_true", help="leave out all eager generation")
    parser.add_argument(
        "--on_paper", type=float, help="only compute the floor of --shape at this many bytes per second"
    )


def variant(args: argparse.Namespace) -> str:
    """Stores the floor alone, and results of random weights, under names of their own."""
    return "floor" if args.on_paper else "shape" if args.shape else ""


# ---------------------------------------------------------------------- sides
def build_sides(
    target: PreTrainedModel, heads: dict[str, DraftHead], most_tokens: int, compiled_only: bool = False
) -> dict[str, Options]:
    """Makes the sides: plain and with heads, each eager and compiled.

    Compiled plain decoding is transformers' own; by default transformers compiles only on accelerators. All its calls
    share one cache with the capacity that our own rounds get, since a new cache of another size would trigger
    recompilation.
    """
    config = CompileConfig(mode="reduce-overhead" if target.device.type == "cuda" else None, fullgraph=False)
    config._compile_all_devices = True
    cache = StaticCache(target.config, max_cache_len=bucket(most_tokens))
    options: dict[str, Options] = {} if compiled_only else {PLAIN: {}}
    options[PLAIN_COMPILED] = {CACHE_NAME: cache, "compile_config": config}
    for name, one in heads.items():
        compiled = one.with_tree()
        compiled.compiled = True
        options |= {} if compiled_only else {name: {"assistant_model": one}}
        options[f"{name}, compiled"] = {"assistant_model": compiled}
    return {name: TO_THE_END | own for name, own in options.items()}


# ---------------------------------------------------------------------- acceptance by a stub
@contextmanager
def acceptance_of(tau: float, truth: torch.Tensor) -> Iterator[None]:
    """Context in which drafted trees are right for as many positions as give the acceptance length `tau`.

    The first children of the tree are replaced by the target's own continuation up to that position, and by wrong
    tokens after it. Nothing is copied from the text, because texts of random weights repeat themselves. Drafts that
    begin before the host knows the preceding text (`generation/ahead.py`) look up the continuation by the tree's root,
    on the device. This requires that `truth` continues in the same way wherever a token occurs twice.

    Args:
        tau: Acceptance length to reach, if trees are deep enough for it.
        truth: int64 [B, T], prompt and plain text of each sequence.
    """
    draft, next_tree = DraftHeadCandidateGenerator.draft, RoundLoop.next_tree
    state, to_say, by_root, active = {"owed": 0.0}, truth.tolist(), {}, [0]

    def drafted(self: Any, rows: Any, lengths: Any, *others: Any) -> DraftTree:
        tree = draft(self, rows, lengths, *others)
        state["owed"] += tau - 1
        # a tree shallower than this is right to its full depth, and later rounds do not make up for the rest
        said = int(state["owed"])
        state["owed"] -= said
        vocab, parents, device = self.head.config.vocab_size, parents_of(tree), tree.token_ids.device
        if self.compiled is not None and device.type in ahead.QUEUES and len(to_say) == 1:
            case = (tuple(parents[0]), said)
            if case not in by_root:
                by_root[case] = told_by_root(to_say[0], vocab, parents[0], said).to(device)
            told = by_root[case][tree.token_ids[:, 0]]
        else:
            rows = zip(active, lengths, parents, strict=True)
            told = to_device(
                [told_tokens(to_say[of][length:], over, said, vocab) for of, length, over in rows], device
            )
        return replace(tree, token_ids=torch.where(told == KEPT, tree.token_ids, told))

    def next_of_active(self: Any, *of_round: Any) -> DraftTree:
        active[:] = self.sequences.active
        return next_tree(self, *of_round)

    with (
        mock.patch.object(DraftHeadCandidateGenerator, "draft", drafted),
        mock.patch.object(RoundLoop, "next_tree", next_of_active),
        mock.patch.object(TextLookup, "continuations", lambda *_: None),
    ):
        yield


def told_tokens(to_say: list[int], parents: list[int], said: int, vocab: int) -> list[int]:
    """Returns the tokens of a tree's nodes, [`KEPT`] where the drafted token stays. First children are right `said`
    times."""
    node, tokens = 0, [KEPT] * len(parents)
    for place, token in enumerate(to_say):
        children = [child for child, parent in enumerate(parents) if child and parent == node]
        if not children:
            break
        for child in children:
            tokens[child] = (token + 1) % vocab
        if place >= said:
            break
        node = children[0]
        tokens[node] = token
    return tokens


def told_by_root(to_say: list[int], vocab: int, parents: list[int], said: int) -> torch.Tensor:
    """Returns [`told_tokens`] for every possible root token, int64 [V, N]. For a token that occurs more than once, its
    last continuation counts."""
    told = torch.full((vocab, len(parents)), KEPT)
    for place, token in enumerate(to_say[:-1]):
        rest = to_say[place + 1 : place + 1 + len(parents)]
        told[token] = torch.tensor(told_tokens(rest, parents, said, vocab))
    return told


def parents_of(tree: DraftTree) -> list[list[int]]:
    """Returns the parent of every node, per sequence. Trees of a fixed shape are read only once, since reading waits
    for the device."""
    if tree.shape is None:
        return tree.parents.tolist()
    if tree.shape not in _parents:
        _parents[tree.shape] = tree.parents[0].tolist()
    return [_parents[tree.shape]] * len(tree.parents)


# ---------------------------------------------------------------------- measuring
def measure_sides(
    target: PreTrainedModel, sides: dict[str, Options], prompts: list[Inputs], texts: list[torch.Tensor],
    tau: float | None, args: argparse.Namespace,
) -> tuple[dict[str, Any], dict[str, float]]:  # fmt: skip
    """Runs all sides in turns on every prompt. With a `tau`, heads accept that much of the plain `texts`.

    Returns:
        Numbers of every side, and the seconds that the first call of each compiled side took.
    """
    first_call: dict[str, float] = {}

    def run(name: str, prompt: tuple[Inputs, torch.Tensor], turn: int = 0) -> Run:
        inputs, text = prompt
        if name == PLAIN_COMPILED:
            sides[name][CACHE_NAME].reset()
        with nullcontext() if tau is None else acceptance_of(tau, text):  # has no effect on plain sides
            return generate_once(target, sides[name], inputs, args.max_new_tokens)

    def warm_up(name: str, prompt: tuple[Inputs, torch.Tensor]) -> None:
        first_call[name] = run(name, prompt).seconds
        if (heads := sides[name].get("assistant_model")) is not None and heads.compiled:
            heads.warmup(target, batch_sizes=(1,), max_length=max(text.shape[1] for text in texts))
        run(name, prompt)

    runs = take_turns(sides, list(zip(prompts, texts, strict=True)), run, args.repeats, warm_up)
    compiled = {name: spent for name, spent in first_call.items() if "compiled" in name}
    found = {name: over_plain(runs[name], runs) for name in sides}
    new = [text[0, inputs["input_ids"].shape[1] :].tolist() for text, inputs in zip(texts, prompts, strict=True)]
    differing = [at for at, run in enumerate(runs[PLAIN_COMPILED][0]) if run.token_ids[0] != new[at]]
    found[PLAIN_COMPILED] |= {"identical": not differing, "differing_prompts": differing}
    for name in sides:
        if (heads := sides[name].get("assistant_model")) is not None and heads.compiled:
            found[name]["stage_milliseconds"] = stages(heads, lambda name=name: run(name, (prompts[0], texts[0])))
    return found, compiled


def stages(heads: DraftHead, generate: Callable[[], Run]) -> dict[str, float]:
    """Returns the milliseconds of a round by stage. Waiting for the device after each stage makes their sum longer
    than a round that is not profiled."""
    heads.profile = True
    try:
        _, stats = generate(), generate().stats
    finally:
        heads.profile = False
    return {name: 1000 * stats.seconds[name] / stats.rounds for name in STAGES}


def over_plain(runs: list[list[Run]], all_runs: dict[str, list[list[Run]]]) -> dict[str, Any]:
    """Summarises one side relative to the plain sides."""
    found = summarise(runs, all_runs[PLAIN_COMPILED])
    over = {"over_plain_compiled": found["speed_up"]}
    if PLAIN in all_runs:
        found = summarise(runs, all_runs[PLAIN])
        over = {"over_plain_eager": found["speed_up"], **over}
    rounds = sum(run.stats.rounds for run in runs[0] if run.stats is not None)
    milliseconds = 1000 * found["new_tokens"] / found["tokens_per_second"]
    return {**found, **over, "round_milliseconds": milliseconds / rounds if rounds else None}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the pair, or heads of a shape at every acceptance length, or computes only the floor."""
    result, cases = {}, {setup.display_name(args.target): None}
    if args.shape:
        target, heads, prompts = setup.random_pair(args, "meta" if args.on_paper else args.device)
        result = {"floor": floor(target, heads, args)}
        if args.on_paper:
            return result
        cases = {f"{args.shape}, acceptance length set to {tau:g}": tau for tau in args.tau}
    else:
        target, heads, prompts = setup.load_pair(args)
    most_tokens = max(inputs["input_ids"].shape[1] for inputs in prompts) + args.max_new_tokens + args.depth + 1
    sides = build_sides(target, heads, most_tokens, args.compiled_only)
    plain = {"max_new_tokens": args.max_new_tokens, **TO_THE_END}
    texts = [generate_text(target, inputs, **plain).cpu() for inputs in prompts]
    measured = {}
    for name, tau in cases.items():
        measured[name] = measure_sides(target, sides, prompts, texts, tau, args)
        if args.shape:
            of_the_floor(measured[name][0], result["floor"]["heads"])
        print(name, measured[name], file=sys.stderr, flush=True)
    return {
        **result,
        "tables": {name: found for name, (found, _) in measured.items()},
        "compile_seconds": next(iter(measured.values()))[1],
    }


# ---------------------------------------------------------------------- the computed floor
def bandwidth(device: str) -> float:
    """Returns the bytes per second of large copies, reads and writes counted. Copies run one after the other, as
    kernels do."""
    source = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    sink, wait = torch.empty_like(source), getattr(torch, torch.device(device).type).synchronize

    def copy() -> None:
        for _ in range(COPIES):
            sink.copy_(source)
        wait()

    seconds, _ = timed_in_turns({"copy": copy}, repeats=5, warm_ups=1)
    return 2 * COPIES * source.numel() / min(seconds["copy"])


def floor(target: PreTrainedModel, heads: dict[str, DraftHead], args: argparse.Namespace) -> dict[str, Any]:
    """Computes the milliseconds of a round, and tokens per second, if every used weight were read once per use.

    The token embedding does not count, since only a few rows of it are looked up. A draft step reads one specialist
    and the projection to draft logits. A block drafter takes one step for all its positions and reads all its layers.
    """
    per_second = args.on_paper or bandwidth(args.device)
    result: dict[str, Any] = {"name": args.shape, "bytes_per_second": per_second, "heads": {}}
    embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    body = _bytes(target) - (0 if target.config.tie_word_embeddings else _bytes(embedding))
    for name, made in heads.items():
        at_once = made.drafts_in_one_forward
        idle = [] if at_once else made.layers[1:]
        own = _bytes(made) - sum(map(_bytes, idle)) - _bytes(getattr(made, "embed_tokens", None))
        step, steps = own + (0 if made.own_projections() else _bytes(lm_head)), 1 if at_once else args.depth
        target_ms, draft_ms = 1000 * body / per_second, 1000 * steps * step / per_second
        rates = {f"{tau:g}": 1000 * tau / (target_ms + draft_ms) for tau in args.tau}
        result["heads"][name] = {"target_ms": target_ms, "draft_ms": draft_ms, "round_ms": target_ms + draft_ms,
                                 "tokens_per_second": rates}  # fmt: skip
    return result


def of_the_floor(sides: dict[str, Any], heads: dict[str, dict[str, float]]) -> None:
    """Adds to every side the share that its floor is of its time: the floor of rounds, or of plain steps for plain
    sides."""
    for name, side in sides.items():
        floor = heads.get(name.removesuffix(", compiled"))
        if floor is not None:
            side["of_the_floor"] = floor["round_ms"] / side["round_milliseconds"]
        else:
            side["of_the_floor"] = next(iter(heads.values()))["target_ms"] * side["tokens_per_second"] / 1000


def _bytes(module: torch.nn.Module | None) -> int:
    return sum(weight.numel() * weight.element_size() for weight in module.parameters()) if module else 0


# ---------------------------------------------------------------------- tables
def table(result: Result) -> str:
    """One row per side."""
    if "tables" not in result:
        return floor_table(result["floor"]) + footnote(result, "{dtype}, computed from sizes, not measured")
    columns = {
        "tokens/s": ("tokens_per_second", 1),
        "speed-up over plain, eager": lambda side: number(side.get("over_plain_eager"), 2, "x"),
        "speed-up over plain, compiled": ("over_plain_compiled", 2, "x"), "tau": ("acceptance_length", 2),
        "ms per round": ("round_milliseconds", 1), "ms in draft, target, rest": stage_times,
        **({"floor / measured time": lambda side: percent(side.get("of_the_floor"))} if "floor" in result else {}),
        "same text": lambda side: same_texts(side, f" of {result['num_prompts']}"),
    }  # fmt: skip
    parts = [column_table(columns, sides, name) for name, sides in result["tables"].items()]
    parts += [floor_table(result["floor"])] if "floor" in result else []
    first_calls = "; ".join(f"{name} {number(spent, 0)} s" for name, spent in result["compile_seconds"].items())
    return "\n".join(parts) + footnote(
        result, "Greedy, {dtype}, batch 1, {max_new_tokens} new tokens, {num_prompts} prompts, median of {repeats} "
        f"interleaved repeats; time of the first compiled calls: {first_calls}",
    )  # fmt: skip


def stage_times(side: Result) -> str:
    """Formats the milliseconds of a round: drafting, the target's forward, everything else."""
    if (spent := side.get("stage_milliseconds")) is None:
        return "-"
    return ", ".join(number(one, 1) for one in (spent["draft"], spent["target"], spent["accept"] + spent["commit"]))


def floor_table(floor: Result) -> str:
    """Formats the limits that memory bandwidth sets, computed from the bytes read."""
    taus = next(iter(floor["heads"].values()))["tokens_per_second"]
    columns = {f"{part}, ms": (f"{part}_ms", 2) for part in ("target", "draft", "round")}
    for tau in taus:
        columns[f"tokens/s at tau {tau}"] = lambda one, tau=tau: number(one["tokens_per_second"][tau], 0)
    title = f"floor (time to read the weights) of {floor['name']} at {floor['bytes_per_second'] / 1e12:.2f} TB/s"
    return column_table(columns, floor["heads"], title)
