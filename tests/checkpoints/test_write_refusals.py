"""What a destination cannot represent is refused with the reason and the mend; a bias that vLLM lacks is absorbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.heads import SCALED_ROPES, scrambled_heads
from support.targets import deep_target

from hf_specheads import DraftHead, ExportError, WrongTargetError, export_heads, load_heads
from hf_specheads.checkpoints.layouts.commands import path_note
from hf_specheads.checkpoints.write import ALL_DESTINATIONS, DESTINATIONS, needs_target

OTHER_WIDTH = {"own_embedding": True, "hidden_size": 24, "head_dim": 8}


@pytest.mark.parametrize(
    ("method", "options", "to", "words"),
    [
        ("eagle", {}, "speculators", r"no layout for EAGLE.*--to vllm"),
        ("eagle", {"inputs": "token"}, "vllm", r"inputs='token'.*train heads without `inputs`"),
        ("eagle", {"inputs": "feature+token"}, "sglang", r"inputs='feature\+token'"),
        ("eagle", {"inputs": "feature"}, "eagle", r"inputs='feature'"),
        ("eagle", {}, "vllm", r"`fc` has no bias.*pass the loaded target"),
        ("eagle", {"extra_norms": True}, "vllm", r"three norms.*--to eagle"),
        ("eagle", {"mlp_bias": True}, "sglang", r"biases in their MLP"),
        ("eagle", {"mlp_bias": True}, "eagle", r"--to vllm"),
        ("eagle", {"attention_out_bias": True}, "eagle", r"biases of `o_proj`"),
        ("eagle", {"head_dim": 4}, "eagle", r"4 of width 4 at hidden_size=32"),
        ("eagle", {"fc_bias": False, "hidden_act": "gelu"}, "vllm", r"'gelu'.*only 'silu'"),
        ("eagle", {"hidden_act": "gelu"}, "sglang", r"'gelu'.*only 'silu'"),
        ("eagle", {"rope_parameters": SCALED_ROPES["dynamic"]}, "sglang", r"rope 'dynamic'"),
        ("eagle", {"rope_parameters": SCALED_ROPES["llama3"]}, "eagle", r"rope 'llama3'"),
        ("eagle3", {"norm_before_residual": True}, "sglang", r"norm_before_residual=True.*--to vllm"),
        ("eagle3", {"attention_bias": True}, "sglang", r"biases of attention.*--to vllm"),
        ("eagle3", {"qk_norm": True}, "sglang", r"norms of queries and keys"),
        ("eagle3", {"own_embedding": True}, "sglang", r"embedding of their own.*replaces it"),
        ("eagle3", {"norm_output": True}, "eagle", r"\['norm_output'\].*--to vllm"),
        ("eagle3", {"qk_norm": True, "mlp_bias": True}, "vllm", r"MLP and norms of queries"),
        ("eagle3", {"qk_norm": True, "mlp_bias": True}, "speculators", r"MLP and norms of queries"),
        ("eagle3", {"feature_layers": (1, 3, 4)}, "eagle", r"\[1, 3, 4\].*2, N // 2 and N - 3 of N=8"),
        ("eagle3", {"feature_layers": (2, 4, -1)}, "vllm", r"only those that enter a layer.*final norm"),
        ("eagle3", {"feature_layers": (2, 4, 8)}, "sglang", r"0 to 8 - 1"),
        ("eagle3", OTHER_WIDTH, "speculators", r"24 wide and their target is 32 wide"),
        ("eagle3", {"hidden_size": 24, "own_embedding": False}, "vllm", r"embeddings of width 32"),
        ("medusa", {"lm_head": "target"}, "vllm-medusa", r"share the target's `lm_head`.*lm_head='own'"),
        ("hydra", {"lm_head": "target"}, "hydra", r"share the target's `lm_head`.*lm_head='own'"),
        ("medusa", {}, "vllm", r"cannot serve medusa heads.*'vllm-medusa', 'medusa'"),
        ("hydra", {}, "eagle", r"cannot serve hydra heads.*'hydra'"),
        ("draft-lm", {}, "speculators", r"cannot serve draft-lm heads.*'vllm', 'sglang'"),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, method: str, options: dict[str, Any], to: str, words: str) -> None:
    heads = scrambled_heads(deep_target(), method, **options)
    with pytest.raises(ExportError, match=words):
        export_heads(heads, tmp_path / "heads", to=to, target="tiny-target")
    assert not (tmp_path / "heads").exists()


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_target_that_scales_its_embeddings(tmp_path: Path, method: str) -> None:
    """Draft layers of engines read the target's embeddings as stored; only vLLM takes scaled ones from the file."""
    target = deep_target(own=True)
    heads = scrambled_heads(target, method, **({"fc_bias": False} if method == "eagle" else {}))
    heads.config.target = {**heads.config.target, "model_type": "gemma3_text"}
    with pytest.raises(ExportError, match=r"scales its embeddings.*--to vllm"):
        export_heads(heads, tmp_path / "a", to="sglang")
    with pytest.raises(ExportError, match=r"scales its embeddings.*pass the loaded target"):
        export_heads(heads, tmp_path / "b", to="vllm")
    assert needs_target(heads, "vllm")
    exported = export_heads(heads, tmp_path / "c", to="vllm", target=target)
    written = load_file(exported.folder / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(written, target.get_input_embeddings().weight)


def test_wrong_arguments(tmp_path: Path) -> None:
    heads = scrambled_heads(deep_target(), "eagle", fc_bias=False)
    with pytest.raises(ExportError, match=r"`to` must be one of \['dflash', 'eagle', 'hydra'.*got 'tgi'"):
        export_heads(heads, tmp_path / "a", to="tgi")
    with pytest.raises(ExportError, match="must be loaded draft heads, got str"):
        export_heads("user/heads", tmp_path / "a", to="vllm")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("x")
    with pytest.raises(FileExistsError, match="not empty"):
        export_heads(heads, tmp_path / "full", to="vllm")
    assert export_heads(heads, tmp_path / "full", to="vllm", overwrite=True).files == (
        "config.json",
        "model.safetensors",
    )
    assert set(ALL_DESTINATIONS) == {to for known in DESTINATIONS.values() for to in known}


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    heads = scrambled_heads(deep_target(), "eagle", fc_bias=False)
    heads.layers[0].to("meta")
    with pytest.raises(ExportError, match=r"layers.0.*other weights are offloaded"):
        export_heads(heads, tmp_path / "a", to="vllm")
    heads = scrambled_heads(deep_target(), "eagle", fc_bias=False)
    heads.is_quantized = True  # as transformers marks them
    with pytest.raises(ExportError, match="without `quantization_config`"):
        export_heads(heads, tmp_path / "b", to="vllm")


# ------------------------------------------------------------------ the bias of fc
def fused(heads: DraftHead, folder: Path, embeddings: torch.Tensor, rows: torch.Tensor, features: torch.Tensor):
    """What `fc` makes of tokens and features in heads and in their export."""
    written = load_file(folder / "model.safetensors")
    assert "fc.bias" not in written
    theirs = F.linear(torch.cat([written["embed_tokens.weight"][rows], features], dim=-1), written["fc.weight"])
    return heads.fuse(embeddings[rows], features), theirs


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bias_of_fc_moves_into_the_embedding(tmp_path: Path, dtype: torch.dtype) -> None:
    target = deep_target(own=True).to(dtype)
    heads = scrambled_heads(target, "eagle", dtype=dtype)
    heads.fc.bias.mul_(10)  # longer than the rounding error of 16 bits could hide
    folder = export_heads(heads, tmp_path / "heads", to="vllm", target=target).folder
    rows = torch.arange(99)
    features = torch.randn(99, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours, theirs = fused(heads, folder, target.get_input_embeddings().weight, rows, features)
    without = ours - heads.fc.bias
    error = float((ours - theirs).abs().max())
    assert error < (1e-4 if dtype == torch.float32 else 0.1)
    assert float((without - theirs).abs().max()) > 1.0  # leaving it out would be seen


@torch.no_grad()
def test_what_was_measured_of_the_bias_is_said(tmp_path: Path) -> None:
    target = deep_target()
    exported = export_heads(scrambled_heads(target, "eagle"), tmp_path / "eagle-heads", to="vllm", target=target)
    (note,) = exported.notes
    assert "largest error of a draft logit" in note and "same favourite token in 100.0%" in note
    again = load_heads(exported.folder)
    with pytest.raises(WrongTargetError, match="fingerprint"):  # its embedding is not the target's: not for us
        again.check_target(target)


@torch.no_grad()
def test_a_bias_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    target = deep_target()
    heads = scrambled_heads(target, "eagle")
    heads.fc.weight[:, :32] = heads.fc.weight[:, :1]
    with pytest.raises(ExportError, match=r"condition number.*fc_bias=False, or export `--to sglang`"):
        export_heads(heads, tmp_path / "heads", to="vllm", target=target)
    overflowing = scrambled_heads(target, "eagle", dtype=torch.float16)  # fp16 ends at 65504
    u, s, v = torch.linalg.svd(overflowing.fc.weight[:, :32].float())
    s[-1] = 0
    overflowing.fc.weight[:, :32] = (u @ torch.diag(s) @ v).half()
    overflowing.fc.bias.mul_(200)
    with pytest.raises(ExportError, match=r"only [0-9.]+% of the drafted tokens stay the same, below 95%"):
        export_heads(overflowing, tmp_path / "heads", to="vllm", target=target)
    with pytest.raises(WrongTargetError):
        export_heads(scrambled_heads(deep_target(), "eagle"), tmp_path / "heads", to="vllm", target=other_target())


def other_target() -> Any:
    from support.targets import shared_target

    return shared_target("llama", num_hidden_layers=8, seed=5)


@pytest.mark.parametrize(
    ("method", "name", "words"),
    [("eagle", "heads", "infers no method"), ("eagle", "my-eagle3", "infers the method 'eagle3'"),
     ("eagle", "Eagle-heads", None), ("eagle3", "eagle-heads/eagle3", "infers the method 'eagle'"),
     ("eagle3", "my-EAGLE3", None)],
)  # fmt: skip
def test_the_method_that_vllm_reads_off_the_path(method: str, name: str, words: str | None) -> None:
    notes = path_note(Path("models") / name, method)
    assert (words is None) == (notes == []) and all(words in note and f"name {method!r}" in note for note in notes)


def test_no_target_weights_are_written_unasked(tmp_path: Path) -> None:
    for method, to in (("eagle", "sglang"), ("eagle", "eagle"), ("eagle3", "vllm"), ("eagle3", "sglang")):
        folder = export_heads(scrambled_heads(deep_target(), method), tmp_path / f"{method}-{to}", to=to).folder
        assert not [key for key in load_file(folder / "model.safetensors") if "embed" in key]
    written = load_file(tmp_path / "eagle-sglang" / "model.safetensors")
    assert not [key for key in written if "lm_head" in key]
