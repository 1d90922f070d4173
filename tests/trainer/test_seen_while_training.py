"""What a run shows: agreement with the target, tokens per second, and how the command prints it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from hf_specheads.trainer.__main__ import main
from hf_specheads.trainer.devices.utilisation import count_operations, known_peak, peak_flops
from hf_specheads.trainer.evaluation import AgreementMeter, LossMeter, Throughput
from hf_specheads.trainer.unroll.losses import DraftedRows, TargetDistribution, agreement

from .conftest import make_examples


def test_agreement_by_hand() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]]).log()
    drafted = torch.tensor([[0.2, 0.3, 0.5], [0.2, 0.7, 0.1]]).log()
    counts = agreement(DraftedRows(drafted, TargetDistribution.from_logits(target, 2)))
    assert counts.tolist() == pytest.approx([1.0, (0.2 + 0.3 + 0.2) + (0.1 + 0.7 + 0.1), 2.0])


def test_expected_length_of_a_chain() -> None:
    meter = AgreementMeter(2, "cpu")
    assert meter.drain() == {}
    meter.sums += torch.tensor([[3.0, 2.0, 4.0], [1.0, 1.0, 4.0]])
    assert meter.drain() == {"accuracy_1": 0.75, "accuracy_2": 0.25, "acceptance_1": 0.5, "acceptance_2": 0.25,
                             "expected_acceptance_length": 1 + 0.5 + 0.5 * 0.25}  # fmt: skip
    assert not meter.sums.any()


def test_the_log_and_the_evaluation_have_it(make_trainer, target) -> None:
    held_out = Dataset.from_list(make_examples(4, seed=5))
    trainer = make_trainer(max_steps=4, logging_steps=2, eval_data=held_out, eval_strategy="steps", eval_steps=4)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2
    for entry in logs:
        assert all(0 <= entry[f"{name}_{i}"] <= 1 for name in ("accuracy", "acceptance") for i in (1, 2, 3, 4))
        assert 1 <= entry["expected_acceptance_length"] <= 5 and entry["tokens_per_second"] > 0
    evaluated = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    # Against losses that are computed on their own: a is 1 - the total variation.
    other = make_trainer(model=trainer.model, total_variation_loss_weight=1.0, eval_data=held_out)
    assert evaluated["eval_acceptance_1"] == pytest.approx(
        1 - other.evaluate()["eval_total_variation_loss_1"], abs=1e-5
    )


def test_tokens_per_second(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    seen = Throughput()
    clock[0] = 90.0  # loading
    with seen.paused():  # evaluated before the first step
        clock[0] = 100.0
    for _ in range(2):
        seen.add({"input_ids": torch.zeros(2, 4), "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])})
        clock[0] += 5.0
    with seen.paused():
        clock[0] += 50.0
    assert seen.drain()["tokens_per_second"] == 1.0


def test_losses_of_other_processes_count_where_this_one_had_no_batch(monkeypatch) -> None:
    """Evaluation sets may be smaller than the processes are many; the best checkpoint is chosen by each of them."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda sums: sums.add_(torch.tensor([3.0, 0.0])))
    meter = LossMeter(1, "cpu", ["token", "feature"])
    assert meter.drain() == {"token_loss_1": 3.0}


def test_use_of_the_device_by_hand(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    batches = [{"input_ids": torch.zeros(rows, 4)} for rows in (2, 5, 3)]

    def product() -> torch.Tensor:
        clock[0] += 2.0
        return torch.ones(10, 8) @ torch.ones(8, 5)  # 2 * 10 * 8 * 5 operations, 40 for each of the second's places

    seen, unknown = Throughput(1000.0), Throughput()
    assert all(seen.of(batch, product).shape == (10, 5) for batch in batches)
    assert all(unknown.of(batch, product).shape == (10, 5) for batch in batches)
    assert seen.drain()["mfu"] == pytest.approx(40 * 4 * (2 + 5 + 3) / (12.0 * 1000))
    assert "mfu" not in unknown.drain()


def test_operations_of_forward_and_backward() -> None:
    layer, rows = torch.nn.Linear(6, 7), torch.ones(5, 6, requires_grad=True)
    output, operations = count_operations(lambda: layer(rows).sum().backward())
    assert output is None and operations == 3 * 2 * 5 * 6 * 7  # the output, and gradients of rows and weights


def test_use_of_the_device_is_logged_where_its_peak_is_known(make_trainer, target) -> None:
    trainer = make_trainer(max_steps=3, peak_tflops=0.1)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert ["mfu" in entry for entry in logs] == [False, True, True] and all(e["mfu"] > 0 for e in logs[1:])
    # Each row goes through the target once, and through heads three times in each direction and pass at least once.
    layers = sum(p.numel() for p in target.get_decoder().layers.parameters() if p.dim() == 2)
    assert trainer._throughput._operations > 2 * layers
    silent = make_trainer(folder="silent", max_steps=2)
    silent.train()
    assert not any("mfu" in entry for entry in silent.state.log_history)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA A10G", None),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("AMD Instinct MI300X", 1307.0),
    ],
)
def test_peaks(name: str, tflops: float | None) -> None:
    assert known_peak(name) == tflops


def test_peaks_are_of_the_argument_before_the_table(monkeypatch) -> None:
    args = SimpleNamespace(peak_tflops=None, device=torch.device("cuda", 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA L4")
    assert peak_flops(args) == 121e12
    assert peak_flops(SimpleNamespace(peak_tflops=2.0, device=args.device)) == 2e12
    assert peak_flops(SimpleNamespace(peak_tflops=None, device=torch.device("cpu"))) is None


def test_json_and_quiet(workspace, tmp_path: Path, capsys) -> None:
    options = [*workspace.options, "max_steps=1", f"output_dir={tmp_path / 'run'}"]
    assert main([*options, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["steps"] == 1 and facts["metrics"]["eval_acceptance_length"] >= 1
    assert main([*options, "--quiet", f"output_dir={tmp_path / 'other'}"]) == 0
    said = capsys.readouterr()
    assert "'loss'" not in said.out and "%|" not in said.err and "trained 1 steps" in said.out
