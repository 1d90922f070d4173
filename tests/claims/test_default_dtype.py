"""Heads identify targets, draft and accept independently of torch's default dtype, which some users set to that of
their model."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.heads import random_heads
from support.targets import own_target, plain, prompt, shared_target

import hf_specheads
from hf_specheads.generation.verification import sampled
from hf_specheads.target.adapter import active_fingerprints, add_adapter
from hf_specheads.target.identity import spread_over, target_fingerprint

TYPES = [torch.bfloat16, torch.float16, torch.float64]
ROOTS = [Path(hf_specheads.__file__).parent, Path(hf_specheads.__file__).parents[1] / "trainer"]
OF_FLOATS = {"rand", "randn", "zeros", "ones", "empty", "linspace", "logspace", "eye"}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_target_is_known_again(dtype: torch.dtype) -> None:
    """Sampled embedding rows were once chosen by random numbers of the default dtype. With bf16 other rows, or none,
    were chosen."""
    target = own_target("llama", vocab_size=4099)
    add_adapter(target, rank=33, alpha=8, modules="q_proj")
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter))
    expected = target_fingerprint(target), active_fingerprints(target)
    with default_dtype(dtype):
        assert (target_fingerprint(target), active_fingerprints(target)) == expected


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("method", ["poss", "eagle3", "dspark", "lookup"])
def test_texts_and_drafts(method: str, dtype: torch.dtype) -> None:
    target, ids = shared_target("llama"), prompt()
    heads = random_heads(target, method)
    heads.adaptive = False
    heads.remember_target(target)
    expected = plain(target, ids, 20)
    assert torch.equal(plain(target, ids, 20, assistant_model=heads), expected)
    accepted = heads.last_stats.num_accepted
    with default_dtype(dtype):
        assert torch.equal(plain(target, ids, 20, assistant_model=heads.with_tree()), expected)
        assert torch.equal(plain(target, ids, 20, assistant_model=heads), expected)
    assert heads.last_stats.num_accepted == accepted


def test_drafted_tokens_are_accepted_by_fine_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 has 256 values between 0 and 1. With so few, rare tokens would be accepted too often, or never."""
    seen, original = [], sampled.accept_children
    monkeypatch.setattr(sampled, "accept_children", lambda *args: seen.append(args[3].dtype) or original(*args))
    target, ids = shared_target("llama"), prompt()
    heads = random_heads(target, "poss", kind="chain", depth=3, children="sampled")
    with default_dtype(torch.bfloat16):
        for changes in ({}, {"repetition_penalty": 1.1}):
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": True, **changes}
            target.generate(ids, assistant_model=heads, **options)
    assert set(seen) == {torch.float32}


def test_numbers_spread_evenly_however_many_there_are() -> None:
    assert spread_over(4096, 4) == [0, 1365, 2730, 4095]
    assert spread_over(1, 4) == [0, 0, 0, 0]
    assert spread_over(5, 1) == [0]
    assert spread_over(2**24 + 4, 4)[-1] == 2**24 + 3, "as float32 this is 2**24 + 4, which is past the end"
    for size in (5, 99, 32000, 50257, 128256, 151936, 262144):
        assert spread_over(size, 8) == torch.linspace(0, size - 1, 8, dtype=torch.float64).add(1e-6).long().tolist()


def test_tensors_of_floats_say_their_type() -> None:
    """Parameters and buffers take the dtype in which their model is made. All other float tensors must name their
    dtype."""
    silent = []
    for file in (file for root in ROOTS for file in root.rglob("*.py") if "shipped_pair" not in file.parts):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        parameters = {
            id(arg) for call in calls(tree) if name_of(call) in ("Parameter", "register_buffer") for arg in call.args
        }
        silent += [
            f"{file}:{call.lineno}"
            for call in calls(tree)
            if name_of(call) in OF_FLOATS
            and isinstance(call.func, ast.Attribute)
            and isinstance(call.func.value, ast.Name)
            and call.func.value.id == "torch"
            and id(call) not in parameters
            and not {"dtype", None} & {keyword.arg for keyword in call.keywords}
        ]
    assert not silent, f"say `dtype=` there: {silent}"


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))
