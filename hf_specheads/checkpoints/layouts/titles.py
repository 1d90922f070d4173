"""Identifiers of the layouts, and their titles in messages."""

from __future__ import annotations

OURS = "specheads"
DFLASH = "dflash"
EAGLE = "eagle"
EAGLE3 = "eagle3"
HYDRA = "hydra"
MEDUSA = "medusa"
PEAGLE = "peagle"
POSS = "poss"
NATIVE = "native"
SPECULATORS = "speculators"
TITLES = {
    OURS: "this package's own layout", NATIVE: "the checkpoint of the target they belong to",
    SPECULATORS: "the layout of speculators", HYDRA: "Hydra's layout",
    MEDUSA: "a layout of Medusa", EAGLE3: "EAGLE-3's layout", PEAGLE: "P-EAGLE's layout",
    POSS: "PosS's layout", EAGLE: "EAGLE's layout", DFLASH: "the layout of block drafters",
}  # fmt: skip
