"""Recognises the layout of published draft heads.

A layout is recognised by `config.json` and by the *names and shapes* of the tensors, never by guesswork. Names are
needed because, for example, the config of an EAGLE checkpoint looks exactly like that of a one-layer Llama.
"""

from __future__ import annotations

import re

from ...errors import UnknownFormatError
from .dflash import keys as dflash_keys
from .dflash import read as dflash
from .eagle import read as eagle
from .eagle3 import read as eagle3
from .fields import RawConfig
from .hydra import read as hydra
from .keys import EMBEDDING, FC, FIRST_LAYER, INPUT_NORM, LM_HEAD
from .medusa import read as medusa
from .peagle import read as peagle
from .speculators import keys as speculators_keys
from .speculators import read as speculators
from .titles import DFLASH, EAGLE, EAGLE3, HYDRA, MEDUSA, NATIVE, OURS, PEAGLE, POSS, SPECULATORS, TITLES

# Modules that read the layouts, tried in this order. Each has `recognises(shapes, config)` and `convert(...)`. A new
# layout adds its module here.
LAYOUTS = {
    SPECULATORS: speculators, DFLASH: dflash, HYDRA: hydra, MEDUSA: medusa, PEAGLE: peagle, EAGLE3: eagle3,
    POSS: eagle, EAGLE: eagle,
}  # fmt: skip
Shapes = dict[str, tuple[int, ...]]


def detect_from_config(config: RawConfig) -> str | None:
    """Recognises layouts that `config.json` names.

    Returns:
        [`OURS`] for this package's own layout, [`SPECULATORS`] for that library's, `None` if the keys must decide.

    Raises:
        UnknownFormatError: If `config.json` names a layout that is not supported.
    """
    model_type = str(config.get("model_type", ""))
    if model_type.startswith("specheads_"):
        return OURS
    kind = config.get(speculators_keys.KIND)
    if kind is not None and kind not in speculators_keys.KINDS:
        raise UnknownFormatError(_not_read(f"a `speculators` model of type {kind!r}"))
    if (arch := config.get("hydra_head_arch")) in ("cross-attn", "eagle-attn"):
        raise UnknownFormatError(_not_read(f"Hydra heads of the unpublished kind {arch!r}"))
    return None if kind is None else SPECULATORS


def detect_from_keys(shapes: Shapes, config: RawConfig) -> str:
    """Recognises the layout from names and shapes of tensors, and returns its key of [`LAYOUTS`].

    Raises:
        UnknownFormatError: For any other layout; the message says what the files look like.
    """
    if parallel := [key for key in shapes if key.startswith("parallel_draft_heads.")]:
        raise UnknownFormatError(_not_read(f"a parallel drafter (ModelOpt's, with {parallel[0]!r})"))
    for name, module in LAYOUTS.items():
        if module is not eagle and module.recognises(shapes, config):
            return name
    if config.get(dflash_keys.MASK_TOKEN) is not None or dflash_keys.NESTED in config:
        raise UnknownFormatError(_not_read("a parallel drafter (according to its config) with unknown tensors"))
    if problem := _keys_problem(shapes):
        raise UnknownFormatError(problem)
    return POSS if any(key.startswith("layers.1.") for key in shapes) else EAGLE


def _keys_problem(shapes: Shapes) -> str | None:
    """Says why keys that no other layout recognises are not EAGLE or PosS heads either; `None` if they are."""
    keys, normed = list(shapes), [key for key in shapes if re.fullmatch(rf"layers\.\d+\.{re.escape(INPUT_NORM)}", key)]
    if FC not in shapes and (normed or LM_HEAD in shapes or f"model.{EMBEDDING}" in shapes):
        return (
            "these are the weights of a whole language model, not draft heads; pass such a model as an ordinary "
            "`assistant_model`, or wrap it with `DraftLanguageModel.from_model(model)` to draft trees."
        )
    if normed:
        return _not_read("EAGLE heads with several consecutive layers, which nobody has published")
    if FC not in shapes or not any(key.startswith(FIRST_LAYER) for key in keys):
        return (
            f"these are not draft heads of a known layout: expected `fc.weight` and `layers.0.*`, found {keys[:5]} "
            f"({len(keys)} tensors)."
        )
    return None


def _not_read(what: str) -> str:
    return (
        f"the files hold {what}, a layout that is not supported; the supported layouts are this package's own, those "
        "of EAGLE-1/2, EAGLE-3, P-EAGLE, HASS, PosS, Medusa, Hydra, DFlash, JetSpec, DSpark and Domino, and those of "
        "`speculators` for EAGLE-1/3, P-EAGLE, HASS, DFlash-1/2, DSpark and MTP."
    )


__all__ = [
    "DFLASH", "EAGLE", "EAGLE3", "HYDRA", "LAYOUTS", "MEDUSA", "NATIVE", "OURS", "PEAGLE", "POSS", "SPECULATORS",
    "TITLES",
    "detect_from_config", "detect_from_keys",
]  # fmt: skip
