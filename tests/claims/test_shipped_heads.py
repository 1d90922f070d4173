"""All heads of `model_cards/`, without any settings: one text and batches, greedy and sampled.

Trees that are saved with heads may be unusual, and these heads are the first that new users try.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specheads import load_heads

CARDS = Path(__file__).parents[2] / "model_cards"
HEADS = sorted(path.parent.name for path in CARDS.glob("*/config.json") if path.parent.name != "target")
NEW = 12


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(CARDS / "target", dtype=torch.float32).eval()


def prompts(batch: int) -> dict[str, torch.Tensor]:
    """Makes texts that repeat themselves, so that there is something to copy, padded on the left by one more token per
    row."""
    ids = (torch.arange(20) % 7 + 300).repeat(batch, 1)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, :row] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", HEADS)
def test_heads_generate_as_they_are(target, name, batch):
    heads, inputs = load_heads(CARDS / name, dtype=torch.float32), prompts(batch)
    expected = target.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    options = {"max_new_tokens": NEW, "assistant_model": heads, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(target.generate(**inputs, do_sample=False, **options), expected)
    assert heads.last_stats.rounds > 0
    torch.manual_seed(0)
    sampled = target.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, **options)
    assert sampled.shape == expected.shape
