"""Every published layout is read: the same function as its own arithmetic, the target's text, and again from ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.layouts import LAYOUTS, stored, target
from support.targets import plain, prompt

from hf_specheads import load_heads

WITH_EMBEDDING = ("eagle3-narrow", "peagle", "speculators-peagle")  # one of their own


@pytest.mark.parametrize("name", LAYOUTS)
def test_load(name: str, tmp_path: Path) -> None:
    """Found for what it is, no weights of the target kept, and the target's own text in the end."""
    layout = LAYOUTS[name]
    folder = layout.write(tmp_path)
    found = stored(folder, **layout.arguments)
    heads = load_heads(folder, **layout.arguments)
    assert (found.layout, heads.config.method) == (layout.kind, layout.method)
    assert "embed_tokens.weight" not in heads.state_dict() or name in WITH_EMBEDDING
    read = {key: tensor.float() for key, tensor in found.tensors.items()}
    tied = heads.all_tied_weights_keys
    state = {key: tensor.float() for key, tensor in heads.state_dict().items() if key not in tied}
    assert read.keys() == state.keys() and all(torch.equal(state[key], tensor) for key, tensor in read.items())
    ids = prompt()
    assert torch.equal(plain(target(), ids, 4, assistant_model=heads.to(torch.float32)), plain(target(), ids, 4))


@pytest.mark.parametrize("name", LAYOUTS)
def test_convert(name: str, tmp_path: Path) -> None:
    """Saved in our own layout, and read again: the same tensors, config and drafts."""
    layout = LAYOUTS[name]
    heads = load_heads(layout.write(tmp_path), **layout.arguments)
    heads.save_pretrained(tmp_path / "ours")
    again = load_heads(tmp_path / "ours")
    assert again.state_dict().keys() == heads.state_dict().keys()
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in heads.state_dict().items())
    assert again.dtype == heads.dtype and again.config.to_diff_dict() == heads.config.to_diff_dict()
