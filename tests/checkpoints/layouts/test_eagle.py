"""The authors' layout of EAGLE, HASS and PosS: sizes from the keys, the rest from the config, all else refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from support.checkpoints import (
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    LLAMA_CONFIG,
    MIDDLE,
    VOCAB,
    eagle_tensors,
    write_checkpoint,
)
from support.targets import own_target

from hf_specheads import EagleHead, PossHead, WrongTargetError, load_heads
from hf_specheads.errors import CheckpointKeysError, CheckpointShapeError, HeadConfigError

GOLDENS = Path(__file__).resolve().parents[2] / "recordings" / "goldens"


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("fc_bias", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("embedding", [False, True])
def test_eagle(tmp_path: Path, pickled: bool, fc_bias: bool, qkv_bias: bool, embedding: bool) -> None:
    tensors = eagle_tensors(fc_bias=fc_bias, qkv_bias=qkv_bias, embedding=embedding)
    heads = load_heads(write_checkpoint(tmp_path, tensors, pickled=pickled))
    assert type(heads) is EagleHead and not heads.training
    config = heads.config
    assert (config.fc_bias, config.attention_bias, config.attention_out_bias) == (fc_bias, qkv_bias, False)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (HIDDEN, MIDDLE, VOCAB)
    assert (config.num_key_value_heads, config.head_dim, config.rms_norm_eps) == (KV_HEADS, HEAD_DIM, 1e-5)
    state = heads.state_dict()
    tensors.pop("embed_tokens.weight", None)
    assert state.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert torch.equal(state[key], tensor), key


def test_poss_with_the_argument(tmp_path: Path) -> None:
    heads = load_heads(write_checkpoint(tmp_path, eagle_tensors(4)), positions_per_specialist=3)
    assert type(heads) is PossHead
    assert (heads.config.num_specialists, heads.config.positions_per_specialist) == (4, 3)
    assert heads.config.trained_positions == 12


@pytest.mark.parametrize(
    ("name", "positions"),
    [("PosS3-Llama3-8B-Instruct", 3), ("PosS2-Llama2-13B-Chat", 2), ("poss-1-mine", 1), ("my_PosS10_heads", 10)],
)
def test_poss_positions_from_the_name(tmp_path: Path, name: str, positions: int) -> None:
    folder = write_checkpoint(tmp_path / name, eagle_tensors(2))
    assert load_heads(folder).config.positions_per_specialist == positions
    assert load_heads(folder, positions_per_specialist=5).config.positions_per_specialist == 5  # the argument wins


def test_poss_without_positions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadConfigError, match="positions_per_specialist=n"):
        load_heads(write_checkpoint(tmp_path / "draft", eagle_tensors(4)))


@pytest.mark.parametrize("positions", [0, -1, 2.5, "3"])
def test_impossible_positions_are_refused(tmp_path: Path, positions: object) -> None:
    with pytest.raises(HeadConfigError, match="positions_per_specialist"):
        load_heads(write_checkpoint(tmp_path, eagle_tensors(2)), positions_per_specialist=positions)


def test_hass_is_told_by_its_name_only(tmp_path: Path) -> None:
    assert load_heads(write_checkpoint(tmp_path / "HASS-x", eagle_tensors())).config.method == "hass"
    assert load_heads(write_checkpoint(tmp_path / "other", eagle_tensors())).config.method == "eagle"


@pytest.mark.parametrize("prefix", ["module.", "model."])
def test_common_prefixes(tmp_path: Path, prefix: str) -> None:
    tensors = {prefix + key: tensor for key, tensor in eagle_tensors().items()}
    assert torch.equal(load_heads(write_checkpoint(tmp_path, tensors)).fc.weight, tensors[f"{prefix}fc.weight"])


def test_dtype_is_that_of_the_file_unless_asked(tmp_path: Path) -> None:
    tensors = {key: tensor.half() for key, tensor in eagle_tensors().items()}
    folder = write_checkpoint(tmp_path, tensors)
    assert load_heads(folder).dtype == torch.float16
    assert load_heads(folder, dtype="auto").dtype == torch.float16
    assert load_heads(folder, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert load_heads(folder, dtype="float32", device_map="cpu").dtype == torch.float32


def test_rope_base_is_the_drafts_own_or_10000(tmp_path: Path) -> None:
    def base(config: dict, name: str) -> float:
        return load_heads(write_checkpoint(tmp_path / name, eagle_tensors(), config)).config.rope_parameters

    plain = {key: value for key, value in LLAMA_CONFIG.items() if key != "rope_theta"}
    assert base(LLAMA_CONFIG, "a") == {"rope_type": "default", "rope_theta": 20000.0}
    assert base(plain, "b") == {"rope_type": "default", "rope_theta": 10000.0}
    assert base({**plain, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "c")["rope_theta"] == 5e5
    scaled = base({**LLAMA_CONFIG, "rope_scaling": {"type": "linear", "factor": 2.0}}, "d")
    assert scaled == {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.0}
    with pytest.raises(HeadConfigError, match="llama3"):
        base({**LLAMA_CONFIG, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "e")


def test_the_rope_table_follows(tmp_path: Path) -> None:
    heads = load_heads(write_checkpoint(tmp_path, eagle_tensors()))
    expected = 20000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    torch.testing.assert_close(heads.rotary_emb.inv_freq, expected)


def test_one_line_says_what_was_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {key: value for key, value in LLAMA_CONFIG.items() if key not in ("rope_theta", "rms_norm_eps")}
    with caplog.at_level(logging.INFO, logger="hf_specheads"):
        load_heads(write_checkpoint(tmp_path / "PosS2-x", eagle_tensors(2), config))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "hf_specheads"]
    for words in ("poss heads", "2 specialists of 2", "rope_theta=10000.0", "rms_norm_eps=1e-06", "'PosS2-x'"):
        assert words in line


def test_a_copy_of_the_embedding_gives_away_another_target(tmp_path: Path) -> None:
    target, other = own_target("llama"), own_target("llama", seed=1)
    tensors = eagle_tensors() | {"embed_tokens.weight": target.get_input_embeddings().weight.detach().half().float()}
    heads = load_heads(write_checkpoint(tmp_path, tensors))
    heads.check_target(target)
    with pytest.raises(WrongTargetError, match="fingerprint"):
        heads.check_target(other)


@pytest.mark.parametrize("case", ["training_eagle", "training_hass", "training_poss3"])
def test_files_written_by_the_authors_code(case: str) -> None:
    extra = {"positions_per_specialist": 3} if "poss" in case else {}
    heads = load_heads(GOLDENS / case / "draft", **extra)
    recorded = torch.load(GOLDENS / case / "draft" / "pytorch_model.bin", weights_only=True)
    recorded.pop("embed_tokens.weight")
    assert heads.state_dict().keys() == recorded.keys()
    assert all(torch.equal(heads.state_dict()[key], tensor) for key, tensor in recorded.items())


# ------------------------------------------------------------------ damaged and contradicting files
@pytest.mark.parametrize(
    "missing", ["fc.weight", "layers.0.self_attn.k_proj.weight", "layers.1.mlp.up_proj.weight",
                "layers.1.post_attention_layernorm.weight"],
)  # fmt: skip
def test_missing_keys_are_errors(tmp_path: Path, missing: str) -> None:
    tensors = eagle_tensors(2)
    del tensors[missing]
    with pytest.raises(ValueError, match=r"fc\.weight" if missing == "fc.weight" else missing.replace(".", r"\.")):
        load_heads(write_checkpoint(tmp_path, tensors), positions_per_specialist=1)


@pytest.mark.parametrize(
    "unknown", ["lm_head.weight", "layers.0.self_attn.o_proj.bias", "layers.0.extra.weight", "norm.weight"]
)
def test_unknown_keys_are_errors(tmp_path: Path, unknown: str) -> None:
    tensors = eagle_tensors() | {unknown: torch.zeros(HIDDEN)}
    with pytest.raises(CheckpointKeysError, match="unknown .*" + unknown.replace(".", r"\.")):
        load_heads(write_checkpoint(tmp_path, tensors))


def test_layers_must_be_numbered_without_gaps(tmp_path: Path) -> None:
    tensors = {key.replace("layers.1.", "layers.3."): tensor for key, tensor in eagle_tensors(2).items()}
    with pytest.raises(CheckpointKeysError, match=r"\[0, 3\]"):
        load_heads(write_checkpoint(tmp_path, tensors), positions_per_specialist=1)


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("embed_tokens.weight", (VOCAB, HIDDEN + 1)),
        ("embed_tokens.weight", (VOCAB + 1, HIDDEN)),
        ("fc.weight", (HIDDEN, 3 * HIDDEN)),
        ("fc.bias", (HIDDEN + 1,)),
        ("layers.0.self_attn.q_proj.weight", (30, HIDDEN)),
        ("layers.0.self_attn.k_proj.weight", (12, HIDDEN)),
        ("layers.0.mlp.down_proj.weight", (HIDDEN, MIDDLE - 1)),
        ("layers.0.mlp.gate_proj.weight", (MIDDLE, HIDDEN, 1)),
    ],
)
def test_contradicting_shapes_are_errors(tmp_path: Path, key: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointShapeError):
        load_heads(write_checkpoint(tmp_path, eagle_tensors() | {key: torch.zeros(shape)}))


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_key_value_heads", "vocab_size"])
def test_config_and_weights_must_agree(tmp_path: Path, name: str) -> None:
    config = {**LLAMA_CONFIG, name: LLAMA_CONFIG[name] * 2}
    with pytest.raises(CheckpointShapeError, match=name):
        load_heads(write_checkpoint(tmp_path, eagle_tensors(), config))


def test_fields_only_the_config_tells_are_required(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA_CONFIG.items() if key != "num_attention_heads"}
    with pytest.raises(HeadConfigError, match="num_attention_heads"):
        load_heads(write_checkpoint(tmp_path / "a", eagle_tensors(), config))
    config = {key: value for key, value in LLAMA_CONFIG.items() if key != "vocab_size"}
    with pytest.raises(HeadConfigError, match="vocab_size"):
        load_heads(write_checkpoint(tmp_path / "b", eagle_tensors(embedding=False), config))


@pytest.mark.parametrize(
    "change",
    [{"num_attention_heads": 0}, {"num_attention_heads": "4"}, {"num_attention_heads": 2.5}, {"rms_norm_eps": "small"},
     {"rms_norm_eps": -1.0}, {"rope_theta": float("nan")}, {"rope_scaling": "linear"}, {"hidden_act": 3},
     {"hidden_act": "nonsense"},
     {"max_position_embeddings": 10**12}],
)  # fmt: skip
def test_impossible_config_values_are_errors(tmp_path: Path, change: dict) -> None:
    with pytest.raises(HeadConfigError):
        load_heads(write_checkpoint(tmp_path, eagle_tensors(), LLAMA_CONFIG | change))
