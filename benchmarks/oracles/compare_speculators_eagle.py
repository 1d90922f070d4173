"""Converts our EAGLE exports with the last `speculators` that supports EAGLE-1, and compares tensors and draft logits.

    pip install --no-deps --target SIDE speculators==0.6.0.2 transformers==4.56.2 huggingface_hub==0.35.3 \\
        tokenizers==0.22.1 datasets==4.1.1 hs-connectors loguru pydantic-settings python-dotenv typing-inspection \\
        openai distro jiter sniffio hf-xet requests charset-normalizer urllib3 idna certifi
    python -m benchmarks.oracles.compare_speculators_eagle --side SIDE

The shipped EAGLE and HASS heads, in float32, draft one teacher-forced pass over a text of the shipped target. Heads
without a bias of `fc` are made from them. The other library runs in a process of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specheads import DraftHead, EagleHead, export_heads, load_heads

from ..results import ROOT, SHIPPED_TARGET
from .compare_speculators import rows_of, text_of
from .render import ask, parser_of, write


def without_bias(heads: EagleHead) -> EagleHead:
    """Returns the same heads as if they had been made with fc_bias=False."""
    fields = {**heads.config.to_dict(), "fc_bias": False}
    fields.pop("model_type")
    other = EagleHead(type(heads.config)(**fields)).eval()
    other.load_state_dict({key: value for key, value in heads.state_dict().items() if key != "fc.bias"})
    return other


@torch.no_grad()
def answer(args: argparse.Namespace, heads: DraftHead, target: PreTrainedModel, text: torch.Tensor) -> dict[str, Any]:
    """Runs one export through the other library."""
    rows = rows_of(heads.bind(target), target, text)
    drafted = next(heads.unroll(rows, 1))
    values = {"token_ids": text, "features": rows.features, "logits": drafted.logits(drafted.hidden[0]).float()}
    with tempfile.TemporaryDirectory() as folder:
        exported, rows_file = export_heads(heads, f"{folder}/heads", to="eagle").folder, f"{folder}/rows.safetensors"
        save_file({key: value.contiguous().clone() for key, value in values.items()}, rows_file)
        question = {"heads": str(exported), "target": str(SHIPPED_TARGET), "rows": rows_file}
        return ask(args.python, "run_speculators_eagle.py", question, PYTHONPATH=args.side)


def main() -> None:
    """Compares, prints a line per entry and writes the result."""
    parser = parser_of(__doc__, "speculators_eagle")
    parser.add_argument("--side", required=True, help="folder(s) with speculators 0.6 and its transformers")
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    target = AutoModelForCausalLM.from_pretrained(SHIPPED_TARGET, dtype=torch.float32).eval()
    text, entries = text_of(target), []
    for name in ("eagle", "hass"):
        heads = load_heads(ROOT / "model_cards" / name, dtype=torch.float32)
        for said, one in (("", heads), (" without bias", without_bias(heads))):
            entries.append({"heads": f"model_cards/{name}{said}", **answer(args, one, target, text)})
    write(args.output, "python -m benchmarks.oracles.compare_speculators_eagle --side SIDE", entries)


if __name__ == "__main__":
    main()
