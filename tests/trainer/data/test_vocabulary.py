"""Draft vocabularies from the training data."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from hf_specheads import load_heads
from hf_specheads.trainer import frequent_tokens

EXAMPLES = [
    {"input_ids": [9, 9, 9, 4, 4, 7], "loss_mask": [0, 0, 0, 1, 1, 1]},
    {"input_ids": [7, 7, 2, 4], "loss_mask": [1, 1, 1, 1]},
]


def test_supervised_tokens_are_counted() -> None:
    """4 and 7 three times, 2 once; 9 is never supervised, and lower ids win among the unseen."""
    assert frequent_tokens(EXAMPLES, 2, 10).tolist() == [4, 7]
    assert frequent_tokens(EXAMPLES, 3, 10).tolist() == [2, 4, 7]
    assert frequent_tokens(EXAMPLES, 5, 10).tolist() == [0, 1, 2, 4, 7]
    assert frequent_tokens(EXAMPLES, 10, 10).tolist() == list(range(10))


def test_any_dataset_will_do() -> None:
    expected = [2, 4, 7]
    assert frequent_tokens(Dataset.from_list(EXAMPLES), 3, 10).tolist() == expected
    labels = [{"input_ids": e["input_ids"], "labels": [i if m else -100 for i, m in zip(*e.values(), strict=True)]}
              for e in EXAMPLES]  # fmt: skip
    assert frequent_tokens(labels, 3, 10).tolist() == expected
    assert frequent_tokens([{"input_ids": torch.tensor([5, 5, 1])}], 1, 10).tolist() == [5]


@pytest.mark.parametrize("size", [0, 11])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"between 1 and 10, got {size}"):
        frequent_tokens(EXAMPLES, size, 10)


def test_tokens_of_another_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="token id 7, outside the target's 5 ids"):
        frequent_tokens(EXAMPLES, 3, 5)


def test_a_recipe_chooses_from_its_training_data(workspace, tmp_path) -> None:
    """`heads.draft_vocab_size` alone: the trainer counts, and larger than V means all of V."""
    common = ["method=eagle3", "heads={feature_layers: [0, 1, -1], draft_vocab_size: SIZE}", "num_passes=2",
              "feature_loss_weight=0", "token_loss_weight=1", "eval_examples=0"]  # fmt: skip
    for size, drafted in ((30, 30), (32000, 99)):
        changes = [change.replace("SIZE", str(size)) for change in common]
        workspace.run(*workspace.options, *changes, f"output_dir={tmp_path / str(size)}")
        heads = load_heads(tmp_path / str(size))
        assert heads.lm_head.weight.shape[0] == heads.config.draft_vocab_size == drafted
        assert heads.config.trained_positions == 2
    seen = set(load_heads(tmp_path / "30").draft_vocabulary.tolist())
    assert 2 in seen and not seen <= set(range(30))  # the end-of-sequence token ends every text
