"""Computes draft logits of EAGLE heads with `speculators` 0.6. `compare_speculators_eagle.py` starts this script in an
environment with that library and the transformers of its time.

    python run_speculators_eagle.py QUESTION.json ANSWER.json

The question names `heads`, a folder in EAGLE's own layout; their `target`; and `rows`, a file with token ids int64 [1,
T + 1], features fp32 [1, T, H] and our draft logits fp32 [T, V].
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"


def main(question_file: str, answer_file: str) -> None:
    """Converts the heads, compares tensors, drafts, and compares logits."""
    import torch
    import transformers
    from safetensors.torch import load_file
    from speculators.convert import convert_model
    from speculators.convert.eagle.eagle_legacy_model import EagleSpeculator

    asked = json.loads(Path(question_file).read_text(encoding="utf-8"))
    verifier = transformers.AutoModelForCausalLM.from_pretrained(asked["target"], torch_dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as folder:
        convert_model(model=asked["heads"], verifier=asked["target"], algorithm="eagle", output_path=folder)
        converted = load_file(Path(folder) / "model.safetensors")
        model = EagleSpeculator.from_pretrained(folder, verifier_attachment_mode="detached")
    model.attach_verifier(verifier, mode="train_only")
    model = model.float().eval()
    model.transformer.self_attn.config._attn_implementation = "eager"
    names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    source = load_file(Path(asked["heads"]) / "model.safetensors")
    renamed = {next((new + key[len(old) :] for old, new in names.items() if key.startswith(old)), key): value
               for key, value in source.items()}  # fmt: skip
    rows = load_file(asked["rows"])
    length = rows["features"].shape[1]
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        logits = model(
            input_ids=rows["token_ids"][:, 1:], hidden_states=rows["features"], attention_mask=mask,
            position_ids=torch.arange(length)[None], return_dict=False,
        )  # fmt: skip
    ours, theirs = rows["logits"], logits.reshape(rows["logits"].shape)
    answer = {
        "tensors": len(converted),
        "equal_tensors": sum(key in renamed and torch.equal(renamed[key], value) for key, value in converted.items()),
        "fusion_bias": model.config.fusion_bias,
        "rows": length,
        "max_error": float((ours - theirs).abs().max()),
        "largest_logit": float(ours.abs().max()),
        "same_favourite": float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
        "versions": {"speculators": metadata.version("speculators"), "transformers": transformers.__version__},
    }
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
