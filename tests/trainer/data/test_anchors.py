"""Block drafters are trained at sampled rows: drawn fairly, counted, the same losses as at all rows, and by recipe."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from hf_specheads import DFlashHead, EagleHead, load_heads
from hf_specheads.cli import main as specheads
from hf_specheads.trainer import DraftHeadTrainingArguments, Unroll
from hf_specheads.trainer.data.anchors import count_rounds, sample_anchors
from hf_specheads.trainer.methods import progress_of

from ..conftest import VOCAB, make_heads


def test_anchors_are_supervised_rows_none_twice() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 0, 1, 0, 0, 0]])
    seen = torch.zeros(2, 6)
    for seed in range(200):
        anchors = sample_anchors(mask, 3, torch.Generator().manual_seed(seed))
        assert anchors.shape == (2, 3) and anchors[1].tolist() == [2, -1, -1]
        assert len(set(anchors[0].tolist())) == 3 and mask[0, anchors[0]].all()
        seen[0, anchors[0]] += 1
    batch = {"loss_mask": torch.nn.functional.pad(mask, (1, 0))}
    for heads, most, rounds in ((DFlashHead, 3, 4), (DFlashHead, 9, 5), (EagleHead, 3, 5)):
        args = SimpleNamespace(num_anchors=most, world_size=1)
        assert int(count_rounds(heads, [batch, batch], args, "cpu")) == 2 * rounds
    assert seen[0, mask[0] == 1] == pytest.approx([150.0] * 4, rel=0.15)  # three of four rows each time
    assert (sample_anchors(torch.zeros(1, 4), 3, torch.Generator()) == -1).all()


@pytest.mark.parametrize("method", ["dflash", "jetspec"])
def test_losses_at_anchors_are_those_of_all_rows_there(target, method) -> None:
    """At all rows, each by itself: the sum over anchors one by one is the sum at all of them at once."""
    heads = make_heads(target, method, num_hidden_layers=2, block_size=4).bind(target)
    generator = torch.Generator().manual_seed(0)
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    ids = torch.randint(3, VOCAB, (2, 13), generator=generator)
    arguments = {
        "features": torch.randn(2, 12, 32 * len(heads.feature_layers), generator=generator),
        "next_token_ids": ids[:, 1:],
        "target_features": torch.randn(2, 12, 32, generator=generator),
        "loss_mask": torch.rand(2, 12, generator=generator) < 0.8,
        "attention_mask": None,
        "document_ids": documents,
        "embed_tokens": target.get_input_embeddings(),
        "lm_head": target.lm_head,
        "num_passes": 3,
        "losses": ("token", "next_token"),
        "num_items": 1.0,
    }

    def summed(**anchors: torch.Tensor) -> torch.Tensor:
        unroll = Unroll(heads, **arguments, **anchors)
        return torch.tensor([list(unroll.next_pass().values.values()) for _ in range(3)])

    every = summed()
    assert torch.allclose(every, summed(anchors=torch.arange(12).expand(2, -1)), rtol=1e-4)
    one_by_one = sum(summed(anchors=torch.tensor([[row], [-1]])) for row in range(12))
    one_by_one = one_by_one + sum(summed(anchors=torch.tensor([[-1], [row]])) for row in range(12))
    assert torch.allclose(every, one_by_one, rtol=1e-4)


BLOCK = ["heads.num_hidden_layers=2", "heads.block_size=4", "num_anchors=5"]
TOY = {
    "dflash": BLOCK,
    "jetspec": BLOCK,
    "dspark": [*BLOCK, "heads.markov_rank=8"],
    "dflash2": [*BLOCK, "heads.selector_rank=6", "heads.selector_top_k=8"],
    "domino": [*BLOCK, "heads.gru_hidden_size=12", "heads.correction_rank=6"],
    "peagle": ["heads.num_hidden_layers=2", "heads.draft_vocab_size=40", "heads.feature_layers=[0,1,-1]"],
    "mtp": ["heads.native=false"],
}
SLOW = ("jetspec", "dspark", "dflash2", "domino", "mtp")


@pytest.mark.parametrize(
    "method", [pytest.param(method, marks=pytest.mark.slow) if method in SLOW else method for method in TOY]
)
def test_recipes_train(workspace, tmp_path, method) -> None:
    """`specheads train` with the shipped recipe at toy size: it learns, evaluates, and saves heads that load."""
    folder = tmp_path / method
    toy = [*TOY[method], "max_steps=6", "logging_steps=1"]
    toy += ["per_device_train_batch_size=4", "gradient_accumulation_steps=1", "max_length=32", "eval_examples=4"]
    toy += ["learning_rate=0.01", "warmup_steps=0", "use_cpu=true", "disable_tqdm=true", "eval_max_new_tokens=8"]
    places = [f"target={tmp_path / 'target'}", f"train_data={tmp_path / 'train.jsonl'}", f"output_dir={folder}"]
    assert specheads(["train", "--config", method, *places, *toy]) == 0
    heads = load_heads(str(folder))
    assert heads.config.method == method
    assert heads.config.trained_positions == (heads.max_draft_positions or heads.config.trained_positions) > 1
    facts = json.loads((folder / "training_facts.json").read_text())
    losses = [entry["loss"] for entry in facts["log_history"] if "loss" in entry]
    assert losses[-1] < losses[0] and "eval_loss" in facts["metrics"]


def test_the_loss_of_uncorrected_drafts_gives_way() -> None:
    """Evenly, from its weight to nothing; the other losses count what it leaves."""
    args = SimpleNamespace(base_loss_weight=0.8, loss_weights={"base": 0.8, "next_token": 1.0, "token": 0.5})
    for progress, base in ((0.0, 0.8), (0.25, 0.6), (1.0, 0.0)):
        weights = DraftHeadTrainingArguments.loss_weights_at(args, progress)
        assert weights == pytest.approx({"base": base, "next_token": 1 - base, "token": 0.5 * (1 - base)})
    for steps, done in ((0, 1.0), (10, 0.4)):
        assert progress_of(SimpleNamespace(global_step=4, max_steps=steps)) == done
    with pytest.raises(ValueError, match=r"`base_loss_weight` is a share.*got 1\.5"):
        DraftHeadTrainingArguments(output_dir="x", base_loss_weight=1.5, use_cpu=True)
