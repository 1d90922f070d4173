"""Reads config and tensors of draft heads from files: recognises the layout and checks that everything fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..configuration import DraftHeadConfig
from ..errors import CheckpointShapeError, HeadConfigError, UnknownFormatError, refuse_wrong_keys
from ..heads.auto import HEADS, build_config
from .files import config_file, read_json, weight_files
from .headers import refuse_odd_target
from .layouts.detect import LAYOUTS, OURS, TITLES, detect_from_config, detect_from_keys
from .layouts.fields import RawConfig, Source, Tensors
from .tensors import Checkpoint, check_dtypes, read_checkpoint

MAX_SPECIALISTS = 1024
# Fields of our own layout that cannot be told from tensors. If one were missing, its default would silently change
# what the heads compute.
SILENT_FIELDS = (
    "rms_norm_eps", "hidden_act", "rope_parameters", "num_blocks", "tied_blocks", "hidden_state_offset",
    "norm_before_residual", "norm_output",
)  # fmt: skip
# Fields that count parts, each of which has tensors of its own.
COUNTS = ("num_specialists", "num_heads", "num_hidden_layers")


@dataclass(frozen=True)
class StoredHeads:
    """Draft heads as read from files.

    Attributes:
        layout: Layout of the files, a key of [`layouts.detect.TITLES`].
        config: Config of the heads, in this package's form.
        tensors: Weights under this package's names; on the device `meta` if only headers were read.
        files: Files that the weights were read from.
        notes: Assumptions that were made, and other remarks for the user.
    """

    layout: str
    config: DraftHeadConfig
    tensors: Tensors
    files: tuple[Path, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """Describes the heads and every assumption in one line."""
        config = self.config
        count = getattr(config, "num_specialists", None) or 1
        each = f", {count} specialists of {config.positions_per_specialist} draft position(s)" if count > 1 else ""
        sizes = f"V={config.vocab_size}, H={config.feature_size}"
        assumed = f"; assumed: {'; '.join(self.notes)}" if self.notes else ""
        return f"{config.method} heads in {TITLES[self.layout]} ({sizes}){each}{assumed}"


def read_heads(
    folder: Path,
    name: str,
    positions: int | None = None,
    *,
    anchor_slot: str | None = None,
    headers_only: bool = False,
) -> StoredHeads:
    """Reads and checks the draft heads of a folder.

    Args:
        folder: Folder with config and weights.
        name: Repository or folder name; it reveals some facts that no file states.
        positions: Draft positions per specialist, for PosS heads in their authors' layout.
        anchor_slot: `"idle"` or `"drafts"`: whether the root's slot drafts, for block drafters whose files do not say.
        headers_only: Read only headers, no weights.

    Raises:
        HeadLoadError: One of its subclasses, see `hf_specheads.errors`.
    """
    raw_config = read_json(config_file(folder))
    if detect_from_config(raw_config) == OURS:
        config = own_config(raw_config, positions)  # an unusable config is refused before any weights are read
        elsewhere = HEADS[config.model_type].weights_elsewhere(config)
        if elsewhere is not None:
            pruned = config.pruned_vocab_size is not None
            beside = read_checkpoint(weight_files(folder)).tensors if pruned else {}
            return identify(raw_config, Checkpoint(elsewhere | beside, (config_file(folder),)), name, positions)
    checkpoint = read_checkpoint(weight_files(folder), headers_only=headers_only)
    return identify(raw_config, checkpoint, name, positions, anchor_slot)


def identify(
    raw_config: RawConfig,
    checkpoint: Checkpoint,
    name: str,
    positions: int | None = None,
    anchor_slot: str | None = None,
) -> StoredHeads:
    """Recognises the layout, converts the heads, and checks that config and tensors fit; see [`read_heads`].

    Raises:
        HeadLoadError: One of its subclasses.
    """
    layout = detect_from_config(raw_config)
    if layout == OURS:
        config, tensors, notes = own_config(raw_config, positions), checkpoint.tensors, []
    else:
        layout = layout or detect_from_keys(checkpoint.shapes, raw_config)
        source = Source(raw_config, checkpoint.tensors, name, positions, anchor_slot)
        conversion = LAYOUTS[layout].convert(source)
        config, tensors, notes = conversion.config, conversion.tensors, conversion.assumptions
    if anchor_slot is not None and getattr(config, "anchor_slot", None) != anchor_slot:
        raise HeadConfigError(
            f"`anchor_slot` is only for block drafters whose files do not store it, got {anchor_slot!r} for these "
            f"{config.method} heads; leave it out."
        )
    check_against_config(tensors, config)
    check_dtypes(tensors, checkpoint.files[0], HEADS[config.model_type].integer_tensors)
    return StoredHeads(layout, config, tensors, checkpoint.files, (*checkpoint.notes, *notes))


def with_note(stored: StoredHeads, note: str) -> StoredHeads:
    """Returns the same heads with one more note."""
    return replace(stored, notes=(*stored.notes, note))


# ------------------------------------------------------------------ our own layout
def own_config(raw_config: RawConfig, positions: int | None) -> DraftHeadConfig:
    """Builds the config from a `config.json` in our own layout.

    Raises:
        UnknownFormatError: If this version does not know the family of the heads.
        HeadConfigError: If a field is impossible, or is missing where its default would describe another model.
    """
    model_type = raw_config["model_type"]
    if model_type not in HEADS:
        raise UnknownFormatError(
            f"config.json has model_type={model_type!r}, expected one of {sorted(HEADS)}; a newer version of this "
            "package may know it."
        )
    config_class = HEADS[model_type].config_class
    silent = [field for field in SILENT_FIELDS if hasattr(config_class, field) and field not in raw_config]
    if missing := silent + [field for field in config_class.required_fields if raw_config.get(field) is None]:
        raise HeadConfigError(f"config.json lacks {missing}; restore the field(s) from the original file.")
    if odd := [key for key in raw_config if callable(getattr(config_class, key, None)) or key.startswith("_")]:
        raise HeadConfigError(f"config.json has {odd[:3]}, which are not config fields; remove them.")
    refuse_odd_target(raw_config.get("target"))
    if raw_config.get("quantization_config") is not None:
        raise HeadConfigError(
            "config.json has a quantization_config: the heads were saved quantised, which is not supported. Save them "
            "unquantised, and pass `quantization_config` to `AutoModel.from_pretrained` instead."
        )
    specialists = raw_config.get("num_specialists", 1)
    if not isinstance(specialists, int) or not 1 <= specialists <= MAX_SPECIALISTS:
        raise HeadConfigError(f"config.json has num_specialists={specialists!r}, expected 1 to {MAX_SPECIALISTS}.")
    saved = raw_config.get("positions_per_specialist")
    if positions is not None and saved != positions:
        raise HeadConfigError(
            f"the heads say positions_per_specialist={saved}, the argument says {positions}; leave the argument out."
        )
    fields = {key: value for key, value in raw_config.items() if key not in ("model_type", "transformers_version")}
    try:
        return build_config(config_class, fields)
    except (ValueError, TypeError, AttributeError, KeyError, ArithmeticError, RecursionError) as error:
        raise HeadConfigError(f"config.json is not usable: {error}") from error


def check_against_config(tensors: Tensors, config: DraftHeadConfig) -> None:
    """Compares keys and shapes of the tensors with the config, before memory for a model of that size is allocated."""
    counts = {name: getattr(config, name, None) or 0 for name in COUNTS}
    if getattr(config, "fc_norm", False):  # every level has a norm of its own
        counts["num_levels"] = config.num_levels
    for name, count in counts.items():
        if count > len(tensors):
            raise HeadConfigError(f"config.json says {name}={count}, but there are only {len(tensors)} tensors.")
    head_class = HEADS[config.model_type]
    try:
        with torch.device("meta"):
            heads = head_class(config)
        tied = heads.all_tied_weights_keys  # a tied weight is saved only once, under its other name
        expected = {key: tuple(tensor.shape) for key, tensor in heads.state_dict().items() if key not in tied}
    except (RuntimeError, TypeError, ValueError, ArithmeticError, KeyError, AttributeError) as error:
        raise HeadConfigError(f"config.json describes heads that cannot be built: {error}") from error
    found = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    refuse_wrong_keys(missing=set(expected) - set(found), unknown=set(found) - set(expected))
    for key, shape in expected.items():
        if found[key] != shape:
            raise CheckpointShapeError(
                f"{key} has shape {list(found[key])}, expected {list(shape)} by config.json and the other tensors; "
                "one of them is damaged, download them again."
            )
