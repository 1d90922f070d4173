"""Draft heads published in other layouts: telling the layouts apart, and reading them.

A layout is recognised by `config.json` and by the *names and shapes* of the tensors, never by guesswork: an EAGLE
checkpoint's config looks exactly like that of a one-layer Llama, only its keys tell.
"""

from __future__ import annotations

import re
from typing import Any

from ...errors import UnknownFormatError
from .eagle import read as eagle
from .eagle3 import read as eagle3
from .hydra import read as hydra
from .medusa import read as medusa
from .speculators import read as speculators

OURS = "specheads"
EAGLE = "eagle"
EAGLE3 = "eagle3"
HYDRA = "hydra"
MEDUSA = "medusa"
POSS = "poss"
SPECULATORS = "speculators"
# The modules that read the authors' layouts: each has `recognises(shapes, config)` and `convert(...)`; asked in this
# order. A new layout adds its module here.
LAYOUTS = {SPECULATORS: speculators, HYDRA: hydra, MEDUSA: medusa, EAGLE3: eagle3, POSS: eagle, EAGLE: eagle}
TITLES = {
    OURS: "this package's own layout", SPECULATORS: "the layout of speculators", HYDRA: "Hydra's layout",
    MEDUSA: "a layout of Medusa", EAGLE3: "EAGLE-3's layout", POSS: "PosS's layout", EAGLE: "EAGLE's layout",
}  # fmt: skip

Shapes = dict[str, tuple[int, ...]]


def detect_from_config(config: dict[str, Any]) -> str | None:
    """`OURS` for this package's own layout, [`SPECULATORS`] for that library's, `None` if the keys must decide.

    Raises:
        UnknownFormatError: for layouts that name themselves in `config.json` and are not read.
    """
    model_type = str(config.get("model_type", ""))
    if model_type.startswith("specheads_"):
        return OURS
    kind = config.get(speculators.KIND)
    if kind is not None and kind not in (speculators.EAGLE, speculators.EAGLE3):
        raise UnknownFormatError(_not_read(f"a `speculators` model of type {kind!r}"))
    if config.get("mask_token_id") is not None or "dflash_config" in config:
        raise UnknownFormatError(_not_read("a parallel drafter (P-EAGLE or DFlash)"))
    if (arch := config.get("hydra_head_arch")) in ("cross-attn", "eagle-attn"):
        raise UnknownFormatError(_not_read(f"Hydra heads of the unpublished kind {arch!r}"))
    return None if kind is None else SPECULATORS


def detect_from_keys(shapes: Shapes, config: dict[str, Any]) -> str:
    """Name of the layout, a key of [`LAYOUTS`].

    Raises:
        UnknownFormatError: for everything else, naming what it looks like.
    """
    if parallel := [key for key in shapes if key == "mask_hidden" or key.startswith("parallel_draft_heads.")]:
        raise UnknownFormatError(_not_read(f"a parallel drafter (P-EAGLE or ModelOpt's, with {parallel[0]!r})"))
    for name, module in LAYOUTS.items():
        if module is not eagle and module.recognises(shapes, config):
            return name
    if refused := _refused_by_keys(shapes):
        raise UnknownFormatError(refused)
    return POSS if any(key.startswith("layers.1.") for key in shapes) else EAGLE


def _refused_by_keys(shapes: Shapes) -> str | None:
    keys = list(shapes)
    fc = shapes.get("fc.weight")
    normed = [key for key in keys if re.match(r"layers\.\d+\.input_layernorm\.weight$", key)]
    if fc is None and (normed or "lm_head.weight" in shapes or "model.embed_tokens.weight" in shapes):
        return (
            "these are the weights of a whole language model, not draft heads; pass such a model as an ordinary "
            "`assistant_model`, or wrap it, `DraftLanguageModel.from_model(model)`, to draft trees with it."
        )
    if normed:
        return _not_read("EAGLE heads with several consecutive layers, which nobody has published")
    if fc is None or not any(key.startswith("layers.0.") for key in keys):
        return (
            f"these are no draft heads of a known layout: expected `fc.weight` and `layers.0.*`, found {keys[:5]} "
            f"({len(keys)} tensors)."
        )
    return None


def _not_read(what: str) -> str:
    return (
        f"these are {what}, a layout that is not read; readable are this package's own layout, EAGLE-1/2, EAGLE-3, "
        "HASS, PosS, Medusa and Hydra, and EAGLE-1/3 and HASS as `speculators` saves them."
    )


__all__ = [
    "EAGLE", "EAGLE3", "HYDRA", "LAYOUTS", "MEDUSA", "OURS", "POSS", "SPECULATORS", "TITLES", "detect_from_config",
    "detect_from_keys",
]  # fmt: skip
