"""Interrupted runs: resuming is bit-equal, and a kill while saving costs one checkpoint at most."""

import copy
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers.trainer_utils import get_last_checkpoint

from hf_specheads import AutoDraftHead
from hf_specheads.trainer.checkpoints import PARTIAL

from .conftest import make_heads


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("backward", ["per_pass", pytest.param("summed", marks=pytest.mark.slow)])
def test_resumed_run_is_bit_equal(make_trainer, target, tmp_path, backward):
    """Shuffling, noise and dropout draw the same; the resumed run starts from other weights and another seed state."""
    heads = make_heads(target, attention_dropout=0.1)
    options = {"max_steps": 7, "save_strategy": "steps", "save_steps": 3, "feature_noise": 0.1, "backward": backward,
               "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}  # fmt: skip
    whole = make_trainer(model=copy.deepcopy(heads), folder="whole", **options)
    whole.train()
    torch.manual_seed(1234)
    resumed = make_trainer(model=make_heads(target, seed=77, attention_dropout=0.1), folder="resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(resumed)[name]), name
    tail = [entry["loss"] for entry in whole.state.log_history if entry.get("step", 0) > 3 and "loss" in entry]
    assert tail and tail == [entry["loss"] for entry in resumed.state.log_history if "loss" in entry][-len(tail) :]


def test_a_resumed_stream_goes_on_where_it_was(make_trainer, target, tmp_path):
    """Six steps of four from seven examples: the stream has begun anew when the run is resumed."""
    from datasets import Dataset

    from .conftest import make_examples

    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "feature_noise": 0.1}
    runs = []
    for folder, seed in (("whole", 1), ("resumed", 77)):
        stream = Dataset.from_list(make_examples(7)).to_iterable_dataset()
        runs.append(make_trainer(model=make_heads(target, seed=seed), folder=folder, data=stream, **options))
    whole, resumed = runs
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(resumed)[name]), name


# By default streams are resumed in mid run, above.
@pytest.mark.parametrize("streamed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_finished_run_is_not_trained_further(make_trainer, target, tmp_path, streamed):
    """Killed between its last checkpoint and its end; three steps are not a whole number of epochs."""
    from datasets import Dataset

    from .conftest import make_examples

    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
    runs = []
    for seed in (1, 77):
        data = Dataset.from_list(make_examples(7))
        data = data.to_iterable_dataset() if streamed else data
        runs.append(make_trainer(model=make_heads(target, seed=seed), data=data, **options))
    runs[0].train()
    assert runs[1].train(resume_from_checkpoint=True).global_step == 3
    for name, value in weights(runs[0]).items():
        assert torch.equal(value, weights(runs[1])[name]), name
    assert [entry["step"] for entry in runs[1].state.log_history if "loss" in entry] == [1, 2, 3]


def test_a_stream_without_examples_is_refused(make_trainer):
    from datasets import Dataset

    empty = Dataset.from_dict({"input_ids": [[5, 6]], "loss_mask": [[0, 0]]}).to_iterable_dataset()
    with pytest.raises(ValueError, match="the training stream has no example to train on"):
        make_trainer(data=empty.filter(lambda example: False))


KILLED = """
    import os, signal, sys
    from transformers import Trainer
    from hf_specheads.trainer.__main__ import main

    name, calls = sys.argv[1], 0
    original = getattr(Trainer, name)

    def killed_the_second_time(self, folder, *args, **kwargs):
        global calls
        calls += 1
        if calls == 2:
            if name == "_save":  # half of the weights are there
                os.makedirs(folder)
                open(os.path.join(folder, "config.json"), "w").write("{")
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, folder, *args, **kwargs)

    setattr(Trainer, name, killed_the_second_time)
    main(sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["_save", "_save_rng_state"])
def test_kill_while_saving_leaves_the_previous_checkpoint(workspace, tmp_path, moment):
    options = [*workspace.options, "save_strategy=steps", "save_steps=2", "max_steps=5", "feature_noise=0.1"]
    killed = tmp_path / "killed"
    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(KILLED))
    threads = str(torch.get_num_threads())  # the same bits as the runs of this process
    result = subprocess.run(
        [sys.executable, str(script), moment, *options, f"output_dir={killed}"],
        env={**os.environ, "OMP_NUM_THREADS": threads}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert (killed / PARTIAL / "checkpoint-4").exists()
    assert Path(get_last_checkpoint(str(killed))).name == "checkpoint-2"
    AutoDraftHead.from_pretrained(killed / "checkpoint-2")

    workspace.run(*options, f"output_dir={killed}")  # goes on from checkpoint-2 by itself
    workspace.run(*options, f"output_dir={tmp_path / 'whole'}")
    resumed, whole = (AutoDraftHead.from_pretrained(folder) for folder in (killed, tmp_path / "whole"))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert sorted(p.name for p in killed.iterdir() if p.is_dir()) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    history = json.loads((killed / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4]


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(tmp_path):
    """Two processes, a sharded target and streams; `python -m support.killed_runs FOLDER --kills 20` kills more."""
    result = subprocess.run(
        [sys.executable, "-m", "support.killed_runs", str(tmp_path / "runs"), "--kills", "3", "--steps", "120"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=Path(__file__).parents[1],
        capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    told = json.loads(result.stdout)
    assert told["kills"] >= 1 and told["differing"] == [] and told["losses_agree"]


def test_best_checkpoint_keeps_its_final_name(make_trainer, tmp_path):
    from datasets import Dataset

    from .conftest import make_examples

    trainer = make_trainer(
        eval_data=Dataset.from_list(make_examples(4, seed=5)), max_steps=4, eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=2, save_total_limit=1, load_best_model_at_end=True,
    )  # fmt: skip
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == tmp_path / "run" and best.is_dir()
    state = json.loads((best / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(best)
