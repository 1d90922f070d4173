"""Ranges of the training arguments."""

import pytest

from hf_specheads.trainer import DraftHeadTrainingArguments
from hf_specheads.trainer.unroll.losses import LOSSES


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("num_passes", 0, "`num_passes` must be at least 1, got 0"),
        ("token_loss_weight", -0.1, "`token_loss_weight` must be at least 0, got -0.1"),
        ("top_k", 0, "`top_k` must be at least 1"),
        ("loss_chunk_rows", 0, "`loss_chunk_rows` must be at least 1, got 0"),
        ("feature_noise", -1.0, "`feature_noise` must be at least 0"),
        ("feature_noise_scaling", "gauss", r"`feature_noise_scaling` must be one of .*'eagle'.*, got 'gauss'"),
        ("embedding_noise", -1.0, "`embedding_noise` must be at least 0"),
        ("backward", "both", "`backward` must be one of"),
        ("pass_reduction", "max", "`pass_reduction` must be one of"),
        ("max_length", 2, "`max_length` must be at least 3"),
        ("eval_max_new_tokens", 0, "`eval_max_new_tokens` must be at least 1"),
        ("target_sharding", "zero2", r"`target_sharding` must be one of \['fsdp2', 'zero3'\], got 'zero2'"),
        ("max_grad_value", 0.0, "`max_grad_value` must be above 0, got 0.0"),
        ("peak_tflops", -1.0, "`peak_tflops` must be above 0, got -1.0"),
        ("optim", "adalomo", "optim='adalomo' updates the weights inside a backward"),
        ("remove_unused_columns", True, "`remove_unused_columns` must be False"),
    ],
)
def test_values_out_of_range_are_named(tmp_path, argument, value, message):
    with pytest.raises(ValueError, match=message):
        DraftHeadTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **{argument: value})


def test_something_must_be_trained(tmp_path):
    weights = {f"{loss}_loss_weight": 0 for loss in LOSSES}
    with pytest.raises(ValueError, match="nothing would be trained"):
        DraftHeadTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **weights)
