"""What must hold on any accelerator; `test_accelerator.py` runs this file, part by part.

On CUDA what the emulation alone can tell, waits by line and a slow device, is left out, and real graphs are captured.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from dataclasses import astuple

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from support.accelerator import Emulation
from support.batches import batch_of, greedy
from support.distributions import PROMPT, chi_square, critical_value, five_token_target, target_distribution
from support.families import tiny_target
from support.heads import random_heads
from support.stubs import CountForwards
from support.targets import own_target, plain, prompt, shared_target
from support.tokenizers import byte_tokenizer
from support.trees import TREES
from transformers import CompileConfig

from benchmarks.setup import random_llama
from hf_specheads import AutoDraftHead, UnsupportedGenerationError, generate_stream, load_heads
from hf_specheads.generation.ahead import DraftAhead
from hf_specheads.generation.kernels.attention import attend_by_kernel, attend_by_products
from hf_specheads.generation.kernels.products import products
from hf_specheads.generation.loop import RoundLoop
from hf_specheads.heads.auto import METHODS
from hf_specheads.metrics import wait_for
from hf_specheads.tuning.measure import _seconds, measure_costs
from hf_specheads.unroll.attention import Documents, StreamAttention

EMULATION = None if torch.cuda.is_available() else Emulation()
KIND = "cuda" if EMULATION is None else "pretend"
DEVICE, COUNT = torch.device(KIND, 0), torch.accelerator.device_count()
NEW = 16
emulated = pytest.mark.skipif(EMULATION is None, reason="only the emulation knows what the host waits for")
replayed = pytest.mark.skipif(EMULATION is not None, reason="an emulation captures no graphs")
several = pytest.mark.skipif(COUNT < 2, reason="needs two devices")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved heads of every method for the same target."""
    made = {}
    for method in METHODS:
        made[method] = tmp_path_factory.mktemp(method)
        random_heads(shared_target(), method).save_pretrained(made[method])
    return made


@pytest.fixture(scope="module")
def target():
    return own_target().to(DEVICE)


@pytest.fixture(params=["one device", "accelerator and CPU"])
def placed(request, target):
    """The target on one device, and spread over two."""
    return target if request.param == "one device" else spread([DEVICE, torch.device("cpu")])


def on(device, inputs):
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def text(target, heads=None, **options):
    return plain(target, prompt().to(target.device), NEW, assistant_model=heads, **options).tolist()


# ---------------------------------------------------------------------- placement
@pytest.mark.placement
@pytest.mark.parametrize("method", METHODS)
def test_loaded_heads_follow_the_target(method, folders, target):
    """The quickstart: heads are loaded without a word about devices."""
    expected = text(target)
    batch, _ = batch_of((9, 4, 14))
    rows = target.generate(**on(DEVICE, batch), max_new_tokens=NEW, do_sample=False).tolist()
    for kind in (None, *TREES.values()):  # without a tree, rounds choose from a menu
        heads = load_heads(folders[method])
        assert heads.device.type == "cpu"
        assert text(target, heads if kind is None else heads.with_tree(**kind.to_dict())) == expected
        assert heads.device == DEVICE, "a copy with another tree shares the weights"
        got = target.generate(**on(DEVICE, batch), assistant_model=heads, max_new_tokens=NEW, do_sample=False)
        assert got.tolist() == rows


@pytest.mark.placement
@pytest.mark.parametrize("method", ["eagle", "medusa", "mtp", "lookup"])
def test_streams(method, folders, placed):
    """Requests come from the host, and take the places of others."""
    _, alone = batch_of((9, 4, 14, 6))
    expected = [plain(placed, ids.to(placed.device), NEW)[0, ids.shape[1] :].tolist() for ids in alone]
    found = generate_stream(placed, load_heads(folders[method]), alone, 2, max_new_tokens=NEW, do_sample=False)
    assert [one.token_ids for one in sorted(found, key=lambda one: one.index)] == expected


@pytest.mark.placement
def test_requests_with_options_of_their_own(folders, placed):
    _, alone = batch_of((9, 4, 14, 6, 5))
    common = {"max_new_tokens": NEW, "do_sample": False}
    free = [plain(placed, ids.to(placed.device), NEW)[0, ids.shape[1] :].tolist() for ids in alone]
    strings = {"stop_strings": [byte_tokenizer().decode([free[1][5]])]}
    own = [{"repetition_penalty": 1.6}, strings, {"eos_token_id": free[2][7]}, {"suppress_tokens": free[3][:3]}, {}]
    expected = []
    for ids, options in zip(alone, own, strict=True):
        inputs = on(placed.device, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        tokens = placed.generate(**inputs, **common, **options, tokenizer=byte_tokenizer())
        expected.append(tokens[0, ids.shape[1] :].tolist())
    assert len({*map(len, expected)}) > 1
    requests = [{"input_ids": ids, **options} for ids, options in zip(alone, own, strict=True)]
    found = generate_stream(placed, load_heads(folders["eagle"]), requests, 3, **common, tokenizer=byte_tokenizer())
    assert [one.token_ids for one in sorted(found, key=lambda one: one.index)] == expected


@pytest.mark.placement
def test_penalties_and_stop_strings_in_a_padded_batch(folders, placed):
    inputs = on(placed.device, batch_of((9, 4, 14))[0])
    options = {"repetition_penalty": 1.4, "eos_token_id": 98, "pad_token_id": 0, "tokenizer": byte_tokenizer()}
    text = greedy(placed, inputs, repetition_penalty=1.4)[1, inputs["input_ids"].shape[1] :]
    options["stop_strings"] = [byte_tokenizer().decode(text[4:6])]
    expected = greedy(placed, inputs, **options)
    ours = greedy(placed, inputs, assistant_model=load_heads(folders["eagle"]), **options)
    assert torch.equal(ours, expected)


@pytest.mark.placement
@pytest.mark.parametrize("method", ["eagle", "medusa", "dflash"])
def test_compiled_rounds(method, folders, monkeypatch):
    """The graphs as they were traced: an emulation has no code generator."""
    target = own_target().to(DEVICE)
    batch, _ = batch_of((9, 4, 14))
    expected = text(target), target.generate(**on(DEVICE, batch), max_new_tokens=NEW, do_sample=False).tolist()
    target.generation_config.compile_config = CompileConfig(backend="eager", mode=None)
    heads = load_heads(folders[method])
    heads.compiled = True
    got = target.generate(**on(DEVICE, batch), assistant_model=heads, max_new_tokens=NEW, do_sample=False).tolist()
    assert (text(target, heads), got) == expected


@pytest.mark.placement
def test_what_rounds_copy_and_who_watches_them(folders, target):
    heads, seen = load_heads(folders["eagle"]).with_tree(kind="chain", depth=3, lookup=3), []
    heads.on_round = lambda one: seen.append((one.token_ids(), one.nodes()))
    ids = prompt(6).repeat(1, 3).to(DEVICE)
    expected = plain(target, ids, NEW)
    assert torch.equal(plain(target, ids, NEW, assistant_model=heads), expected)
    assert [token for tokens, _ in seen for token in tokens] == expected[0, -NEW:].tolist()
    assert max(len(nodes) for _, nodes in seen) == 7, "a chain of 4 nodes, and 3 copied ones"


@pytest.mark.placement
@pytest.mark.parametrize("method", METHODS)
def test_sampling_with_a_seed(method, folders, target):
    ids = prompt().to(DEVICE)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": True, "temperature": 0.7}
    torch.manual_seed(4)
    expected = target.generate(ids, **options)
    torch.manual_seed(4)
    heads = load_heads(folders[method])
    assert torch.equal(target.generate(ids, assistant_model=heads, **options), expected)
    drawn = heads.with_tree(kind="chain", children="sampled")
    assert target.generate(ids, assistant_model=drawn, **options).shape == expected.shape


@pytest.mark.placement
@pytest.mark.parametrize("method", METHODS)
def test_pruned_heads_follow_too(method, folders, target):
    heads = load_heads(folders[method]).prune_draft_vocabulary(range(3, 99, 3))
    assert text(target, heads) == text(target)
    assert heads.pruned_token_ids.device == DEVICE


@pytest.mark.placement
def test_device_and_dtype_are_said_in_one_line(folders, caplog):
    target = own_target().to(DEVICE, torch.bfloat16)
    heads = load_heads(folders["eagle"])
    heads.config.target = None
    caplog.clear()
    with caplog.at_level(logging.INFO, "hf_specheads"):
        heads.bind(target)
        heads.bind(target)
    (line,) = [record.message for record in caplog.records if "follow" in record.message]
    assert f"cpu, torch.float32 to {DEVICE}, torch.bfloat16" in line
    chosen = load_heads(folders["eagle"], dtype=torch.float32)
    chosen.config.target = None
    assert chosen.bind(target).dtype == torch.float32 and chosen.device == DEVICE


@pytest.mark.placement
@pytest.mark.parametrize("method", METHODS)
def test_heads_with_a_device_map_stay(method, folders, target):
    """They draft where they are if they call nothing of the target's, and are refused before any forward otherwise."""
    heads = load_heads(folders[method], device_map={"": "cpu"})
    if not heads.borrows:
        assert text(target, heads) == text(target)
    else:
        with CountForwards(target) as forwards, pytest.raises(UnsupportedGenerationError, match="device_map"):
            text(target, heads)
        assert forwards.count == 0
    assert heads.device.type == "cpu"


@pytest.mark.placement
def test_fresh_heads(target):
    assert AutoDraftHead.from_target(target).device == DEVICE
    stays = AutoDraftHead.from_target(target, "medusa", device="cpu")
    assert text(target, stays.eval()) == text(target) and stays.device.type == "cpu"
    moved = own_target()
    heads = random_heads(moved)
    assert text(moved.to(DEVICE), heads) == text(moved) and heads.device == DEVICE


def spread(devices):
    """The target over two devices, `lm_head` on the second."""
    model, (first, second) = own_target(), devices
    layers = {f"model.layers.{i}": devices[i >= 1] for i in range(2)}
    ends = {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": second, "lm_head": second}
    return dispatch_model(model, device_map=layers | ends, main_device=first)


@pytest.mark.placement
@several
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("devices", [(0, 1), (0, "cpu")], ids=["two accelerators", "accelerator and CPU"])
def test_targets_over_several_devices(devices, method, folders):
    devices = [torch.device(KIND, device) if device != "cpu" else torch.device("cpu") for device in devices]
    target = spread(devices)
    expected = text(target)
    for kind in ("chain", "dynamic"):
        heads = load_heads(folders[method])
        assert text(target, heads.with_tree(**TREES[kind].to_dict())) == expected
        assert heads.device == devices[1]
    ids = prompt().to(target.device).expand(2, -1).contiguous()
    assert plain(target, ids, NEW, assistant_model=heads).tolist() == expected * 2


@pytest.mark.placement
@pytest.mark.parametrize("place", [pytest.param("two", marks=several), "accelerator and CPU", "offloaded"])
def test_targets_that_take_chains_over_several_devices(place):
    """Of a batch, whose sequences end at different times. (The emulation knows no convolutions, as states have.)"""
    target = tiny_target("bloom", num_hidden_layers=2)
    inputs, _ = batch_of((9, 4), vocab=90)
    expected = greedy(target, inputs)
    ends = {"eos_token_id": int(expected[1, 9 + 5]), "pad_token_id": 0}
    expected = greedy(target, inputs, **ends)
    if place == "offloaded":
        cpu_offload(target, execution_device=DEVICE)
    else:
        second = torch.device(KIND, 1) if place == "two" else torch.device("cpu")
        layers = next(name for name, module in target.named_modules() if isinstance(module, torch.nn.ModuleList))
        placed = {name: DEVICE for name, _ in target.named_children()} | {"lm_head": second}
        base = layers.rpartition(".")[0]
        placed.pop(base)
        placed |= {f"{base}.{name}": DEVICE for name, _ in target.get_submodule(base).named_children()}
        placed.pop(layers)
        target = dispatch_model(
            target, device_map=placed | {f"{layers}.0": DEVICE, f"{layers}.1": second}, main_device=DEVICE
        )
    heads = AutoDraftHead.from_target(target, "eagle", tree_config={"kind": "chain", "depth": 3}).eval()
    heads.adaptive = False
    got = greedy(target, on(DEVICE, inputs), assistant_model=heads, **ends)
    assert got.tolist() == expected.tolist() and heads.last_stats.rounds > 0
    alone = {name: tensor[:1] for name, tensor in on(DEVICE, inputs).items()}
    assert greedy(target, alone, assistant_model=heads).tolist() == greedy(target, alone).tolist()


@pytest.mark.placement
@pytest.mark.filterwarnings("ignore:flex attention is not used")  # of the emulation, which has no such kernel
def test_feature_streams_attend_as_on_the_cpu():
    """Training's attention, forward and backward, by whatever way the device takes."""
    documents, generator = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1]]), torch.Generator().manual_seed(0)
    states = [torch.randn(1, heads, rows, 16, generator=generator) for heads, rows in ((4, 8), (2, 24), (2, 24))]
    found = []
    for device in (torch.device("cpu"), DEVICE):
        leaves = [one.to(device).requires_grad_() for one in states]
        plan = StreamAttention(Documents(documents.to(device)), 3)
        out, _ = plan(torch.nn.Module(), *leaves, None, scaling=0.25)
        real = (documents >= 0).to(device)[..., None, None]
        grads = torch.autograd.grad((out * real).square().sum(), leaves)
        found.append([one.detach().cpu() for one in (out * real, *grads)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


@pytest.mark.placement
@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa"])
def test_an_offloaded_target(method, folders):
    """Weights on the CPU, which come to the device for each forward: so do not the heads', which live there."""
    target = own_target()
    cpu_offload(target, execution_device=DEVICE)
    assert next(target.lm_head.parameters()).device.type == "meta"
    ids = prompt().to(DEVICE)
    heads = load_heads(folders[method])
    assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
    assert heads.device == DEVICE


# ---------------------------------------------------------------------- waiting
def rounds_of(target, inputs, heads, **options):
    """Waits of every round in a steady state, and how many the statistics claim. The same rounds run once before:
    shapes of trees are made when they are drafted first, and kept, and making them is a wait too."""
    marks, begin = [], RoundLoop.begin_round

    def generate():
        torch.manual_seed(0)
        target.generate(**inputs, assistant_model=heads, max_new_tokens=24, **({"do_sample": False} | options))

    def marked(self):
        marks.append((len(seen.waits), self.stats.host_syncs))
        return begin(self)

    generate()
    heads.memory.clear()
    with pytest.MonkeyPatch.context() as patch, EMULATION.watched() as seen:
        patch.setattr(RoundLoop, "begin_round", marked)
        generate()
    rounds = list(itertools.pairwise(marks))[1:]
    assert len(rounds) > 3
    return [(seen.waits[a[0] : b[0]], b[1] - a[1]) for a, b in rounds]


def one(device=DEVICE):
    ids = prompt().to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.waiting
@emulated
@pytest.mark.parametrize("kind", ["chain", "dynamic", None])
@pytest.mark.parametrize("method", METHODS)
def test_a_greedy_round_waits_once(method, kind, folders, target):
    """With a tree, and where rounds choose from a menu and time themselves."""
    heads = load_heads(folders[method])
    heads = heads if kind is None else heads.with_tree(**TREES[kind].to_dict())
    for waits, claimed in rounds_of(target, one(), heads):
        assert len(waits) == claimed == 1, waits


@pytest.mark.waiting
@emulated
def test_a_greedy_round_of_a_batch_waits_once(folders, target):
    inputs, _ = batch_of((9, 4, 14))
    for waits, claimed in rounds_of(target, on(DEVICE, inputs), load_heads(folders["poss"])):
        assert len(waits) == claimed == 1, waits


SAMPLED = {"do_sample": True, "temperature": 0.7}
DRAWN = {"children": "sampled"}
CALLS = {
    "seeded": ({}, {}, SAMPLED, None),
    "at once": ({"exact_seed": False}, {}, SAMPLED, 1),
    "drawn chain": ({}, {"kind": "chain", **DRAWN}, SAMPLED, 1),
    "drawn tree": ({}, {"kind": "static", "choices": ((0,), (1,), (0, 0), (0, 1)), **DRAWN}, SAMPLED, 1),
    "penalty": ({}, {}, {"repetition_penalty": 1.3}, None),
    "drawn chain, penalty": ({}, {"kind": "chain", **DRAWN}, SAMPLED | {"repetition_penalty": 1.3}, None),
    "typical": ({"verification": "typical"}, {}, SAMPLED, 1),
    "typical, penalty": ({"verification": "typical"}, {}, SAMPLED | {"repetition_penalty": 1.3}, None),
    "gives up": ({}, {"stop_below": 0.05}, {}, None),
    "looks up": ({}, {"lookup": 3}, {}, 1),
    "is watched": ({"on_round": lambda seen: seen.token_ids()}, {}, {}, 1),
}


@pytest.mark.waiting
@emulated
@pytest.mark.parametrize("call", CALLS)
def test_every_wait_is_counted(call, folders, target):
    settings, tree, options, expected = CALLS[call]
    heads = load_heads(folders["eagle"]).with_tree(**tree)
    for name, value in settings.items():
        setattr(heads, name, value)
    for waits, claimed in rounds_of(target, one(), heads, **options):
        assert len(waits) == claimed, waits
        assert expected is None or claimed == expected


@pytest.mark.waiting
@emulated
def test_a_sequence_that_ends_costs_no_wait(folders, target):
    """Sequences of a batch leave one by one; what is kept of the others is known to the host."""
    inputs, _ = batch_of((9, 4, 14))
    texts = target.generate(**on(DEVICE, inputs), max_new_tokens=24, do_sample=False)
    eos = int(texts[0, -12])
    rounds = rounds_of(target, on(DEVICE, inputs), load_heads(folders["eagle"]), eos_token_id=eos, pad_token_id=0)
    assert all(len(waits) == claimed == 1 for waits, claimed in rounds), rounds


# ---------------------------------------------------------------------- timing
SLOW = 2e-4  # seconds of an operator, far more than the host needs to launch it


@pytest.mark.timing
@emulated
@several
def test_a_clock_waits_for_the_device_that_works():
    for index in range(COUNT):
        at = torch.device(KIND, index)
        tensor = torch.ones(8, device=at)
        with EMULATION.slow(0.02):
            began = time.perf_counter()
            tensor.add_(1)
            assert time.perf_counter() - began < 0.015, "nobody has waited"
            assert _seconds((at,), lambda tensor=tensor: tensor.add_(1)) > 0.015
            tensor.add_(1)
            wait_for((at,))
            assert time.perf_counter() - began > 0.06


@pytest.mark.timing
@emulated
def test_stages_are_what_the_device_took(folders, target, monkeypatch):
    """Drafting takes what the operators of drafting take; if nobody waits, the target's forward pays for all."""
    draft = RoundLoop.draft
    for depth in (1, 6):
        heads = load_heads(folders["eagle"]).with_tree(kind="chain", depth=depth)
        heads.profile = True
        plain(target, prompt().to(DEVICE), 6, assistant_model=heads)
        drafted = []
        with EMULATION.watched() as seen, monkeypatch.context() as patched:

            def counted(*call: object, seen=seen, drafted=drafted):
                before, tree = seen.operators, draft(*call)
                drafted.append(seen.operators - before)
                return tree

            patched.setattr(RoundLoop, "draft", counted)
            plain(target, prompt().to(DEVICE), 6, assistant_model=heads)
        with EMULATION.slow(SLOW):
            plain(target, prompt().to(DEVICE), 6, assistant_model=heads)
        stats = heads.last_stats
        stages = sum(value for name, value in stats.seconds.items() if name != "total")
        assert stats.seconds["total"] >= seen.operators * SLOW and stages <= stats.seconds["total"]
        assert stats.seconds["draft"] == pytest.approx(sum(drafted) * SLOW, rel=0.2)
        assert len(drafted) == stats.rounds and drafted[0] > 5 * depth


@pytest.mark.timing
def test_costs(folders, target):
    costs = measure_costs(target, load_heads(folders["poss"]), 20, nodes=(1, 4), rows=(1, 2), repeats=2)
    assert min(*costs.target.values(), *costs.draft.values(), costs.start) > 0


@pytest.mark.timing
@pytest.mark.parametrize(("method", "place"), [("eagle", "host"), ("medusa", "device")])
def test_tuning(method, place, folders, target):
    heads = load_heads(folders[method])
    ids = [prompt(15, seed=seed).to(DEVICE if place == "device" else "cpu") for seed in range(2)]
    result = heads.tune(target, ids, max_new_tokens=5, depth=2, top_k=2, confirm=1, repeats=1)
    assert result.tree == heads.tree_config and result.candidates > 2
    assert text(target, heads) == text(target)


@pytest.mark.timing
@emulated
def test_tuning_predicts_what_rounds_cost(folders, target, monkeypatch):
    """Rounds of chains, on a device that the host runs ahead of."""
    from hf_specheads.tuning import rounds as timed

    monkeypatch.setattr(timed, "TIMED_CHAINS", (1, 4))
    monkeypatch.setattr(timed, "TIMED_TREES", ())
    heads, ids = load_heads(folders["eagle"]), prompt().to(DEVICE)
    with EMULATION.slow(SLOW):
        predicted = timed.time_rounds(target, heads, [ids], 1, max_new_tokens=5)
        for depth in (1, 4):
            chain = heads.with_tree(kind="chain", depth=depth)
            chain.profile = True
            plain(target, ids, 5, assistant_model=chain)
            stats = chain.last_stats
            measured = (stats.seconds["total"] - stats.seconds["prefill"]) / stats.rounds
            assert predicted.of_chain(depth) == pytest.approx(measured, rel=0.3)


# ---------------------------------------------------------------------- CUDA graphs
def captured():
    """CUDA graphs that were captured so far, and steps that were not."""
    manager = torch._inductor.cudagraph_trees.get_container(DEVICE.index).tree_manager
    graphs = -1 if manager is None else len(list(every_node(manager)))
    return graphs, dict(torch._dynamo.utils.counters["inductor"]).get("cudagraph_skips", 0)


def every_node(manager):
    left = [node for roots in manager.roots.values() for node in roots]
    while left:
        node = left.pop()
        yield node
        left += [child for children in node.children.values() for child in children]


@pytest.mark.graphs
@replayed
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("method", ["poss", "eagle3", "medusa", "dflash"])
def test_graphs_serve_calls_of_other_lengths(method, kind, folders):
    """Of one sequence and of batches whose sequences end; a third call captures nothing that the second did not."""
    target = own_target().to(DEVICE)
    heads = load_heads(folders[method]).with_tree(**TREES[kind].to_dict())
    heads.compiled = True
    batch, _ = batch_of((9, 4, 14))
    batch = on(DEVICE, batch)
    rows = greedy(target, batch)
    ends = {"eos_token_id": int(rows[1, -6]), "pad_token_id": 0}
    rows, seen = greedy(target, batch, **ends), []
    for length in (19, 7, 12):
        ids = prompt(length, seed=length).to(DEVICE)
        assert torch.equal(plain(target, ids, NEW, assistant_model=heads), plain(target, ids, NEW))
        assert torch.equal(greedy(target, batch, assistant_model=heads, **ends), rows)
        seen.append(captured())
    assert seen[0][0] > 0 and seen[-1][1] == 0, "graphs were captured, and none was given up"
    assert seen[1] == seen[2]


@pytest.mark.graphs
@replayed
@pytest.mark.parametrize(("method", "kind"), [("poss", "chain"), ("eagle3", "dynamic")])
def test_drafts_that_begin_early_are_the_same(method, kind, folders, monkeypatch):
    target = own_target().to(DEVICE)
    heads, begun, begin = load_heads(folders[method]).with_tree(**TREES[kind].to_dict()), [], DraftAhead.begin
    heads.compiled, heads.adaptive = True, False
    monkeypatch.setattr(DraftAhead, "begin", lambda self, *call: begun.append(begin(self, *call)))
    accepted = []
    for kinds in (("cuda",), ()):
        monkeypatch.setattr("hf_specheads.generation.ahead.QUEUES", kinds)
        assert text(target, heads) == text(target)
        accepted.append((heads.last_stats.num_accepted, len(begun)))
    assert accepted[0] == accepted[1], "and the second call begins none"
    assert accepted[0][1] > 0


@pytest.mark.graphs
@replayed
@pytest.mark.parametrize("method", ["poss", "medusa"])
def test_graphs_and_seeds(method, folders):
    target = own_target().to(DEVICE)
    ids = prompt().to(DEVICE)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": True, "temperature": 0.7}
    heads = load_heads(folders[method])
    heads.compiled = True
    for seed in (4, 5):
        torch.manual_seed(seed)
        expected = target.generate(ids, **options)
        torch.manual_seed(seed)
        assert torch.equal(target.generate(ids, assistant_model=heads, **options), expected)


@pytest.mark.graphs
@replayed
def test_warm_up_captures_what_calls_need(folders):
    target = own_target().to(DEVICE)
    heads = load_heads(folders["poss"])
    heads.compiled = True
    heads.warmup(target, batch_sizes=(1,), max_length=64)
    before = captured()
    assert text(target, heads) == text(target)
    assert captured()[1] == before[1] == 0


# ---------------------------------------------------------------------- kernels of our own
@pytest.mark.graphs
@replayed
@pytest.mark.parametrize("sizes", [(1, 8, 2, 7, 512, 64), (1, 32, 8, 1, 3000, 128), (3, 4, 4, 5, 300, 32)], ids=str)
def test_few_rows_attend_as_by_torchs_own_function(sizes):
    batch, heads, key_heads, rows, slots, width = sizes
    query = torch.randn(batch, rows, heads, width, device=DEVICE).bfloat16().transpose(1, 2)
    key, value = (torch.randn(batch, key_heads, slots, width, device=DEVICE).bfloat16() for _ in range(2))
    allowed = torch.rand(batch, 1, rows, slots, device=DEVICE) < 0.6
    mask = torch.where(allowed, 0.0, torch.finfo(torch.bfloat16).min).bfloat16()
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), mask.float(), scale=0.1, enable_gqa=True
    )
    for attend in (attend_by_products, attend_by_kernel):
        found = attend(query, key, value, mask, 0.1)
        torch.testing.assert_close(found.float(), expected.transpose(1, 2), rtol=0.02, atol=0.01)


@pytest.mark.graphs
@replayed
@pytest.mark.parametrize("rows", [1, 7, 61])
@pytest.mark.parametrize("columns", [(128, 64, 64), (192,), (512, 512)], ids=str)
def test_products_of_siblings_are_the_same(columns, rows):
    from hf_specheads.generation.kernels.products_triton import WAYS

    inputs = torch.randn(rows, 512, device=DEVICE).bfloat16()
    weights = [torch.randn(size, 512, device=DEVICE).bfloat16() for size in columns]
    for how in WAYS:
        found = products(inputs, weights, list(astuple(how)))
        for one, weight in zip(found, weights, strict=True):
            torch.testing.assert_close(one, inputs @ weight.t(), rtol=0.02, atol=0.2)


@pytest.mark.graphs
@replayed
def test_texts_by_kernels_of_our_own():
    """In 16 bits, for which they are."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
    target = random_llama(
        torch.bfloat16, str(DEVICE), **sizes, num_key_value_heads=4, vocab_size=8192, tie_word_embeddings=False
    )
    heads = random_heads(target, "eagle", TREES["chain"])
    heads.compiled, heads.adaptive = True, False
    assert text(target, heads) == text(target)


# ---------------------------------------------------------------------- distribution
@pytest.mark.placement
@replayed
@pytest.mark.parametrize(
    "tree", [{"kind": "chain", "depth": 3, "children": "sampled"}, {"depth": 3, "top_k": 2}], ids=str
)
def test_samples_follow_the_target(tree):
    """By a chi-square test, of outputs of three tokens."""
    setting, target = {"temperature": 0.8, "top_k": 4, "top_p": 0.95}, five_token_target()
    expected, samples = target_distribution(target, setting, 3), 1500
    target = own_target(vocab_size=5, num_hidden_layers=1, seed=2).to(DEVICE)
    heads = random_heads(target, **({"total_tokens": 6} | tree))
    heads.exact_seed = False
    inputs = {"input_ids": PROMPT.to(DEVICE), "attention_mask": torch.ones_like(PROMPT).to(DEVICE)}
    options = {**inputs, **setting, "assistant_model": heads, "do_sample": True, "max_new_tokens": 3}
    counts = Counter(tuple(target.generate(**options)[0, -3:].tolist()) for _ in range(samples))
    statistic, freedom = chi_square(counts, expected, samples)
    assert statistic < critical_value(freedom)
