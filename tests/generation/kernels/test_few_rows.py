"""Products of a few rows: both kernels give the same numbers, the faster one is used, and nothing changes outside
rounds."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.batches import alone_texts, assert_rows, batch_of, greedy
from support.heads import random_heads
from support.targets import own_target, plain, prompt
from torch import nn
from torch.nn.functional import linear

from hf_specheads import generate_stream
from hf_specheads.generation.kernels import few_rows
from hf_specheads.generation.kernels.few_rows import (
    FASTER,
    GLANCES,
    HOPELESS,
    MOST_ROWS,
    TIMES,
    FewRows,
    Trial,
    Ways,
    doubled,
    turned,
)
from hf_specheads.generation.kernels.few_rows_native import WORKSHOP
from hf_specheads.generation.pace.pace import Pace
from hf_specheads.tuning.measure import measure_costs

NEW = 16


@pytest.fixture(params=["turned", "kernel"])
def always(request, monkeypatch, kernel):
    """Replaces products by another implementation wherever this is allowed, and records their numbers of rows."""
    numbers = []

    def compute(*product):
        numbers.append(number := product[0].shape[:-1].numel())
        if request.param == "kernel" and kernel is not None:
            return kernel(*product)
        return (doubled if number == 1 else turned)(*product)

    monkeypatch.setattr(Ways, "__getitem__", lambda *args: compute, raising=False)
    return numbers


@pytest.fixture
def kernel():
    """The float32 kernel, or `None` on machines that have none."""
    FewRows(nn.Linear(16, 16))
    few_rows.kernel_for(torch.Size([16, 16]), torch.float32)
    WORKSHOP.wait()
    return WORKSHOP.kernels[torch.float32]


@pytest.fixture(autouse=True)
def torch_is_left_as_it_was():
    WORKSHOP.wait()  # a kernel that an earlier test ordered must not restart the trials within this test
    before = nn.Linear.forward
    yield
    assert nn.Linear.forward is before and not few_rows._at_work


# ---------------------------------------------------------------------- both ways
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 5), (2, 64)])
def test_the_same_numbers(shape, bias):
    torch.manual_seed(0)
    layer, rows = nn.Linear(24, 40, bias=bias), torch.randn(*shape, 24)
    for way in [turned, doubled] if shape == (1, 1) else [turned]:
        product = way(rows, layer.weight, layer.bias)
        torch.testing.assert_close(product, layer(rows), rtol=1e-5, atol=1e-6)
        assert product.is_contiguous() and product.shape == (*shape, 40)


def test_rows_that_lie_apart_and_rows_of_no_batch():
    torch.manual_seed(0)
    weight, rows = torch.randn(8, 6), torch.randn(6, 5, 2).transpose(0, 2)
    torch.testing.assert_close(turned(rows, weight, None), rows @ weight.t())
    torch.testing.assert_close(turned(rows[0], weight, None), rows[0] @ weight.t())


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [((1.0, 0.5), 1), ((1.0, 2.0), 0), ((1.0, 0.999 / FASTER), 1), ((1.0, 0.99), 0), ((1.0, 0.5, 0.4), 2),
     ((1.0, 0.4, 0.5), 1), ((1.0, 0.99, 0.98), 0), ((1.0, 0.9, 0.5), 2), ((0.5, 0.9, 1.0), 0)],
)  # fmt: skip
def test_the_faster_way_is_taken_whatever_stalls(seconds, taken, monkeypatch):
    """Each way gets the same number of turns, and a stall in either changes nothing."""
    clock, calls = [0.0], []
    monkeypatch.setattr(few_rows.time, "perf_counter", lambda: clock[0])

    def way(number):
        def run(*product):
            calls.append(number)
            clock[0] += seconds[number] * (100 if len(calls) // len(seconds) == 1 else 1)
            return product[0]

        return run

    own, *others = map(way, range(len(seconds)))
    trial = Trial(*others)
    trial.ways = (own, *others)
    while trial.verdict is None:
        trial(torch.zeros(1))
    hopeful = [way for way, least in enumerate(seconds) if least <= HOPELESS * min(seconds)]
    further = hopeful * (TIMES - GLANCES) if len(hopeful) > 1 else []
    assert calls == list(range(len(seconds))) * GLANCES + further, "those that are far behind are not asked again"
    trial.verdict(torch.zeros(1))
    assert calls[-1] == taken


def test_sizes_have_ways_of_their_own():
    weight = torch.randn(8, 6)
    ways = Ways(weight.shape, weight.dtype)
    for number in (1, 2, 16, 17, 24, 25):
        rows = torch.randn(number, 6)
        for _ in range(2 * TIMES):
            way = ways[number]
            product = (rows, weight, None)
            found = ways.try_out(number, way, *product) if isinstance(way, Trial) else way(*product)
            torch.testing.assert_close(found, rows @ weight.t())
    assert ways.keys() == {1, 2, 16, 17, 24, 25, 32}
    assert [number for number, way in ways.items() if isinstance(way, Trial)] == [32], "17, 24 and 25 are one size"


# ---------------------------------------------------------------------- in rounds
@pytest.mark.parametrize("method", ["eagle", "poss", "medusa", "hydra", "eagle3", "peagle", "dspark"])
def test_texts_are_the_targets(method, always):
    target, ids = own_target(), prompt()
    expected = plain(target, ids, NEW)
    heads = random_heads(target, method)
    assert torch.equal(plain(target, ids, NEW, assistant_model=heads), expected)
    assert {1, 2} <= {min(number, 2) for number in always} or method in ("medusa", "peagle", "dspark")
    assert max(always) > 1


def test_batches_and_streams(always):
    target = own_target()
    inputs, alone = batch_of()
    texts, heads = alone_texts(target, alone), random_heads(target, "poss")
    assert_rows(greedy(target, inputs, assistant_model=heads), inputs["input_ids"].shape[1], texts)
    for text in generate_stream(target, heads, alone, 2, max_new_tokens=NEW, do_sample=False):
        assert text.token_ids == texts[text.index][:NEW]
    assert always


def test_plain_steps_are_computed_as_ever(always):
    """A single row is multiplied by the target's weights exactly as in plain decoding, bit for bit."""
    target, ids = own_target(), prompt()
    few = FewRows(target)
    with torch.no_grad():
        expected = target(ids[:, :1]).logits
        with few.at_work(5, fewest=2):
            assert torch.equal(target(ids[:, :1]).logits, expected) and not always
            torch.testing.assert_close(target(ids[:, :5]).logits, target(ids[:, :5]).logits)
    assert set(always) == {5}


def test_where_it_helps_no_layer_nothing_is_done(monkeypatch):
    """Applies per number of rows, and only once all layers have been tried."""
    layers, rows = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), torch.randn(3, 4)
    monkeypatch.setattr(few_rows, "_WAYS", {})
    few, own = FewRows(layers), nn.Linear.forward
    small, other = few.layers[layers[0]], few.layers[layers[1]]
    small[3], other[3] = linear, Trial(turned)
    with few.at_work(3, fewest=1):
        assert nn.Linear.forward is not own
    other[3] = linear
    with few.at_work(3, fewest=1):
        layers(rows)
    with few.at_work(3, fewest=1):
        assert nn.Linear.forward is own
    with few.at_work(2, fewest=1):
        assert nn.Linear.forward is not own
    with few.at_work(1, fewest=2):
        assert nn.Linear.forward is own, "a plain step"
    other[4], small[4] = turned, linear
    for _ in range(2):
        with few.at_work(4, fewest=1):
            assert nn.Linear.forward is not own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ways_there_are(dtype, kernel):
    """A kernel multiplies by weights that consist of whole blocks. Only in float32 may the weight come first."""
    few_rows.kernel_for(torch.Size([64, 32]), dtype)
    WORKSHOP.wait()
    turns = [turned] if dtype == torch.float32 else []
    kernels = [] if WORKSHOP.kernels[dtype] is None else [WORKSHOP.kernels[dtype]]
    assert few_rows.other_ways(3, torch.Size([64, 32]), dtype) == [*turns, *kernels]
    assert few_rows.other_ways(3, torch.Size([64, 33]), dtype) == turns
    ways = Ways(torch.Size([64, 33]), dtype)
    assert (ways[3] is linear) == (not turns) and ways[99] is ways[104]


def test_what_slower_ways_cost_is_no_cost_of_a_round(monkeypatch):
    def slow(*product):
        time.sleep(0.02)
        return turned(*product)

    monkeypatch.setattr(few_rows, "_WAYS", {})
    monkeypatch.setattr(few_rows, "other_ways", lambda *size: [slow])
    layer = nn.Linear(16, 16)
    work, spent = FewRows(layer), 0.0
    for _ in range(GLANCES):
        for _ in range(2):
            began = time.perf_counter()
            with work.at_work(3, fewest=1):
                layer(torch.ones(3, 16))
            spent += time.perf_counter() - began
    assert GLANCES * 0.02 <= (lost := work.take_lost()) < spent
    assert work.take_lost() == 0
    with work.at_work(3, fewest=1):  # uses the way that is known to be faster
        layer(torch.ones(3, 16))
    assert work.take_lost() == 0 < lost


def test_rounds_are_timed_without_it(monkeypatch):
    told = []
    monkeypatch.setattr(FewRows, "take_lost", lambda self: 1000.0)
    monkeypatch.setattr(Pace, "record_plain", lambda self, seconds: told.append(seconds))
    monkeypatch.setattr(Pace, "record_intake", lambda self, choice, seconds, *rest: told.append(seconds))
    target = own_target()
    heads = random_heads(target, "eagle")
    heads.adaptive = True
    plain(target, prompt(), NEW, assistant_model=heads)
    assert told and all(-1000 < seconds < -900 for seconds in told)


def test_all_is_tried_again_once_a_kernel_is_built(monkeypatch):
    monkeypatch.setattr(few_rows, "_WAYS", {})
    layer, own = nn.Linear(4, 6), nn.Linear.forward
    few = FewRows(layer)
    few.layers[layer][3] = linear
    for expected in (False, True):
        with few.at_work(3, fewest=1):
            assert (nn.Linear.forward is own) == expected
            layer(torch.randn(3, 4))
    few_rows._begin_anew()
    with few.at_work(3, fewest=1):
        assert nn.Linear.forward is not own and not few.layers[layer]


def test_prompts_are_not_of_few_rows(always):
    layer = nn.Linear(4, 4)
    with FewRows(layer).at_work(3, fewest=1):
        layer(torch.randn(MOST_ROWS + 1, 4))
        assert not always
        layer(torch.randn(MOST_ROWS, 4))
    assert always == [MOST_ROWS]


def test_other_threads_compute_as_ever(always):
    layer, rows, outputs = nn.Linear(4, 4), torch.randn(3, 4), []
    own = nn.Linear.forward
    with FewRows(layer).at_work(3, fewest=1):
        other = threading.Thread(target=lambda: outputs.append(layer(rows)))
        other.start()
        other.join()
        assert not always
        layer(input=rows)
        assert always == [3]
    assert torch.equal(outputs[0], layer(rows)) and nn.Linear.forward is own


def test_rounds_of_two_threads_at_a_time(always):
    """The call that ends first leaves the other call's products as they are."""
    layer, rows, begun, ended = nn.Linear(4, 4), torch.randn(3, 4), threading.Event(), threading.Event()

    def round_of_another():
        with FewRows(layer).at_work(3, fewest=1):
            begun.set()
            ended.wait(20)
            layer(rows)

    other = threading.Thread(target=round_of_another)
    with FewRows(layer).at_work(3, fewest=1):
        other.start()
        assert begun.wait(20)
    ended.set()
    other.join()
    layer(rows)
    assert always == [3], "the other's alone"


def test_somebody_compiles_another_model_meanwhile(always):
    """The other model compiles to one graph, as usual."""
    other, rows = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4)
    with FewRows(layer := nn.Linear(4, 4)).at_work(3, fewest=1):
        torch.testing.assert_close(torch.compile(other, fullgraph=True, backend="eager")(rows), other(rows))
        assert not always
        layer(rows)
    assert always == [3]


def test_an_error_leaves_torch_as_it_was():
    layer = nn.Linear(4, 4)
    with pytest.raises(RuntimeError), FewRows(layer).at_work(3, fewest=1):
        layer(torch.randn(3, 5))
    assert not few_rows._OF_THREAD.layers


class Own(nn.Linear):
    """A user's own layer, which may do anything."""


@pytest.mark.parametrize("left_alone", [nn.Linear(4, 4).double(), Own(4, 4), nn.Embedding(4, 4)], ids=str)
def test_other_layers_are_left_alone(left_alone, always):
    assert not FewRows(left_alone).layers
    if isinstance(left_alone, nn.Linear):
        with FewRows(nn.Linear(4, 4)).at_work(3, fewest=1):
            left_alone(torch.randn(3, 4, dtype=left_alone.weight.dtype))
    assert not always


def test_models_that_are_compiled_are_left_alone():
    compiled = nn.Sequential(nn.Linear(4, 4))
    compiled.compile()
    assert not FewRows(compiled).layers and FewRows(nn.Sequential(nn.Linear(4, 4))).layers


def test_linear_layers_that_somebody_changed_stay_so(always, monkeypatch):
    own = nn.Linear.forward
    changed = lambda self, input: own(self, input)  # noqa: E731, A006
    monkeypatch.setattr(nn.Linear, "forward", changed)
    layer = nn.Linear(4, 4)
    with FewRows(layer).at_work(3, fewest=1):
        assert nn.Linear.forward is changed
        layer(torch.randn(3, 4))
    assert not always
    monkeypatch.undo()


def test_layers_under_an_adapter(always):
    target, ids = own_target(), prompt()
    adapted = get_peft_model(target, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    expected = plain(adapted, ids, NEW)
    heads = random_heads(adapted.base_model.model, "eagle")
    assert torch.equal(plain(adapted, ids, NEW, assistant_model=heads), expected) and always


def test_costs_that_tune_measures_are_of_such_products(always):
    target = own_target()
    measure_costs(target, random_heads(target, "eagle"), 16, nodes=(1, 4), rows=(1, 2), repeats=1)
    assert {1, 4} <= set(always)
