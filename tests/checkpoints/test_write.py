"""What is written for a destination and read again is what was written, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.heads import SCALED_ROPES, scrambled_heads
from support.targets import VOCAB, deep_target, plain, prompt

from hf_specheads import DraftHead, ExportError, HydraHead, MedusaHead, export_heads, load_heads
from hf_specheads.checkpoints.write import needs_target

TOKENS = [token for token in range(VOCAB) if token % 3]
FIELDS = (
    "vocab_size", "hidden_size", "feature_size", "embedding_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "rope_parameters", "max_position_embeddings",
    "mlp_bias", "draft_vocab_size", "feature_layers", "own_embedding", "norm_before_residual", "norm_output",
    "norm_before_fc", "fc_norm", "qk_norm", "extra_norms", "num_heads", "num_blocks", "tied_blocks", "grounded",
    "head_arch", "lm_head", "hidden_state_offset", "block_size", "mask_token_id", "anchor_slot", "causal",
    "sliding_layers", "sliding_window", "sliding_causal", "window_from", "embedding_scale", "logit_multiplier",
    "logit_softcap", "selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size", "gru_hidden_size",
    "correction_rank", "plain_positions", "markov_rank", "markov_head", "confidence_head", "confidence_with_markov",
)  # fmt: skip
NO_ROPE_CONFIG = ("rope_parameters", "max_position_embeddings", "rms_norm_eps", "intermediate_size",
                  "num_attention_heads", "num_key_value_heads", "head_dim")  # fmt: skip

EAGLE = {
    "plain": {"fc_bias": False},
    "one key head": {"fc_bias": False, "num_key_value_heads": 1},
    "bias of q, k, v": {"fc_bias": False, "attention_bias": True},
    "linear rope": {"fc_bias": False, "rope_parameters": SCALED_ROPES["linear"]},
}
EAGLE3 = {
    "plain": {},
    "reduced vocabulary": {"draft_token_ids": TOKENS},
    "one key head": {"num_key_value_heads": 1, "draft_token_ids": TOKENS},
    "llama3 rope": {"rope_parameters": SCALED_ROPES["llama3"]},
    "two levels": {"feature_layers": (1, 4)},
}
EAGLE3_VARIANTS = {
    "norm_before_residual": {"norm_before_residual": True, "draft_token_ids": TOKENS},
    "norm_output": {"norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True, "feature_layers": (0, 3, 4, 6)},
    "own embedding": {"own_embedding": True},
}
NORMED = {"norms of queries and keys": {"qk_norm": True}}
BLOCK = {"num_hidden_layers": 2, "block_size": 5}
SELECTOR = {"selector_rank": 6, "selector_top_k": 8, "conv_kernel_size": 3, "conv_group_size": 8}
PEAGLE = {"plain": {}, "reduced vocabulary": {"draft_token_ids": TOKENS}, "own embedding": {"own_embedding": True}}
QWEN3_LAYER = {"model_type": "qwen3", "num_hidden_layers": 8, "hidden_size": 32, "intermediate_size": 37,
               "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB}  # fmt: skip
GRU = {"gru_hidden_size": 12, "correction_rank": 6, "plain_positions": 2}
SLIDING = {"sliding_layers": (0,), "sliding_window": 8}
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    *(("eagle", to, name, options) for to in ("vllm", "sglang", "eagle") for name, options in EAGLE.items()),
    *(("eagle", to, "bias", {}) for to in ("sglang", "eagle")),
    ("eagle", "eagle", "dynamic rope", {"rope_parameters": SCALED_ROPES["dynamic"]}),
    ("hass", "sglang", "bias", {}),
    ("hass", "eagle", "bias", {}),
    ("hass", "eagle", "norms", {"extra_norms": True}),
    *(("eagle3", to, name, options) for to in ("vllm", "sglang", "speculators") for name, options in EAGLE3.items()),
    *(("eagle3", "eagle", name, options) for name, options in EAGLE3.items() if name != "two levels"),
    *(("eagle3", to, name, options) for to in ("vllm", "speculators")
      for name, options in (EAGLE3_VARIANTS | NORMED).items()),
    *(("eagle3", "sglang", name, EAGLE3_VARIANTS[name]) for name in ("norm_output", "norm_before_fc", "fc_norm")),
    *(("eagle3", to, "bias of q, k, v", {"attention_bias": True}) for to in ("vllm", "speculators", "eagle")),
    *(("eagle3", to, "all biases", {"attention_bias": True, "attention_out_bias": True})
      for to in ("vllm", "speculators")),
    *(("medusa", to, "tied", {"num_heads": 3, "num_blocks": 2}) for to in ("medusa", "vllm-medusa")),
    *(("medusa", to, "untied", {"num_blocks": 3, "tied_blocks": False}) for to in ("medusa", "vllm-medusa")),
    ("medusa", "medusa", "shared lm_head", {"lm_head": "target"}),
    ("dflash", "dflash", "plain", {**BLOCK, "feature_layers": (2, 6)}),
    ("dflash", "dflash", "capped", {**BLOCK, "embedding_scale": 4.0, "logit_multiplier": 0.5, "logit_softcap": 30.0}),
    ("dflash", "dflash", "sliding", {**BLOCK, **SLIDING, "sliding_causal": True}),
    ("dflash", "dflash", "bias", {**BLOCK, "attention_bias": True, "attention_out_bias": True}),
    ("jetspec", "dflash", "causal", BLOCK),
    ("dflash2", "dflash", "all layers slide", {**BLOCK, "sliding_layers": (0, 1), "sliding_window": 9, **SELECTOR}),
    ("domino", "dflash", "drafts from the root on", {**BLOCK, **GRU}),
    ("domino", "dflash", "idle root", {**BLOCK, **GRU, "anchor_slot": "idle", "plain_positions": 0}),
    *(("peagle", "speculators", name, {"feature_layers": (1, 3, 6), "num_hidden_layers": 2, **options})
      for name, options in PEAGLE.items()),
    ("mtp", "speculators", "fine-tuned", {"native": False, "layer_config": QWEN3_LAYER}),
    ("hydra", "hydra", "grounded", {"num_heads": 3, "num_blocks": 3}),
    ("hydra", "hydra", "ungrounded", {"grounded": False, "num_blocks": 2, "tied_blocks": False}),
    ("hydra", "hydra", "Hydra++", {"head_arch": "prefix-mlp", "num_blocks": 4, "num_key_value_heads": 2}),
]  # fmt: skip


def differences(heads: DraftHead, again: DraftHead) -> list[str]:
    """Names of config fields and tensors that are not the same; biases of 0 that a destination needs are not told."""
    names = [name for name in FIELDS if hasattr(heads.config, name)]
    if isinstance(heads, MedusaHead) or (isinstance(heads, HydraHead) and heads.prefix is None):
        names = [name for name in names if name not in NO_ROPE_CONFIG]
    wrong = [name for name in names if getattr(heads.config, name) != getattr(again.config, name)]
    ours, theirs = heads.state_dict(), again.state_dict()
    wrong += [key for key in ours if key not in theirs or ours[key].dtype != theirs[key].dtype]
    wrong += [key for key in ours if key in theirs and not torch.equal(ours[key], theirs[key])]
    return wrong + [key for key in theirs if key not in ours and not (key.endswith("bias") and not theirs[key].any())]


@pytest.mark.parametrize(("method", "to", "name", "options"), CASES, ids=[f"{c[0]}-{c[1]}-{c[2]}" for c in CASES])
def test_round_trip(tmp_path: Path, method: str, to: str, name: str, options: dict[str, Any]) -> None:
    heads = scrambled_heads(deep_target(), method, **options)
    exported = export_heads(heads, tmp_path / f"{method}-heads", to=to, target="tiny-target")
    again = load_heads(exported.folder)
    assert type(again) is type(heads) and again.config.method == method
    assert differences(heads, again) == []
    assert sorted(path.name for path in exported.folder.iterdir()) == sorted(exported.files)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("method", "to"),
    [("eagle", "sglang"), ("eagle", "eagle"), ("eagle3", "vllm"), ("eagle3", "speculators"), ("eagle3", "eagle"),
     ("medusa", "medusa"), ("hydra", "hydra")],
)  # fmt: skip
def test_types_of_weights(tmp_path: Path, method: str, to: str, dtype: torch.dtype) -> None:
    heads = scrambled_heads(deep_target(), method, dtype=dtype)
    again = load_heads(export_heads(heads, tmp_path / "heads", to=to, target="tiny-target").folder)
    assert again.dtype == dtype and differences(heads, again) == []


@pytest.mark.parametrize("to", ["sglang", "eagle"])
def test_drafting_is_the_same(tmp_path: Path, to: str) -> None:
    target, ids = deep_target(), prompt()
    heads = scrambled_heads(deep_target(), "eagle")
    expected = plain(target, ids, 24)
    assert torch.equal(plain(target, ids, 24, assistant_model=heads), expected)
    again = load_heads(export_heads(heads, tmp_path / "heads", to=to, target=target).folder)
    assert torch.equal(plain(target, ids, 24, assistant_model=again), expected)
    assert again.last_stats.num_accepted == heads.last_stats.num_accepted


@pytest.mark.parametrize("method", ["poss", "poss-lora", "poss-eagle3"])
@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_poss_heads_become_their_specialist_0(tmp_path: Path, method: str, to: str) -> None:
    options = {"num_specialists": 2, "positions_per_specialist": 2}
    heads = scrambled_heads(
        deep_target(), method, **options, **({} if method == "poss-eagle3" else {"fc_bias": False})
    )
    exported = export_heads(heads, tmp_path / "heads", to=to)
    again = load_heads(exported.folder)
    assert again.config.method == ("eagle3" if method == "poss-eagle3" else "eagle")
    first, found = heads.specialist_state(0), again.specialist_state(0)
    assert first.keys() == found.keys() and all(torch.equal(first[key], found[key]) for key in first)
    shared = {key: value for key, value in heads.state_dict().items() if not key.startswith("layers.")}
    assert all(torch.equal(again.state_dict()[key], value) for key, value in shared.items())
    assert any("only specialist 0 of 2" in note and "positions 1 to 2" in note for note in exported.notes)


@pytest.mark.parametrize("method", ["poss", "poss-lora"])
def test_poss_heads_keep_their_specialists_in_their_authors_layout(tmp_path: Path, method: str) -> None:
    target = deep_target()
    heads = scrambled_heads(deep_target(), method, num_specialists=3, positions_per_specialist=2)
    exported = export_heads(heads, tmp_path / "PosS2-heads", to="eagle", target=target)
    again = load_heads(exported.folder)
    assert (again.config.num_specialists, again.config.positions_per_specialist) == (3, 2)
    for index in range(3):
        ours, theirs = heads.specialist_state(index), again.specialist_state(index)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    again.check_target(target)
    written = load_file(exported.folder / "model.safetensors")
    assert torch.equal(written["embed_tokens.weight"], target.get_input_embeddings().weight)
    assert any("--position_per_layer 2 --forward_num_total 6" in note for note in exported.notes)


def test_a_draft_language_model_is_an_ordinary_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    heads = scrambled_heads(deep_target(), "draft-lm", num_hidden_layers=1)
    exported = export_heads(heads, tmp_path / "lm", to="vllm", target="tiny-target")
    again = AutoModelForCausalLM.from_pretrained(exported.folder)
    ours, theirs = heads.language_model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert '"method": "draft_model"' in exported.command


def test_pruned_eagle3_heads_are_written_as_if_trained_so(tmp_path: Path) -> None:
    target, ids = deep_target(), prompt()
    heads = scrambled_heads(deep_target(), "eagle3", draft_token_ids=TOKENS)
    kept = TOKENS[::2]
    heads.prune_draft_vocabulary(kept)
    expected = plain(target, ids, 16, assistant_model=heads)
    for to in ("vllm", "sglang", "speculators", "eagle"):
        again = load_heads(export_heads(heads, tmp_path / to, to=to, target="tiny-target").folder)
        assert again.draft_vocabulary.tolist() == kept
        assert torch.equal(plain(target, ids, 16, assistant_model=again), expected)
        assert again.last_stats.num_accepted == heads.last_stats.num_accepted
    eagle = scrambled_heads(deep_target(), "eagle", fc_bias=False)
    eagle.prune_draft_vocabulary(kept)
    exported = export_heads(eagle, tmp_path / "pruned", to="vllm")
    assert any(f"pruned to {len(kept)} tokens" in note for note in exported.notes)
    assert load_heads(exported.folder).draft_vocabulary is None


MARKOV = {**BLOCK, "markov_rank": 6}
WITH_COPIES = {
    "dflash": ("dflash", "speculators", {**BLOCK, **SLIDING, "window_from": "anchor", "anchor_slot": "drafts"}),
    "dflash, pruned": ("dflash", "speculators", BLOCK),
    "dspark": ("dspark", "speculators", {**MARKOV, "confidence_with_markov": False, "anchor_slot": "idle"}),
    "dspark, pruned": ("dspark", "speculators", {**MARKOV, "markov_head": "rnn"}),
    "dspark for its authors": ("dspark", "dflash", {**MARKOV, "markov_head": "gated"}),
    "dspark without confidence": ("dspark", "dflash", {**MARKOV, "confidence_head": False}),
    "dflash2": ("dflash2", "speculators", {**BLOCK, **SELECTOR, "sliding_layers": (1,), "sliding_window": 9,
                                           "window_from": "anchor"}),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_COPIES)
def test_block_drafters_carry_copies_of_their_target(tmp_path: Path, name: str) -> None:
    target, (method, to, options), pruned = deep_target(), WITH_COPIES[name], name.endswith("pruned")
    heads = scrambled_heads(target, method, **options)
    if pruned:
        heads.prune_draft_vocabulary(TOKENS)
    with pytest.raises(ExportError, match="pass the loaded"):
        export_heads(heads, tmp_path / "heads", to=to, target="name")
    assert needs_target(heads, to)
    target.config._name_or_path = target.config._name_or_path or "tiny-target"
    exported = export_heads(heads, tmp_path / "heads", to=to, target=target)
    saved = load_file(exported.folder / "model.safetensors")
    assert torch.equal(saved["embed_tokens.weight"], target.get_input_embeddings().weight)
    assert len(saved["lm_head.weight"]) == (len(TOKENS) if pruned else VOCAB)
    again = load_heads(exported.folder)
    assert type(again) is type(heads)
    if to == "speculators":
        assert again.config.target["name"] == target.config.name_or_path
    assert (exported.command is None) == (to == "dflash" or options.get("markov_head") == "rnn")
    if method == "dspark" and pruned:  # rows of what is not drafted are not written
        kept = torch.zeros(VOCAB, 1).index_fill(0, torch.tensor(TOKENS), 1)
        heads.markov_head.markov_w2.weight.data.mul_(kept)
    assert differences(heads, again) == []
    assert torch.equal(plain(target, prompt(), 8, assistant_model=again), plain(target, prompt(), 8))


def test_fine_tuned_mtp_layers_lie_as_in_a_target(tmp_path: Path) -> None:
    """In Qwen's layout, experts one by one; a target's own layers are not written again."""
    for fields in ({}, {"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": True,
                        "moe_intermediate_size": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}):  # fmt: skip
        heads = scrambled_heads(deep_target(), "mtp", native=False)
        layer = {**heads.config.layer_config, **fields}
        heads = scrambled_heads(deep_target(), "mtp", native=False, layer_config=layer)
        folder = tmp_path / str(len(fields))
        exported = export_heads(heads, folder, to="mtp")
        names = set(load_file(folder / "model.safetensors"))
        assert all(name.startswith("mtp.") for name in names)
        assert ("mtp.layers.0.mlp.experts.2.up_proj.weight" in names) == bool(fields)
        assert any("model.safetensors.index.json" in note for note in exported.notes)
        again = load_heads(folder, method="mtp")
        assert again.config.native and differences(heads, again) == []
        with pytest.raises(ExportError, match="target's own"):
            export_heads(again, tmp_path / "again", to="mtp")
    with pytest.raises(ExportError, match=r"layers of 'qwen3_moe'.*--to mtp"):
        export_heads(heads, tmp_path / "moe", to="speculators", target="tiny-target")
    dense = scrambled_heads(deep_target(), "mtp", native=False, layer_config=QWEN3_LAYER)
    exported = export_heads(dense, tmp_path / "dense", to="speculators", target="tiny-target")
    assert exported.command is None and any("--to mtp" in note for note in exported.notes), "vLLM refuses it"
    two = scrambled_heads(deep_target(), "mtp", native=False, num_mtp_layers=2)
    with pytest.raises(ExportError, match="2 MTP layers"):
        export_heads(two, tmp_path / "two", to="speculators", target="tiny-target")
