"""Finds the pace of a call: costs and gains of its pair under its settings, kept with the heads between calls."""

from __future__ import annotations

from operator import itemgetter

from transformers import GenerationConfig, PreTrainedModel

from ...contract import DraftingContract
from ..options import DraftingOptions
from .menu import menu_of
from .pace import Pace


def pace_of(
    heads: DraftingContract,
    target: PreTrainedModel,
    options: DraftingOptions,
    batch_size: int,
    config: GenerationConfig,
    active: int | None = None,
) -> Pace:
    """Costs and gains of a pair under the settings of a call; kept with the heads for the next such call.

    Args:
        heads: The draft head.
        target: Its target.
        options: Options of the call.
        batch_size: Sequences of the call.
        config: How tokens are chosen.
        active: Sequences that have not ended. Costs are kept per octave of their number; what is known of acceptance
            is shared by all of them.
    """
    seeded = batch_size == 1 and options.exact_seed  # tokens are then drawn as plain `generate` draws them
    menu, farthest = menu_of(heads, target, options, drawn=bool(config.do_sample) and not seeded)
    # The last sequence left of a batch still pays for the batch's masks, so it counts as two.
    octave = 0 if batch_size == 1 else max(((active or batch_size) - 1).bit_length(), 1)
    settings = (repr(menu), farthest, options.compiled, config.do_sample, config.temperature)
    known = heads.memory.setdefault(target, {})
    if (key := (Pace, octave, *settings)) in known:
        return known[key]
    alike = [(abs(other[1] - octave), pace) for other, pace in list(known.items())
             if other[0] is Pace and other[2:] == settings]  # fmt: skip
    _, nearest = min(alike, key=itemgetter(0), default=(0, None))
    return known.setdefault(key, Pace(menu, nearest, farthest > 0))
