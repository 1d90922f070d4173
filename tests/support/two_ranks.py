"""One of two processes that share a tensor-parallel target, with clocks that disagree.

    python -m torch.distributed.run --nproc_per_node 2 -m support.two_ranks FOLDER [each-for-itself]

FOLDER holds `target/` and `heads/`. Every rank writes `rank{n}.json`: the text, the choice that its own clock
suggested before every round, and the choice that was made. With `each-for-itself`, every rank follows its own clock.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hf_specheads import load_heads
from hf_specheads.generation import loop
from hf_specheads.generation.pace.pace import Pace
from support.clock import Clock


def main(folder: Path, each_for_itself: bool) -> None:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = torch.distributed.get_rank()
    target = AutoModelForCausalLM.from_pretrained(folder / "target", tp_plan="auto")
    heads = load_heads(folder / "heads")
    decided: list[int] = []
    choose = Pace.choose

    def remembered(self: Pace, *call: object) -> int:
        decided.append(choose(self, *call))
        return decided[-1]

    Pace.choose = remembered
    # Drafting is cheap by the clock of rank 0 and expensive by that of rank 1.
    loop.time = Clock(*[(1.0, 3.0, 0.1, 7.0, 2.0), (0.2, 5.0, 0.7, 0.1, 9.0, 0.3)][rank])
    if each_for_itself:
        loop.parallel_group = lambda target: None
    texts, plain_steps = [], 0
    for length in (9, 14, 6):
        ids = torch.arange(3, 3 + length)[None]
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False}
        texts.append(target.generate(ids, assistant_model=heads, **options).tolist())
        texts.append(target.generate(ids, **options).tolist())
        plain_steps += heads.last_stats.plain_steps
    split = target.model.layers[0].mlp.up_proj.weight
    told = {"texts": texts, "decided": decided, "plain_steps": plain_steps, "rows": split.shape[0],
            "local": getattr(split, "_local_tensor", split).shape[0]}  # fmt: skip
    (folder / f"rank{rank}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "each-for-itself" in sys.argv)
