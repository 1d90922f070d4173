"""Checkpoints that are complete or absent: written beside, then renamed."""

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

PARTIAL = "_partial-checkpoint"  # pushes leave out what begins with an underscore


class AtomicCheckpoints(StepUpkeep):
    """A `Trainer` that, killed while saving, leaves the previous checkpoint the newest.

    Trainer writes into `<output_dir>/_partial-checkpoint/`, a name that resuming does not look at; the finished folder
    is then renamed to `checkpoint-<step>`. `train(resume_from_checkpoint=True)` therefore finds complete folders only.
    Each says which recipe it belongs to, and a run with another one does not go on from it.
    """

    _writing_partial = False

    def identity(self) -> dict[str, Any]:
        """Which run this is, see [`identity.run_identity`]."""
        raise NotImplementedError

    def refuse_checkpoint(self, checkpoint: str | os.PathLike) -> None:
        """Refuses a checkpoint of another recipe.

        Raises:
            OtherRunError: naming both sides.
        """
        refuse_other_run(checkpoint, self.identity())

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As in Trainer, which goes one step too far when all steps of a run have been taken already."""
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
        """Pushes once the checkpoint has its final name."""
        if not self._writing_partial:
            super()._push_from_checkpoint(checkpoint_folder)

    def _publish(self, partial: Path, final: Path) -> None:
        if self.state.best_model_checkpoint == str(partial):
            self.state.best_model_checkpoint = str(final)
            self.state.save_to_json(str(partial / TRAINER_STATE_NAME))
        for path in [*partial.rglob("*"), partial]:
            _flush(path)
        if final.exists():  # the same step saved before
            shutil.rmtree(final)
        os.replace(partial, final)
        shutil.rmtree(partial.parent, ignore_errors=True)
        _flush(final.parent)

    def _wait(self) -> None:
        if self.args.world_size > 1:
            dist.barrier()


def _finished(path: Path, max_steps: int) -> TrainerState | None:
    """The state of a run if all its steps have been taken."""
    if max_steps <= 0 or not path.is_file():
        return None
    state = TrainerState.load_from_json(str(path))
    return state if state.global_step >= max_steps else None


def _flush(path: Path) -> None:
    """Writes a file or folder entry through to the disk, where the system offers that."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # folders cannot be opened on Windows
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
