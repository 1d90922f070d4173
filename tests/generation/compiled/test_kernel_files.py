"""Kernels of a graph are compiled in few files, with the same results as in one file each."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import async_compile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.utils import fresh_cache

from hf_specheads.generation.compiled import guards, kernel_files
from hf_specheads.generation.compiled.kernel_files import kernels_in_few_files, shared_out, source_of

# makes the compiler write every kernel anew, for two cores
ANEW = {"fx_graph_cache": False, "compile_threads": 2}
PRODUCTS = 4


def several(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A function with a product between each two kernels, which keeps the kernels apart."""
    for number in range(PRODUCTS):
        rows = torch.softmax(rows * (number + 1), -1).cumsum(-1).to(rows.dtype) @ weight
    return rows.sin()


@pytest.fixture
def graph(monkeypatch):
    """Compiles anew, and returns the result, that of eager code, and the sources of all C++ files."""
    sources = []
    load_async = CppPythonBindingsCodeCache.load_async.__func__
    monkeypatch.setattr(
        CppPythonBindingsCodeCache,
        "load_async",
        classmethod(lambda cls, code, *args, **kwargs: sources.append(code) or load_async(cls, code, *args, **kwargs)),
    )

    def run():
        generator = torch.Generator().manual_seed(0)
        rows, weight = (torch.randn(size, 16, generator=generator) for size in (5, 16))
        torch._dynamo.reset()
        with fresh_cache(), torch._inductor.config.patch(ANEW), torch._functorch.config.patch(
            enable_autograd_cache=False
        ):  # fmt: skip
            got = torch.compile(several)(rows, weight)
        return got, several(rows, weight), sources

    return run


@given(st.lists(st.text(max_size=30), unique=True, min_size=1, max_size=20), st.integers(1, 6))
def test_every_kernel_has_one_file(sources, most):
    kernels = [(("float*",), source) for source in sources]
    shares = shared_out(kernels, most)
    assert len(shares) == min(most, len(kernels)) and all(shares)
    assert sorted(kernel for share in shares for kernel in share) == sorted(kernels)
    assert shares == shared_out(list(kernels), most)
    lengths = [sum(len(source) for _, source in share) for share in shares]
    assert max(lengths) - min(lengths) <= max(len(source) for source in sources)


def test_few_files_hold_the_same_kernels(graph):
    """Uses the compiler settings of rounds."""
    with guards.quick_compiler():
        got, expected, sources = graph()
    torch.testing.assert_close(got, expected)
    files = [source for source in sources if "namespace of_kernel_0" in source]
    assert len(files) == 2 and sum(file.count("namespace of_kernel_") for file in files) > 2
    assert all("kernel_" in source for source in sources)


@pytest.mark.slow
@pytest.mark.parametrize("together", [lambda kernels: 1 / 0, lambda kernels: "this is no C++"], ids=["names", "code"])
def test_what_cannot_be_together_is_compiled_alone(graph, monkeypatch, together):
    monkeypatch.setattr(kernel_files, "source_of", together)
    with kernels_in_few_files():
        got, expected, sources = graph()
    torch.testing.assert_close(got, expected)
    assert any("kernel(" in source for source in sources)


@pytest.mark.slow
def test_with_one_core_nothing_changes(graph, monkeypatch):
    monkeypatch.setitem(ANEW, "compile_threads", 1)
    with kernels_in_few_files():
        got, expected, sources = graph()
    torch.testing.assert_close(got, expected)
    assert sources and not any("namespace of_kernel_" in source for source in sources)


def test_other_code_is_left_as_it_is():
    """Only code that consists of one function can share a file with other code."""
    compiled = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_compile, "get_compile_threads", lambda: 2)
        patch.setattr(async_compile.AsyncCompile, "cpp_pybinding", lambda self, *kernel: compiled.append(kernel))
        with kernels_in_few_files(), kernels_in_few_files():
            compiler = async_compile.AsyncCompile()
            for source in (
                "template <typename T> T one(T x);",
                '#include <vector>\nextern "C" void kernel(int* x) {}',
            ):
                assert compiler.cpp_pybinding(["int*"], source) is None
                assert compiled[-1] == (["int*"], source)
        assert not hasattr(async_compile.AsyncCompile.cpp_pybinding, "one_each")


def test_bindings_are_those_of_torch():
    code = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(A) {B}'
    kernel = (("const float*", "int64_t"), code)
    source = source_of([kernel, kernel])
    for index in range(2):
        assert f"static void kernel_{index}(A) {{B}}" in source and f"PyInit_kernel_{index}(" in source
        assert f"kernel_{index}(parse_arg<float*>(args, 0), parse_arg<int64_t>(args, 1));" in source
    assert 'extern "C"' not in source and source.count("#include <torch/") == 1


def test_another_torch_is_left_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "hf_specheads.generation.compiled.kernel_files", None)
    known = importlib.import_module("torch._inductor.async_compile").AsyncCompile.cpp_pybinding
    with guards.quick_compiler():
        assert async_compile.AsyncCompile.cpp_pybinding is known
