"""A training that is killed at random moments, again and again, and resumed.

The training must end with the same weights, and the same loss at every step, as an undisturbed run.

    python -m support.killed_runs FOLDER --kills 20 --steps 240

Two processes of gloo share a sharded target (FSDP2) and read streams that are shorter than the training. SIGKILL hits
one or both of them while they load, train, evaluate or save. FOLDER is created.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import torch

PROCESSES = 2
PRELOADED = ["hf_specheads.trainer.building", "hf_specheads.trainer.trainer", "datasets", "accelerate"]


def one_process(index: int, port: int, log: str, words: list[str]) -> None:
    """Runs one process of a training, as a launcher starts it."""
    os.environ.update(RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=str(PROCESSES), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port), OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true")  # fmt: skip
    torch.set_num_threads(1)
    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from hf_specheads.trainer.__main__ import main

    sys.exit(main(words))


class Run:
    """The processes of a training in one folder."""

    def __init__(self, words: list[str], log: Path):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.log = Path(f"{log}-0.txt")
        arguments = [(index, port, f"{log}-{index}.txt", words) for index in range(PROCESSES)]
        self.processes = [context.Process(target=one_process, args=each) for each in arguments]
        for process in self.processes:
            process.start()

    def seconds_to_the_next_step(self) -> float:
        """Waits until one more step is logged or the first process has ended, and returns the seconds waited."""
        started, before = time.monotonic(), self._logged()
        while self._logged() <= before and self.processes[0].is_alive():
            time.sleep(0.05)
        return time.monotonic() - started

    def _logged(self) -> int:
        return self.log.read_text(encoding="utf-8").count("{'loss'") if self.log.exists() else 0

    def wait(self, seconds: float | None = None) -> bool:
        """Tells whether all processes end by themselves within this time. Raises an error if one has failed."""
        end = None if seconds is None else time.monotonic() + seconds
        for process in self.processes:
            process.join(None if end is None else max(end - time.monotonic(), 0))
        codes = [process.exitcode for process in self.processes]
        if any(code not in (None, 0) for code in codes):
            self.kill(self.processes)
            raise RuntimeError(f"a training ended with {codes}")
        return codes == [0] * PROCESSES

    def kill(self, victims: list) -> None:
        """Sends SIGKILL to some processes and, a moment later, to the others, as a launcher does."""
        for process in [*victims, None, *self.processes]:
            if process is None:
                time.sleep(0.1)
            elif process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.join()


def checkpoints(folder: Path) -> list[int]:
    """Returns the steps that have a complete checkpoint."""
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from hf_specheads import AutoDraftHead

    return AutoDraftHead.from_pretrained(folder).state_dict()


def losses_of(folder: Path) -> list[tuple[int, float]]:
    """Returns every step with its loss."""
    history = json.loads((folder / "training_facts.json").read_text())["log_history"]
    return [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]


def kill_and_go_on(folder: Path, words: list[str], kills: int, seed: int) -> dict:
    """Trains once undisturbed and once with kills, and returns what happened.

    Args:
        folder: Folder for both runs and their logs.
        words: Arguments of `python -m hf_specheads.trainer`, without `output_dir`.
        kills: Number of times the second run is killed.
        seed: Seed of the moments of the kills.
    """
    dice, output = random.Random(seed), folder / "killed"
    started = time.monotonic()
    run = Run([*words, f"output_dir={folder / 'whole'}"], folder / "whole-log")
    loading = run.seconds_to_the_next_step()
    run.wait()
    training = time.monotonic() - started - loading
    lives: list[dict] = []
    run = Run([*words, f"output_dir={output}"], folder / "killed-log")
    while len(lives) < kills:
        # A fifth of the lives end before the first step. The others together last about as long as the training.
        while_loading = dice.random() < 0.2
        if not while_loading:
            run.seconds_to_the_next_step()
        life = dice.uniform(0, loading if while_loading else 2 * training / kills)
        if run.wait(life):
            break
        victims = dice.choice([run.processes[:1], run.processes[1:], run.processes])
        run.kill(victims)
        found = checkpoints(output)
        lives.append({"loading": while_loading, "seconds": round(life, 2), "killed": len(victims),
                      "checkpoint": found[-1] if found else 0,
                      "while_saving": (output / "_partial-checkpoint").exists()})  # fmt: skip
        sys.stderr.write(f"{lives[-1]}\n")
        run = Run([*words, f"output_dir={output}"], folder / "killed-log")
    run.wait()
    ours, whole = weights_of(output), weights_of(folder / "whole")
    differing = [name for name, value in whole.items() if not torch.equal(value, ours[name])]
    return {
        "loading": round(loading, 1), "training": round(training, 1), "kills": len(lives), "lives": lives,
        "differing": differing, "losses_agree": losses_of(output) == losses_of(folder / "whole"),
    }  # fmt: skip


def make_folder(folder: Path, steps: int) -> list[str]:
    """Makes a tiny target and its streams, and returns the arguments of a training on them."""
    from .targets import VOCAB, training_target
    from .tokenizers import word_tokenizer

    names = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, VOCAB))]
    word_tokenizer(names, bos_token="<s>", eos_token="</s>").save_pretrained(folder / "target")
    training_target().save_pretrained(folder / "target")
    dice = random.Random(7)
    for name in ("one", "two"):
        lines = [json.dumps({"text": " ".join(dice.choices(names[4:], k=dice.randint(8, 24)))}) for _ in range(25)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    recipe = {
        "target": str(folder / "target"), "method": "poss", "heads": {"num_specialists": 2},
        "train_data": [{"path": str(folder / f"{name}.jsonl"), "streaming": True, "weight": weight}
                       for name, weight in (("one", 2), ("two", 1))],
        "eval_examples": 4,
        "training": {
            "max_steps": steps, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
            "lr_scheduler_type": "constant", "logging_steps": 1,
            "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2, "eval_strategy": "steps",
            "eval_steps": 10, "eval_acceptance_prompts": 2, "eval_max_new_tokens": 8, "max_length": 32,
            "feature_noise": 0.1, "use_cpu": True, "ddp_backend": "gloo", "shard_target": True, "disable_tqdm": True,
        },
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return ["--config", str(folder / "recipe.yaml")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    words = make_folder(options.folder, options.steps)
    sys.stdout.write(json.dumps(kill_and_go_on(options.folder, words, options.kills, options.seed), indent=2) + "\n")


if __name__ == "__main__":
    main()
