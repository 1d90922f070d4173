"""Features written to disk, and read by the trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.targets import deep_target, training_target

from hf_specheads import load_heads
from hf_specheads.trainer.__main__ import main as train
from hf_specheads.trainer.data.stored_features import FeatureCollator, StoredFeatures
from hf_specheads.trainer.features import main
from hf_specheads.trainer.unroll.target_features import FrozenTarget


@pytest.fixture
def wanted(workspace, tmp_path: Path) -> list[str]:
    return ["--target", str(tmp_path / "target"), "--data", str(tmp_path / "train.jsonl"), "--max-length", "32",
            "--rows-per-shard", "8", "--batch-size", "3", "--quiet", "--debug"]  # fmt: skip


def test_they_are_the_targets(wanted, target, tmp_path: Path, capsys) -> None:
    out = tmp_path / "features"
    assert main([*wanted, "--out", str(out), "--json"]) == 0
    said = capsys.readouterr()
    counts, stored = json.loads(said.out), StoredFeatures(out)
    assert counts["examples"] == len(stored) == 20
    assert counts["bytes"] == counts["tokens"] * 32 * 2 and f"{counts['tokens']} tokens, 32 numbers each" in said.err
    frozen = FrozenTarget(target)
    for index in (0, 7, 8, 19):
        example = stored[index]
        alone = frozen.features({"input_ids": example["input_ids"][None]})[0][0]
        torch.testing.assert_close(example["features"].float(), alone, rtol=1e-2, atol=1e-2)
    batch = FeatureCollator(0, 16)([stored[0], stored[1]])
    assert batch["features"].shape == batch["final_features"].shape == (*batch["input_ids"].shape, 32)


def test_the_trainer_reads_them_instead_of_running_the_target(wanted, workspace, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "features"
    main([*wanted, "--out", str(out), "--json"])
    options = [*workspace.options, "max_steps=3", "eval_acceptance_prompts=0"]
    workspace.run(*options, f"output_dir={tmp_path / 'own'}")
    ran = []
    kept = FrozenTarget.compute_features
    monkeypatch.setattr(FrozenTarget, "compute_features", lambda self, *a: ran.append(1) or kept(self, *a))
    workspace.run(*options, f"output_dir={tmp_path / 'stored'}", f"train_data={out}")
    assert not ran
    logs = [json.loads((tmp_path / name / "training_facts.json").read_text()) for name in ("own", "stored")]
    losses = [[entry["loss"] for entry in log["log_history"] if "loss" in entry] for log in logs]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2) and losses[0] != losses[1]
    moved = [load_heads(tmp_path / name).state_dict() for name in ("own", "stored")]
    assert all(torch.allclose(moved[0][name], moved[1][name], atol=1e-2) for name in moved[0])


def test_it_goes_on_where_it_stopped(wanted, tmp_path: Path, capsys) -> None:
    out = tmp_path / "features"
    main([*wanted, "--out", str(out), "--json"])
    whole = [StoredFeatures(out)[index]["features"] for index in range(20)]
    for path in out.glob("shard-00001.*"):
        path.unlink()
    untouched = (out / "shard-00000.safetensors").stat().st_mtime_ns
    main([*wanted, "--out", str(out), "--json"])
    assert (out / "shard-00000.safetensors").stat().st_mtime_ns == untouched
    assert all(torch.equal(a, StoredFeatures(out)[index]["features"]) for index, a in enumerate(whole))
    quiet = [word for word in wanted if word != "--debug"]
    assert main([*quiet, "--out", str(out), "--max-length", "16"]) == 2
    assert "max_length was 32 and is now 16" in capsys.readouterr().err


def test_much_is_asked_for_first(wanted, tmp_path: Path, capsys) -> None:
    quiet = [word for word in wanted if word != "--debug"]
    assert main([*quiet, "--out", str(tmp_path / "no"), "--limit-gib", "0"]) == 2
    said = capsys.readouterr().err
    assert "GiB" in said and "--yes" in said and not (tmp_path / "no").exists()
    assert main([*quiet, "--out", str(tmp_path / "yes"), "--limit-gib", "0", "--yes"]) == 0


def test_what_does_not_fit_is_refused(wanted, workspace, tokenizer, tmp_path: Path, capsys) -> None:
    out = tmp_path / "features"
    main([*wanted, "--out", str(out), "--json"])
    options = [*workspace.options, f"output_dir={tmp_path / 'run'}", f"train_data={out}"]
    assert train([*options, "packing=true"]) == 2
    assert "stored features" in capsys.readouterr().err
    training_target(seed=5).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    assert train([*options, f"target={tmp_path / 'other'}"]) == 2
    assert "fingerprints of the token embedding differ" in capsys.readouterr().err


def test_levels_of_eagle_3(wanted, workspace, tokenizer, tmp_path: Path, capsys) -> None:
    deep_target(own=True).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    out = tmp_path / "features"
    main([*wanted, "--out", str(out), "--method", "eagle3", "--json"])
    example = StoredFeatures(out)[0]
    assert example["features"].shape[-1] == 96 and example["final_features"].shape[-1] == 32
    options = [*workspace.options, f"train_data={out}", "eval_acceptance_prompts=0", "max_steps=1"]
    assert train([*options, "method=eagle3", "heads=null", f"output_dir={tmp_path / 'run'}"]) == 0
    capsys.readouterr()
    assert train([*options, f"output_dir={tmp_path / 'poss'}"]) == 2
    assert "these heads read [-1]" in capsys.readouterr().err
