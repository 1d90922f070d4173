"""The C++ compiler is queried in the background for what inductor would otherwise wait for."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys

import pytest
import torch
from support.heads import random_heads
from support.targets import shared_target

from hf_specheads import load_heads
from hf_specheads.checkpoints import load
from hf_specheads.generation.compiled import toolchain

ASKS = """
import sys
from torch._inductor import cpu_vec_isa
if sys.argv[1] != "alone":
    from hf_specheads.generation.toolchain import warm_up_toolchain
    warm_up_toolchain().join()
    known = cpu_vec_isa.valid_vec_isa_list.cache_info().currsize
    assert known == (sys.argv[1] == "before"), known
    if known:
        cpu_vec_isa.VecISA.check_build = None  # nothing is tried again
        assert all(cpu_vec_isa.valid_vec_isa_list())
print([str(kind) for kind in cpu_vec_isa.valid_vec_isa_list()], cpu_vec_isa.pick_vec_isa().build_arch_flags())
"""


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(toolchain, "warm_up_toolchain", toolchain.warm_up_toolchain.__wrapped__)


@pytest.mark.slow
def test_finds_what_torch_finds(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = [subprocess.run([sys.executable, "-c", ASKS, when], capture_output=True, text=True, check=True).stdout
             for when in ("before", "alone")]  # fmt: skip
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "missing", ["torch._inductor.cpu_vec_isa", "torch._inductor.config", "torch._inductor.codecache"]
)
def test_another_torch_is_left_alone(missing, fresh, monkeypatch):
    """Missing internals of torch are no error here: the compiler finds everything out by itself, later."""
    kernels = []

    def stub(name):
        if name == missing:
            raise ImportError(name)
        module = importlib.import_module(name)
        if name.endswith("codecache"):
            monkeypatch.setattr(
                module.CppPythonBindingsCodeCache, "load_pybinding", lambda *call: kernels.append(call)
            )
        if name.endswith("cpu_vec_isa"):
            monkeypatch.setattr(module, "supported_vec_isa_list", [])
        return module

    failures = []
    monkeypatch.setattr(toolchain.importlib, "import_module", stub)
    monkeypatch.setattr(toolchain.threading, "excepthook", failures.append)
    toolchain.warm_up_toolchain().join(60)
    assert not failures and not kernels


@pytest.mark.slow
def test_instructions_that_the_compiler_lacks_are_left_to_torch(tmp_path, monkeypatch):
    """The processor has these instructions, but the compiler does not. The result of torch's own trials counts."""
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\ncase " $* " in *" -mavx"*) exit 1;; esac\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    found = [subprocess.run([sys.executable, "-c", ASKS, when], capture_output=True, text=True, check=True).stdout
             for when in ("refused", "alone")]  # fmt: skip
    assert found[0] == found[1] and found[0].startswith("[]")


@pytest.mark.parametrize(("compiles", "accelerated", "begins"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_begins_while_the_target_is_loaded(compiles, accelerated, begins, tmp_path, monkeypatch):
    random_heads(shared_target("llama")).save_pretrained(tmp_path)
    begun = []
    monkeypatch.setattr(load, "warm_up_toolchain", lambda: begun.append(1))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerated)
    assert load_heads(tmp_path, compile=compiles).compiled is compiles
    assert len(begun) == begins
