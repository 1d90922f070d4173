"""Compares our EAGLE-3 exports with the library `speculators`: draft logits, and the tensors that its converter makes.

Needs `speculators` next to this package. Its metadata asks for an older transformers than ours, so it is installed
into a folder of its own:

    pip install --no-deps --target SIDE speculators==0.9.0 hs-connectors loguru pydantic-settings python-dotenv \\
        typing-inspection openai distro jiter sniffio
    PYTHONPATH=SIDE python -m benchmarks.oracles.compare_speculators

Variants of tiny random heads, and the shipped ones, draft three teacher-forced passes over the same rows in both
libraries; the result records the largest difference of a draft logit. With transformers 5.23, `speculators` 0.9.0 does
not notice that the target's embedding is missing from a file (it looks for NaN, and finds uninitialised memory), so
this script tells it to load the embedding. `--record FOLDER` keeps two small exports with the other library's logits,
which the test suite compares with ours.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_specheads import DraftHead, export_heads, load_heads
from hf_specheads.unroll.rows import TrainingRows
from tests.support.heads import scrambled_heads

from ..results import ROOT, SHIPPED_TARGET
from .render import parser_of, write

PACKAGES = ("speculators", "transformers", "torch")
PASSES = 3
VOCAB, ROWS = 59, 16
LLAMA3 = {"rope_type": "llama3", "rope_theta": 20000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced vocabulary": {"draft_token_ids": list(range(0, VOCAB, 2))},
    "grouped queries, llama3 rope": {"num_key_value_heads": 1, "rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": LINEAR},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norms of queries and keys": {"qk_norm": True},
    "own embedding": {"own_embedding": True},
    "two levels": {"feature_layers": (1, 4)},
    "bias of q, k, v": {"attention_bias": True},
    "all biases": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    "POSS, specialist 0": {"method": "poss-eagle3", "draft_token_ids": list(range(0, VOCAB, 2))},
}
CONVERTED = ("plain", "reduced vocabulary")  # these variants also go through its converter
RECORDED = {
    "plain": {"draft_token_ids": list(range(1, VOCAB, 2)), "num_key_value_heads": 1, "rope_parameters": LLAMA3},
    "variant": {"norm_before_residual": True, "norm_output": True, "fc_norm": True, "own_embedding": True},
}


def tiny_target(folder: Path, model_type: str = "llama", **fields: Any) -> PreTrainedModel:
    """Makes a random target of eight layers and saves it, because `speculators` reads it from disk."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, vocab_size=VOCAB, hidden_size=16, intermediate_size=19, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False, **fields,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def text_of(target: PreTrainedModel) -> torch.Tensor:
    """Returns the shipped target's continuation of a few tokens, int64 [1, 129]."""
    prompt = torch.tensor([[1, 7, 99, 300]])
    length = {"max_new_tokens": 125, "min_new_tokens": 125}
    return target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **length)


def random_heads(
    target: PreTrainedModel, seed: int = 0, method: str = "eagle3", kept: list[int] | None = None, **options: Any
) -> DraftHead:
    """Makes heads whose weights are all random, including norms and biases, with a vocabulary pruned to the tokens
    `kept`."""
    heads = scrambled_heads(target, method, seed=seed, noise=0.3, **options)
    return heads.bind(target).prune_draft_vocabulary(kept)


@torch.no_grad()
def rows_of(heads: DraftHead, target: PreTrainedModel, token_ids: torch.Tensor) -> TrainingRows:
    """Makes teacher-forced rows of a text, int64 [1, T + 1], with the target's own features."""
    states = target(token_ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[level] for level in heads.feature_layers], dim=-1)[:, :-1]
    rows = features.shape[1]
    return TrainingRows(
        features=features, token_ids=token_ids[:, :-1], next_token_ids=token_ids[:, 1:],
        documents=torch.zeros(1, rows, dtype=torch.long), position_ids=torch.arange(rows)[None],
        embed=heads.borrowed.embed_tokens, lm_head=heads.borrowed.lm_head,
    )  # fmt: skip


@torch.no_grad()
def our_logits(heads: DraftHead, rows: TrainingRows) -> torch.Tensor:
    """Returns our draft logits of all passes, fp32 [passes, T, Vd]."""
    passes = [drafted.logits(drafted.hidden[0]) for drafted in heads.unroll(rows, PASSES)]
    return torch.stack(passes).float()


@torch.no_grad()
def their_logits(folder: Path, rows: TrainingRows, dtype: torch.dtype) -> torch.Tensor:
    """Returns the draft logits of `speculators`, read at its `lm_head`, in the shape of [`our_logits`]."""
    from speculators import SpeculatorModel
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # its default attention works in blocks of 128 rows
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=dtype).eval()
    if "embed_tokens.weight" not in load_file(folder / "model.safetensors"):
        model._load_verifier_weights(overwrite_embed_tokens=True)
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0].float()))
    features = rows.features.to(dtype)
    model(hidden_states=features, input_ids=rows.next_token_ids, document_ids=rows.documents, ttt_steps=PASSES)
    return torch.stack(seen)


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, float]:
    """Compares logits [..., V]: largest difference, and share of equal favourites. -inf must be in the same places."""
    errors = (ours - theirs).abs().masked_fill(ours == theirs, 0)
    return {
        "max_error": float(errors.max()),
        "largest_logit": float(ours[ours > -torch.inf].abs().max()),
        "same_favourite": float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
    }


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, Any]:
    """Compares logits of all passes [passes, T, V], at the rows whose later tokens exist in both libraries."""
    rows = ours.shape[1] - PASSES  # the two libraries pad the tokens of later rows differently
    return {"rows": rows, "passes": PASSES, **gap(ours[:, :rows], theirs[:, :rows])}


def converted_like_ours(heads: DraftHead, folder: Path, target: PreTrainedModel) -> dict[str, Any] | None:
    """Runs our export in the EAGLE authors' layout through their converter, and compares the result with our own
    export: equal tensors, and fields that differ."""
    from speculators.convert import convert_model

    theirs, ours, source = folder / "theirs", folder / "ours", folder / "source"
    export_heads(heads, source, to="eagle", target=target)
    export_heads(heads, ours, to="speculators", target=target)
    levels = heads.config.feature_layers
    convert_model(
        model=str(source), verifier=target.config.name_or_path, algorithm="eagle3", output_path=str(theirs),
        eagle_aux_hidden_state_layer_ids=list(levels) if levels else None, validate_device=None,
    )  # fmt: skip
    a, b = load_file(theirs / "model.safetensors"), load_file(ours / "model.safetensors")
    configs = [json.loads((path / "config.json").read_text(encoding="utf-8")) for path in (theirs, ours)]
    layers = [config.pop("transformer_layer_config") for config in configs]
    return {
        "same_keys": sorted(a) == sorted(b),
        "equal_tensors": sum(key in b and torch.equal(a[key], b[key]) for key in a),
        "tensors": len(a),
        "fields_that_differ": sorted(key for key in configs[0] if configs[0][key] != configs[1].get(key)),
        "layer_fields_that_differ": sorted(key for key in layers[0] if layers[0][key] != layers[1].get(key)),
    }


def entry_of(
    title: str, heads: DraftHead, target: PreTrainedModel, token_ids: torch.Tensor, work: Path, converted: bool
) -> dict[str, Any]:
    """Compares draft logits on a text, int64 [1, T + 1], and on request also the converter's output."""
    rows, dtype = rows_of(heads, target, token_ids), heads.dtype
    exported = export_heads(heads, work / "export", to="speculators", target=target).folder
    found = difference(our_logits(heads, rows), their_logits(exported, rows, dtype))
    more = {"converter": converted_like_ours(heads, work, target)} if converted else {}
    return {"heads": title, "dtype": str(dtype).removeprefix("torch."), **found, **more}


def compare_tiny(folder: Path) -> list[dict[str, Any]]:
    """Compares all variants of tiny random heads."""
    target = tiny_target(folder / "target")
    token_ids = torch.randint(0, VOCAB, (1, ROWS + 1), generator=torch.Generator().manual_seed(1))
    return [
        entry_of(f"tiny, {name}", random_heads(target, **options), target, token_ids, folder / name, name in CONVERTED)
        for name, options in VARIANTS.items()
    ]


def compare_shipped(folder: Path, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Compares shipped heads on a text of the shipped target."""
    target = AutoModelForCausalLM.from_pretrained(SHIPPED_TARGET, dtype=dtype).eval()
    target.config.name_or_path = str(SHIPPED_TARGET)
    title, work = f"model_cards/{name}", folder / f"{name}-{dtype}"
    heads = load_heads(ROOT / title, dtype=dtype).bind(target)
    return entry_of(title, heads, target, text_of(target), work, converted=dtype == torch.bfloat16)


def record(folder: Path, work: Path) -> None:
    """Saves small exports, the rows they drafted on, and the logits that `speculators` computes for them."""
    target = tiny_target(work / "recorded-target")
    token_ids = torch.randint(0, VOCAB, (1, ROWS + 1), generator=torch.Generator().manual_seed(2))
    for name, options in RECORDED.items():
        heads = random_heads(target, seed=3, **options)
        heads.config.target = None
        place = target.config.name_or_path
        exported = export_heads(heads, folder / name, to="speculators", target=place, overwrite=True).folder
        rows = rows_of(heads, target, token_ids)
        logits = their_logits(exported, rows, torch.float32)
        path = exported / "config.json"  # records a fixed name instead of this run's temporary folder
        path.write_text(path.read_text(encoding="utf-8").replace(place, "tiny-target"))
        values = {"features": rows.features, "next_token_ids": rows.next_token_ids, "logits": logits}
        values["embedding"] = target.get_input_embeddings().weight.detach()
        save_file({key: value.contiguous().clone() for key, value in values.items()}, exported / "oracle.safetensors")


def main() -> None:
    """Compares, prints a line per entry and writes the result."""
    parser = parser_of(__doc__, "speculators")
    parser.add_argument("--record", type=Path, help="folder for recorded exports and logits")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        entries = compare_tiny(folder)
        for heads in ("eagle3", "poss3-eagle3"):
            entries += [compare_shipped(folder, heads, dtype) for dtype in (torch.float32, torch.bfloat16)]
        if args.record is not None:
            record(args.record, folder)
    write(args.output, "PYTHONPATH=SIDE python -m benchmarks.oracles.compare_speculators", entries, PACKAGES)


if __name__ == "__main__":
    main()
