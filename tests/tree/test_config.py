"""Configs refuse impossible values at construction and survive saving."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.errors import StrictDataclassError

from hf_specheads import DraftTreeConfig, EagleHeadConfig, PossHeadConfig

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "feature_size": 32, "embedding_size": 32, "intermediate_size": 37,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{"kind": "bush"}, {"kind": "static"}, {"depth": 0}, {"depth": 2.0}, {"top_k": 0}, {"total_tokens": 1},
     {"depth": True}, {"choices": ((0,),)}],
)  # fmt: skip
def test_impossible_trees_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        DraftTreeConfig(**options)


def test_tree_sizes() -> None:
    tree = DraftTreeConfig(depth=5, top_k=4, total_tokens=20)
    assert tree.num_nodes == 20
    chain = tree.replace(kind="chain")
    assert chain.num_nodes == 6
    with pytest.raises(ValueError, match="unknown draft tree option"):
        tree.replace(width=3)
    assert DraftTreeConfig(**tree.to_dict()) == tree


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 64}, "feature_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"hidden_act": "nonsense"}, "hidden_act"),
        ({"num_specialists": 2}, "PossHeadConfig"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": 99.0}, "vocab_size"),
        ({"tree_config": {"depth": 0}}, "depth"),
        ({"tree_config": {"width": 1}}, "width"),
    ],
)
def test_impossible_heads_are_refused(change: dict, words: str) -> None:
    with pytest.raises(StrictDataclassError, match=words):
        EagleHeadConfig(**SIZES | change)


@pytest.mark.parametrize("change", [{"num_specialists": 0}, {"positions_per_specialist": 0}, {"num_specialists": 1.5}])
def test_impossible_specialists_are_refused(change: dict) -> None:
    with pytest.raises(StrictDataclassError, match=next(iter(change))):
        PossHeadConfig(**SIZES | change)


def test_defaults_follow_from_sizes() -> None:
    config = EagleHeadConfig(**{key: value for key, value in SIZES.items() if key != "num_key_value_heads"})
    assert (config.head_dim, config.num_key_value_heads) == (8, 4)
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.tree_config is None  # left to the device


def test_saved_configs_are_complete_and_equal(tmp_path: Path) -> None:
    """Every size is written, even where it equals a default: a later default must not change old heads."""
    config = PossHeadConfig(**SIZES, num_specialists=2, positions_per_specialist=3, tree_config={"depth": 4})
    config.save_pretrained(tmp_path)
    again = PossHeadConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    written = config.to_diff_dict()
    for name in (*SIZES, "head_dim", "fc_bias", "num_specialists", "positions_per_specialist", "rope_parameters"):
        assert name in written
