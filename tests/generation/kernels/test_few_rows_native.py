"""The native kernel for products of few rows: torch's numbers, the same result for a row in any batch, and fallbacks
for all failures."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import linear

from hf_specheads.generation.drafting.chains import favourites
from hf_specheads.generation.kernels import few_rows_native
from hf_specheads.generation.kernels.few_rows_native import KINDS, _Workshop, best_of_rows, build, fits, highest

DTYPES = pytest.mark.parametrize("dtype", list(KINDS), ids=str)


def kernel_of(dtype):
    kernel = build(dtype)
    if kernel is None:
        pytest.skip("this machine has no C compiler, or a processor without the instructions")
    return kernel


@pytest.mark.skipif(sys.platform != "linux", reason="compilers elsewhere may know no OpenMP")
def test_there_is_one_where_it_can_be_built():
    """Makes sure that the tests in this file run where they can."""
    if few_rows_native._command(torch.float32) is None:
        pytest.skip("this machine has no C compiler, or a processor without the instructions")
    assert build(torch.float32) is not None


@DTYPES
@pytest.mark.parametrize("sizes", [(16, 16), (17, 48), (40, 32), (257, 256), (1000, 64)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_the_same_numbers(dtype, sizes, bias):
    kernel, generator = kernel_of(dtype), torch.Generator().manual_seed(0)
    weight = torch.randn(sizes, generator=generator, dtype=torch.float32).to(dtype)
    added = torch.randn(sizes[0], generator=generator, dtype=torch.float32).to(dtype) if bias else None
    for number in (*range(1, 20), 64, 127):
        rows = torch.randn(number, sizes[1], generator=generator, dtype=torch.float32).to(dtype)
        wide = None if added is None else added.double()
        expected = linear(rows.double(), weight.double(), wide)
        torch.testing.assert_close(kernel(rows, weight, added), expected.to(dtype), rtol=1e-2, atol=1e-5)


@DTYPES
@torch.no_grad()
def test_a_row_has_the_same_result_in_every_company(dtype):
    """Results are equal bit for bit, so the shape of a tree has no effect on rounding."""
    kernel = kernel_of(dtype)
    rows, weight = torch.randn(40, 96).to(dtype), torch.randn(50, 96).to(dtype)
    whole = kernel(rows, weight, None)
    for number in range(1, 40):
        assert torch.equal(kernel(rows[:number], weight, None), whole[:number])
        assert torch.equal(kernel(rows[-number:], weight, None), whole[-number:])


@pytest.fixture
def four_threads():
    usual = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(usual)


@DTYPES
@torch.no_grad()
def test_several_weights_of_the_same_rows(dtype, four_threads):
    """Some weights have too few outputs for all threads. Results equal those of separate products, bit for bit."""
    kernel, rows = kernel_of(dtype), torch.randn(7, 48).to(dtype)
    weights = [torch.randn(outputs, 48).to(dtype) for outputs in (16, 300, 17, 33, 64)]
    biases = [None, torch.randn(300).to(dtype), torch.randn(17).to(dtype), None, torch.randn(64).to(dtype)]
    products = kernel.multiply(rows, weights, biases)
    for product, weight, bias in zip(products, weights, biases, strict=True):
        assert torch.equal(product, kernel(rows, weight, bias))
        torch.testing.assert_close(
            product, linear(rows, weight, bias), rtol=2e-2, atol=2e-1 if dtype != torch.float32 else 1e-4
        )


@DTYPES
@torch.no_grad()
def test_rows_of_any_shape_that_lie_apart(dtype):
    kernel, layer = kernel_of(dtype), nn.Linear(32, 24).to(dtype)
    for rows in (torch.randn(2, 3, 32), torch.randn(32, 5).t(), torch.randn(2, 3, 64)[..., ::2], torch.randn(32)):
        found = kernel(rows.to(dtype), layer.weight, layer.bias)
        torch.testing.assert_close(found, layer(rows.to(dtype)), rtol=2e-2, atol=1e-2)
        assert found.is_contiguous()


@torch.no_grad()
def test_numbers_that_are_none():
    """Covers products with such values. Values between two numbers are rounded to the nearest, as in torch."""
    kernel, weight = kernel_of(torch.bfloat16), torch.eye(16, dtype=torch.bfloat16)
    rows = torch.tensor([[float("nan"), 1.0] * 8, [float("inf"), 1.0] * 8], dtype=torch.bfloat16)
    assert torch.equal(kernel(rows, weight, None).isnan(), linear(rows, weight).isnan())
    some = torch.randn(30, 16).bfloat16()
    halves = weight * 0.5 + weight.roll(1, 0) * 0.00390625
    torch.testing.assert_close(
        kernel(some, halves, None), linear(some.float(), halves.float()).bfloat16(), rtol=0, atol=0
    )


def test_what_it_cannot_is_left_to_torch():
    kernel, layer, rows = kernel_of(torch.float32), nn.Linear(16, 32), torch.randn(3, 16)
    kernel(rows, layer.weight, layer.bias).sum().backward()
    assert layer.weight.grad is not None and layer.bias.grad is not None
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert kernel(rows, layer.weight, layer.bias).dtype == torch.bfloat16
        apart = torch.randn(16, 32).t()
        torch.testing.assert_close(kernel(rows, apart, None), rows @ apart.t())
        for wrong in (rows.double(), rows[:, :15]):
            with pytest.raises(RuntimeError) as ours:
                kernel(wrong, layer.weight, layer.bias)
            with pytest.raises(RuntimeError) as torchs:
                linear(wrong, layer.weight, layer.bias)
            assert str(ours.value) == str(torchs.value)


def test_weights_it_fits():
    assert fits(16, 16) and fits(4097, 256)
    assert not fits(15, 16) and not fits(16, 24) and not fits(16, 0)


# ---------------------------------------------------------------------- building
@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """A folder in which nothing was built."""
    kernel_of(torch.float32)
    monkeypatch.setattr(few_rows_native.constants, "HF_HOME", str(tmp_path))
    (tmp_path / "hf_specheads").mkdir()
    return tmp_path / "hf_specheads"


def test_it_is_built_once(elsewhere, monkeypatch):
    assert build(torch.float32) is not None
    assert [place.suffix for place in elsewhere.iterdir()] == [".so"]
    monkeypatch.setattr(few_rows_native.subprocess, "run", None)
    assert build(torch.float32) is not None, "nobody is asked again"


@pytest.mark.parametrize("compiler", ["no/such/compiler", "false", "cc '-O2"])
def test_a_compiler_that_fails(compiler, elsewhere, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    assert build(torch.float32) is None and not list(elsewhere.iterdir())


def test_a_compiler_with_arguments(elsewhere, monkeypatch):
    monkeypatch.setenv("CC", "cc -O1")
    assert build(torch.float32) is not None


def test_no_compiler_at_all(elsewhere, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(few_rows_native.shutil, "which", lambda name: None)
    assert build(torch.float32) is None


def test_a_processor_whose_instructions_are_not_known(elsewhere, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(few_rows_native.platform, "machine", lambda: "x86_64")
    assert build(torch.float32) is None


def test_a_file_that_is_no_library(elsewhere):
    few_rows_native._place(few_rows_native._command(torch.float32)).write_text("half of it", encoding="utf-8")
    assert build(torch.float32) is None


@pytest.mark.skipif(os.name == "posix" and os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(elsewhere):
    elsewhere.chmod(0o500)
    assert build(torch.float32) is None


def test_a_home_that_is_a_file(elsewhere, monkeypatch, tmp_path):
    monkeypatch.setattr(few_rows_native.constants, "HF_HOME", __file__)
    assert build(torch.float32) is None


def test_a_kernel_that_computes_anything_else_is_not_taken(elsewhere, monkeypatch, tmp_path):
    source = few_rows_native.SOURCE.read_text(encoding="utf-8")
    wrong = tmp_path / "few_rows.c"
    wrong.write_text(source.replace("parts[r][c] += row * column[c]", "parts[r][c] -= row * column[c]"), "utf-8")
    monkeypatch.setattr(few_rows_native, "SOURCE", wrong)
    assert build(torch.float32) is None and len(list(elsewhere.iterdir())) == 1


@pytest.mark.parametrize(("before", "taken"), [({"/torchs/libgomp.so.1"}, False), (set(), True)])
def test_threads_of_another_openmp_would_be_in_the_way(before, taken, elsewhere, monkeypatch):
    found = iter([before, before | {"/usr/lib/libomp.so.5"}])
    monkeypatch.setattr(few_rows_native, "_openmp_runtimes", lambda: next(found, {"/usr/lib/libomp.so.5"}))
    assert (build(torch.float32) is not None) == taken


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="this system does not tell what is loaded")
def test_torchs_openmp_is_found():
    torch.ones(1000, 1000, dtype=torch.float32).sum()
    assert len(few_rows_native._openmp_runtimes()) == torch.backends.openmp.is_available()


def test_whoever_orders_is_told_when_it_is_built(monkeypatch):
    built, told, may = [], [], threading.Event()

    def slow(dtype):
        may.wait(20)
        built.append(dtype)
        return None if dtype == torch.float16 else "a kernel"

    monkeypatch.setattr(few_rows_native, "build", slow)
    workshop = _Workshop()
    for dtype in (torch.float32, torch.float32, torch.float16):
        assert workshop.order(dtype, lambda dtype=dtype: told.append(dtype)) is None
    may.set()
    workshop.wait()
    assert sorted(map(str, built)) == ["torch.float16", "torch.float32"] and told == [torch.float32]
    assert (
        workshop.order(torch.float32, told.clear) == "a kernel" and workshop.order(torch.float16, told.clear) is None
    )
    assert told == [torch.float32], "nothing is built again"


# ---------------------------------------------------------------------- the best of rows
@pytest.fixture
def one_built(monkeypatch):
    """Provides a kernel, whatever other tests have ordered."""
    monkeypatch.setattr(few_rows_native.WORKSHOP, "any", kernel_of(torch.float32))


@given(
    seed=st.integers(0, 10_000),
    shape=st.sampled_from([(), (1,), (1, 1), (3,), (2, 7), (40, 1)]),
    count=st.sampled_from([1, 2, 7, 8, 15, 16, 17, 255, 256, 257, 1000, 4096, 5003]),
    scale=st.sampled_from([0.1, 5.0, 200.0]),
    ties=st.booleans(),
    pruned=st.booleans(),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_best_of_rows(one_built, seed, shape, count, scale, ties, pruned):
    """Equals torch's result: the first of several equal maxima."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, count, generator=generator, dtype=torch.float32) * scale
    logits = (logits / scale).round() if ties else logits
    logits[..., torch.rand(count, generator=generator, dtype=torch.float32) < 0.2] = -torch.inf
    logits[..., seed % count] = 1.0
    vocabulary = torch.randperm(3 * count, generator=generator)[:count] if pruned else None
    score, token = best_of_rows(logits, vocabulary)
    place = logits.argmax(-1, keepdim=True)
    assert torch.equal(token, place if vocabulary is None else vocabulary[place])
    expected = torch.log_softmax(logits.double(), -1).gather(-1, place)
    torch.testing.assert_close(score.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 5, 300, 302])
def test_the_best_of_a_row_that_overflows(one_built, wrong, place):
    logits = torch.zeros(1, 303, dtype=torch.float32)
    logits[0, place] = wrong
    score, token = best_of_rows(logits, None)
    assert score.isnan().item() and token.item() == 0
    score, token = best_of_rows(torch.full((1, 303), -torch.inf, dtype=torch.float32), torch.arange(5, 308))
    assert score.isnan().item() and token.item() == 5


def test_rows_whose_best_torch_finds(one_built):
    row = torch.zeros(1, 64, dtype=torch.float32)
    assert best_of_rows(row, None) is not None
    for other in (row.double(), row.expand(2, -1), row.expand(2, -1).T, row.clone().requires_grad_(), row.to("meta")):
        assert best_of_rows(other, None) is None
    assert best_of_rows(row[:, ::2], None) is None
    assert best_of_rows(row, torch.arange(128)[::2]) is None


def test_without_a_kernel_torch_finds_the_best(monkeypatch):
    monkeypatch.setattr(few_rows_native.WORKSHOP, "any", None)
    assert best_of_rows(torch.zeros(1, 64, dtype=torch.float32), None) is None


def test_drafts_are_the_same_with_and_without(one_built, monkeypatch):
    """Covers favourites of a chain, with a draft vocabulary and another temperature."""
    logits = torch.randn(1, 400, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
    vocabulary = torch.arange(400) * 2
    found = favourites(logits, 0.7, vocabulary)
    monkeypatch.setattr(few_rows_native.WORKSHOP, "any", None)
    expected = favourites(logits, 0.7, vocabulary)
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[0], expected[0])


@given(
    seed=st.integers(0, 10_000),
    shape=st.sampled_from([(1, 1, 1), (1, 7, 4096), (3, 2, 257), (9, 300), (5, 15), (40, 4099)]),
    ties=st.booleans(),
    spoilt=st.sampled_from([0.0, 0.001, 0.3]),
    wrong=st.sampled_from([float("nan"), float("inf"), -float("inf")]),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_highest_of_rows_is_argmax(one_built, seed, shape, ties, spoilt, wrong):
    """Returns the first of equal maxima, or the first NaN."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(shape, generator=generator, dtype=torch.float32) * 3
    scores = scores.round() if ties else scores
    scores[torch.rand(shape, generator=generator, dtype=torch.float32) < spoilt] = wrong
    found = highest(scores)
    assert torch.equal(found, scores.argmax(-1)) and torch.equal(found, scores.max(-1).indices)


def test_scores_whose_highest_torch_finds(one_built):
    scores = torch.zeros(2, 64, dtype=torch.float32)
    assert highest(scores).tolist() == [0, 0]
    for other in (scores.double(), scores.T, scores[:, ::2], scores.to("meta"), scores[:0], scores.bfloat16()):
        assert highest(other) is None
