"""Pushes draft heads from a trainer to the Hub, with their model card, facts and figures."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sized
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy
from transformers.utils import CONFIG_NAME

from hf_specheads.heads.base import DraftHead
from hf_specheads.publishing.card.facts import EVAL_RESULTS
from hf_specheads.publishing.places import without_places
from hf_specheads.publishing.push import complete_folder, name_target
from hf_specheads.target.adapter import ADAPTER_FOLDER

from .facts import training_facts, write_facts

POS_ACC = r"eval_pos_acc_(\d+)"
MEASURED_IN_TRAINING = "held-out data, at the end of training"


class HubCards(Trainer):
    """A `Trainer` whose pushes to the Hub, by `push_to_hub()` or under `push_to_hub=True`, carry our model card.

    Attributes:
        run_facts: Facts that the trainer itself does not know, for [`facts.training_facts`]: `recipe`, `metrics`,
            `hours`.
    """

    model: DraftHead
    num_passes: int
    run_facts: dict[str, Any] | None = None

    @property
    def _folder(self) -> Path:
        return Path(str(self.args.output_dir))  # typed as optional, but always set by `TrainingArguments`

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saves as Trainer does, but removes the pickled training arguments. Nothing reads them, and they would carry
        a `hub_token` to the Hub; `training_facts.json` records the run instead."""
        super()._save(output_dir, state_dict)
        ((Path(output_dir) if output_dir else self._folder) / TRAINING_ARGS_NAME).unlink(missing_ok=True)

    def create_model_card(  # type: ignore[override]  # takes the fields of our card, not all of Trainer's
        self,
        language: str | list[str] | None = None,
        license: str | None = None,  # noqa: A002 (the name in Trainer)
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        dataset: str | list[str] | None = None,
        **card: Any,
    ) -> None:
        """Writes facts, figures and the model card into `output_dir`. Text that users added to the card, in the folder
        or on the Hub, is kept.

        Args:
            language, license, tags, dataset: Metadata of the card.
            model_name: Title of the card if there is no Hub repository to take the name from.
            finetuned_from: Hub id of the target, for training with a local copy of it.
            **card: Other fields of [`hf_specheads.publishing.card.facts.CardFacts`], e.g. `limits`.
        """
        if not self.is_world_process_zero():
            return
        folder = self._folder
        repo_id = getattr(self, "hub_model_id", None)
        if repo_id or finetuned_from:
            name_target(folder / CONFIG_NAME, finetuned_from)
        write_facts(without_places(self.facts()) if repo_id else self.facts(), folder)
        given = {"language": language, "tags": tags, "datasets": dataset}
        known: dict[str, Any] = {
            name: [value] if isinstance(value, str) else value for name, value in given.items() if value
        }
        known |= {"license": license} if license else {}
        if not (folder / EVAL_RESULTS).exists() and (measured := self._measured()):
            known["evaluations"] = [measured]
        known["num_parameters"] = sum(p.numel() for p in self.model.parameters())
        api = HfApi(token=self.args.hub_token, library_name="hf-specheads") if repo_id else None
        name = repo_id or model_name or folder.resolve().name
        complete_folder(folder, name, api, revision=self.args.hub_revision, **{**known, **card})

    def facts(self) -> dict[str, Any]:
        """Returns the facts about the run; see [`facts.training_facts`]."""
        logged = [entry["train_runtime"] for entry in self.state.log_history if "train_runtime" in entry]
        hours = sum(logged) / 3600 if logged else None
        data = self.train_dataset
        return training_facts(
            self.model,
            self.args,
            self.state,
            num_passes=self.num_passes,
            train_examples=len(data) if isinstance(data, Sized) else None,
            **{"recipe": {}, "metrics": {}, "hours": hours, **(self.run_facts or {})},
        )

    def _measured(self) -> dict[str, Any] | None:
        """Returns the acceptance of the last evaluation in the format of `specheads eval --json`."""
        entries = [entry for entry in self.state.log_history if "eval_acceptance_length" in entry]
        if not entries:
            return None
        positions = {int(m[1]): value for key, value in entries[-1].items() if (m := re.fullmatch(POS_ACC, key))}
        return {
            "task": MEASURED_IN_TRAINING,
            "acceptance_length": entries[-1]["eval_acceptance_length"],
            "pos_acc": [positions[position] for position in sorted(positions)],
        }

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes as Trainer does, with the model card, and with the target's adapter if one is trained too."""
        checkpoint, folder = Path(checkpoint_folder), self._folder
        if self.is_world_process_zero() and self.args.hub_strategy != HubStrategy.END:
            shutil.copyfile(checkpoint / CONFIG_NAME, folder / CONFIG_NAME)
            if (checkpoint / ADAPTER_FOLDER).is_dir():
                shutil.copytree(checkpoint / ADAPTER_FOLDER, folder / ADAPTER_FOLDER, dirs_exist_ok=True)
            self.create_model_card()
        super()._push_from_checkpoint(checkpoint_folder)
