"""Atomic checkpoints, which are written to a temporary folder and then renamed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput, get_last_checkpoint, rotate_checkpoints

from .guards import refuse_nonfinite_weights
from .identity import refuse_other_run, write_identity
from .upkeep import StepUpkeep

PARTIAL = "_partial-checkpoint"  # pushes to the Hub leave out names that begin with an underscore


class AtomicCheckpoints(StepUpkeep):
    """A `Trainer` whose checkpoints are complete even if the process is killed while saving.

    Trainer writes into `<output_dir>/_partial-checkpoint/`, which resuming ignores. The finished folder is then
    renamed to `checkpoint-<step>`, so `train(resume_from_checkpoint=True)` finds complete folders only. Each
    checkpoint records the recipe it belongs to, and runs with another recipe refuse to resume from it.
    """

    _writing_partial = False

    def identity(self) -> dict[str, Any]:
        """Returns what identifies this run, see [`identity.run_identity`]."""
        raise NotImplementedError

    def refuse_checkpoint(self, checkpoint: str | os.PathLike) -> None:
        """Refuses a checkpoint of another recipe.

        Raises:
            OtherRunError: naming the values that differ, old and new.
        """
        refuse_other_run(checkpoint, self.identity())

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains as Trainer does, but takes no step if the checkpoint has already taken all steps of the run; Trainer
        would take one more."""
        checkpoint = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(str(self.args.output_dir))
        if checkpoint and (finished := _finished(Path(checkpoint) / TRAINER_STATE_NAME, self.args.max_steps)):
            self._load_from_checkpoint(str(checkpoint))
            self.state = finished
            if self.args.load_best_model_at_end and finished.best_model_checkpoint is not None:
                self._load_best_model()
            return TrainOutput(finished.global_step, 0.0, {})
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.refuse_checkpoint(resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, PARTIAL) if self._writing_partial else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.set_optimizer("eval")
        refuse_nonfinite_weights(model)
        run = Path(self._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(run / PARTIAL, ignore_errors=True)
        self._wait()
        self._writing_partial = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._writing_partial = False
        self._wait()
        if self.args.should_save:
            write_identity(run / PARTIAL / name, self.identity())
            self._publish(run / PARTIAL / name, run / name)
            rotate_checkpoints(
                output_dir=str(run),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self._wait()
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(run / name))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes as Trainer does, but only after the checkpoint has its final name."""
        if not self._writing_partial:
            super()._push_from_checkpoint(checkpoint_folder)

    def _publish(self, partial: Path, final: Path) -> None:
        if self.state.best_model_checkpoint == str(partial):
            self.state.best_model_checkpoint = str(final)
            self.state.save_to_json(str(partial / TRAINER_STATE_NAME))
        for path in [*partial.rglob("*"), partial]:
            _flush(path)
        if final.exists():  # an earlier checkpoint of the same step
            shutil.rmtree(final)
        os.replace(partial, final)
        shutil.rmtree(partial.parent, ignore_errors=True)
        _flush(final.parent)

    def _wait(self) -> None:
        if self.args.world_size > 1:
            dist.barrier()


def _finished(path: Path, max_steps: int) -> TrainerState | None:
    """Returns the saved state of a run if all its steps have been taken, else `None`."""
    if max_steps <= 0 or not path.is_file():
        return None
    state = TrainerState.load_from_json(str(path))
    return state if state.global_step >= max_steps else None


def _flush(path: Path) -> None:
    """Flushes a file or a folder to disk, if the operating system supports it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # folders cannot be opened on Windows
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
