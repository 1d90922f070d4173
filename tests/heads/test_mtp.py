"""MTP layers: out of a target's checkpoint, the same function in drafting and training, files without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.batches import alone_texts, assert_rows, batch_of, greedy
from support.families import tiny_target
from support.heads import scrambled_heads
from support.targets import own_target, plain, prompt, shared_target
from support.trees import TREES
from transformers import AutoModel, AutoModelForCausalLM

from hf_specheads import AutoDraftHead, HeadLoadError, MtpHead, UnsupportedGenerationError, load_heads
from hf_specheads.errors import CheckpointShapeError, UnknownFormatError
from hf_specheads.target.mtp import joined_experts, our_name
from hf_specheads.unroll.rows import TrainingRows, row_positions

NEW = 24
SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
INDEXED = ("deepseek_v32", "glm_moe_dsa")  # layers with an indexer, which has a cache of its own


def target_of(family: str):
    """One whose indexers choose fewer tokens than a text has."""
    return shared_target("llama") if family == "llama" else tiny_target(family, index_topk=8)


def target_with_mtp(folder: Path, layout: str = "qwen", layers: int = 1, target: Any = None) -> Path:
    """A checkpoint of a small target with random MTP layers in it, as its authors would have saved it."""
    target = own_target("llama") if target is None else target
    target.save_pretrained(folder)
    heads = scrambled_heads(target, "mtp", native=False, num_mtp_layers=layers)
    names = {
        "qwen": {"fc": "fc", "embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden",
                 "norm": "norm"},
        "deepseek": {"fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"},
    }[layout]  # fmt: skip
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in heads.state_dict().items():
        _, number, module, rest = key.split(".", 3)
        own = "" if module == "block" else f"{names[module]}."
        before = f"model.layers.{target.config.num_hidden_layers + int(number)}."
        if layout == "qwen":
            before = f"mtp.layers.{number}." if module == "block" else "mtp."
        tensors[f"{before}{own}{rest}"] = tensor.contiguous()
    if layout == "deepseek":
        tensors[f"model.layers.{target.config.num_hidden_layers}.embed_tokens.weight"] = torch.zeros(3, 3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load_target(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(("layout", "layers"), [("qwen", 1), ("deepseek", 1), ("deepseek", 2)])
def test_out_of_the_targets_checkpoint(layout, layers, tmp_path):
    folder = target_with_mtp(tmp_path, layout, layers)
    target = load_target(folder)
    expected = scrambled_heads(own_target("llama"), "mtp", native=False, num_mtp_layers=layers).state_dict()
    text = plain(target, prompt(), NEW)
    for heads in (load_heads(folder, method="mtp"), AutoDraftHead.from_target(target, "mtp")):
        assert isinstance(heads, MtpHead) and heads.config.num_mtp_layers == layers and heads.config.native
        assert heads.state_dict().keys() == expected.keys()
        assert all(torch.equal(heads.state_dict()[key], value) for key, value in expected.items())
    assert torch.equal(plain(target, prompt(), NEW, assistant_model=heads), text)


@pytest.mark.parametrize("family", INDEXED)
def test_layers_with_an_indexer_out_of_the_targets_checkpoint(family, tmp_path):
    folder = target_with_mtp(tmp_path, "deepseek", target=tiny_target(family, index_topk=64))
    target = load_target(folder)
    target.generation_config.eos_token_id = None
    heads = load_heads(folder, method="mtp")
    assert heads.config.native and any("indexer" in key for key in heads.state_dict())
    text = plain(target, prompt(), NEW)
    assert torch.equal(plain(target, prompt(), NEW, assistant_model=heads), text) and heads.last_stats.rounds > 0


def test_native_layers_are_not_saved_again_and_trained_ones_are(tmp_path):
    folder = target_with_mtp(tmp_path / "target")
    heads = load_heads(folder, method="mtp", kind="chain", depth=3)
    heads.save_pretrained(tmp_path / "native")
    assert not list((tmp_path / "native").glob("*.safetensors"))
    for load in (load_heads, AutoModel.from_pretrained):
        again = load(tmp_path / "native")
        assert again.tree_config.depth == 3
        assert all(torch.equal(value, again.state_dict()[key]) for key, value in heads.state_dict().items())
    one_step(heads, load_target(folder))
    heads.save_pretrained(tmp_path / "trained")
    again = load_heads(tmp_path / "trained")
    assert not again.config.native and list((tmp_path / "trained").glob("*.safetensors"))
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in heads.state_dict().items())


def one_step(heads: MtpHead, target) -> None:
    rows = training_rows(target, prompt())
    passes = list(heads.unroll(rows, 2))
    sum(drafted.hidden.square().mean() for drafted in passes).backward()
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter -= 0.1 * parameter.grad


def training_rows(target, ids: torch.Tensor) -> TrainingRows:
    """Rows 0 .. T - 2 of a text."""
    with torch.no_grad():
        features = target(ids, output_hidden_states=True).hidden_states[-1][:, :-1]
    documents = torch.zeros(len(ids), ids.shape[1] - 1, dtype=torch.long)
    embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    return TrainingRows(features, ids[:, :-1], ids[:, 1:], documents, row_positions(documents), embedding, lm_head)


@pytest.mark.parametrize("family", ["llama", *INDEXED])
@pytest.mark.parametrize("layers", [1, 2])
def test_training_computes_what_drafting_does(layers, family):
    """The chain of every round is that of the passes: drafted token by token along the text itself."""
    target = target_of(family)
    heads = scrambled_heads(target, "mtp", native=False, num_mtp_layers=layers).bind(target)
    ids = plain(target, prompt(), NEW)
    rows = training_rows(target, ids)
    with torch.no_grad():
        passes = [drafted.hidden for drafted in heads.unroll(rows, 3)]
        for root in (4, 9, 20):
            cache = heads.new_draft_cache()
            state, _ = heads.start_draft(cache, ids[:, : root + 1], rows.features[:, :root])
            assert torch.allclose(state[:, 0], passes[0][:, root - 1], atol=1e-5)
            for position in (1, 2):
                node = ids[:, root + position : root + position + 1]
                state, _ = heads.extend_draft(cache, position, node, state, None)
                assert torch.allclose(state[:, 0], passes[position][:, root - 1 + position], atol=1e-5)


@pytest.mark.parametrize("family", ["llama", *INDEXED])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_cache_is_that_of_one_pass(layers, family):
    """Rows taken in bit by bit, and ragged, as in a single round."""
    target = target_of(family)
    heads = scrambled_heads(target, "mtp", native=False, num_mtp_layers=layers).bind(target)
    ids = torch.cat([plain(target, prompt(), NEW), plain(target, prompt(seed=5), NEW)])
    with torch.no_grad():
        features = target(ids, output_hidden_states=True).hidden_states[-1]

        def draft(cuts: list[list[int]]) -> torch.Tensor:
            """Cuts hold, per round, how many tokens each sequence has committed."""
            cache, done = heads.new_draft_cache(), [0, 0]
            for ends in cuts:
                most = max(end - before for end, before in zip(ends, done, strict=True))
                columns = [torch.arange(end - most, end + 1).clamp_min(0) for end in ends]
                tokens = torch.stack([ids[row, places] for row, places in enumerate(columns)])
                states = torch.stack([features[row, places[:-1]] for row, places in enumerate(columns)])
                counts = [end - before for end, before in zip(ends, done, strict=True)]
                valid = torch.tensor([[column >= most - count for column in range(most)] for count in counts])
                cache.begin_round(valid, counts)
                state, _ = heads.start_draft(cache, tokens, states)
                visible = torch.ones(2, 1, 1, dtype=torch.bool)
                node = torch.stack([ids[row, end + 1 : end + 2] for row, end in enumerate(ends)])
                deeper, _ = heads.extend_draft(cache, 1, node, state, visible)
                done = ends
            return torch.cat([state, deeper], dim=1)

        whole = draft([[20, 18]])
        assert torch.allclose(draft([[6, 5], [7, 9], [19, 10], [20, 18]]), whole, atol=1e-5)


@pytest.mark.parametrize("layers", [1, 2])
def test_batches(layers):
    target = shared_target("llama")
    heads = scrambled_heads(target, "mtp", native=False, num_mtp_layers=layers)
    heads.tree_config = TREES["dynamic"]
    inputs, alone = batch_of((19, 4, 12))
    assert_rows(
        greedy(target, inputs, assistant_model=heads), inputs["input_ids"].shape[1], alone_texts(target, alone)
    )


# ---------------------------------------------------------------------- what is refused
def test_targets_without_mtp(tmp_path):
    own_target("llama").save_pretrained(tmp_path)
    with pytest.raises(HeadLoadError, match="has no MTP layers"):
        load_heads(tmp_path, method="mtp")
    with pytest.raises(HeadLoadError, match="has no MTP layers"):
        AutoDraftHead.from_target(load_target(tmp_path), "mtp")
    target = own_target("llama")
    target.config.name_or_path = ""
    with pytest.raises(HeadLoadError, match=r"not loaded from a checkpoint.*native=False"):
        AutoDraftHead.from_target(target, "mtp")
    with pytest.raises(ValueError, match="one of \\['mtp'\\], got 'eagle'"):
        load_heads(tmp_path, method="eagle")


def test_layers_that_cannot_draft_by_themselves(tmp_path):
    """Hunyuan 4's hand several streams on: fresh heads have other layers then, and its own are refused by what is
    wrong with them, not by their names."""
    target = tiny_target("hy_v4")
    assert AutoDraftHead.from_target(target, "mtp", native=False).config.layer_config["model_type"] == "llama"
    target.save_pretrained(tmp_path)
    expected = r"'hy_v4'\) cannot draft by themselves: .*reduction dim.* Train fresh heads"
    with pytest.raises(HeadLoadError, match=expected):
        load_heads(tmp_path, method="mtp")
    with pytest.raises(HeadLoadError, match=expected):
        AutoDraftHead.from_target(load_target(tmp_path), "mtp")


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3", "granitemoehybrid", "gpt_oss", *INDEXED])
def test_layers_of_classes_that_are_particular(family, tmp_path):
    """Positions that are turned by kind of layer, or not at all, attention that is not torch's, and indexers: still
    layers of the target's class."""
    target = tiny_target(family, **({"index_topk": 64} if family in INDEXED else {}))
    scrambled_heads(target, "mtp", native=False).save_pretrained(tmp_path)
    heads = load_heads(tmp_path)
    assert heads.config.layer_config["model_type"] == family
    expected, got = plain(target, prompt(), NEW), plain(target, prompt(), NEW, assistant_model=heads)
    assert torch.equal(expected, got) and heads.last_stats.rounds > 0


def test_two_layers_do_not_compile():
    target = shared_target("llama")
    heads = AutoDraftHead.from_target(target, "mtp", native=False, num_mtp_layers=2)
    heads.compiled = True
    with pytest.raises(UnsupportedGenerationError, match="num_mtp_layers=1"):
        plain(target, prompt(), NEW, assistant_model=heads)
    with pytest.raises(ValueError, match="`num_mtp_layers` must be 1 or 2, got 3"):
        AutoDraftHead.from_target(target, "mtp", native=False, num_mtp_layers=3)


def test_names_and_experts():
    assert our_name("model.layers.4.self_attn.q_proj.weight", 4) == "layers.0.block.self_attn.q_proj.weight"
    assert our_name("model.layers.5.shared_head.norm.weight", 4) == "layers.1.norm.weight"
    assert our_name("model.language_model.layers.3.enorm.weight", 4) is None
    assert our_name("model.mtp.fc.weight", 4) == "layers.0.fc.weight"
    assert our_name("model.layers.4.shared_head.head.weight", 4) is our_name("lm_head.weight", 4) is None
    with pytest.raises(UnknownFormatError, match=r"mtp\.layers\.1\.mlp"):
        our_name("mtp.layers.1.mlp.up_proj.weight", 4)
    parts = {f"mlp.experts.{e}.{kind}.weight": torch.full((3, 2) if kind != "down_proj" else (2, 3), float(e))
             for e in range(2) for kind in ("gate_proj", "up_proj", "down_proj")}  # fmt: skip
    joined = joined_experts(parts)
    assert joined["mlp.experts.gate_up_proj"].shape == (2, 6, 2) and joined["mlp.experts.down_proj"].shape == (2, 2, 3)
    del parts["mlp.experts.0.up_proj.weight"]
    with pytest.raises(CheckpointShapeError, match="experts are incomplete"):
        joined_experts(parts)
