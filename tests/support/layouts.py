"""Every published layout, one small checkpoint each: files as their writers name them, all for one target.

folder = LAYOUTS["eagle3-modelopt"].write(tmp_path)
heads = load_heads(folder, **LAYOUTS["eagle3-modelopt"].arguments)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hf_specheads import AutoDraftHead, DraftHead
from hf_specheads.checkpoints.native import read_native
from hf_specheads.checkpoints.read import StoredHeads, read_heads
from support.checkpoints import (
    EAGLE3_CONFIG,
    HEAD_DIM,
    HIDDEN,
    LLAMA_CONFIG,
    MODELOPT_CONFIG,
    TOKENS,
    VOCAB,
    eagle3_tensors,
    eagle_tensors,
    hydra_tensors,
    medusa_tensors,
)
from support.targets import shared_target

Tensors = dict[str, torch.Tensor]
SPECULATORS_KINDS = {
    "algorithm": "x", "default_proposal_method": "greedy",
    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
    "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
}  # fmt: skip


def target() -> Any:
    """The target of all checkpoints here: deep enough for EAGLE-3's usual levels."""
    return shared_target("llama", num_hidden_layers=8)


def embedding() -> torch.Tensor:
    """A copy of the target's token embedding [V, H]."""
    return target().get_input_embeddings().weight.detach().clone()


@dataclass(frozen=True)
class Layout:
    """A published layout.

    Attributes:
        files: Makes the content of every file by name: a JSON object, or tensors.
        folder: Name of the folder, where it tells something.
        arguments: What `load_heads` must be told.
        kind: What the layout is found to be, a key of `hf_specheads.checkpoints.layouts.detect.TITLES`.
        method: Of the heads.
    """

    files: Callable[[], dict[str, dict]]
    kind: str
    method: str
    folder: str = "heads"
    arguments: dict[str, Any] = field(default_factory=dict)

    def write(self, parent: Path, files: dict[str, dict] | None = None) -> Path:
        """Writes the files to a folder of that name and returns it."""
        folder = parent / self.folder
        for name, content in (self.files() if files is None else files).items():
            write_file(folder / name, content)
        return folder


def stored(
    folder: Path,
    method: str | None = None,
    positions_per_specialist: int | None = None,
    anchor_slot: str | None = None,
) -> StoredHeads:
    """What a folder holds, told by the arguments of `load_heads`."""
    if method is not None:
        return read_native(folder, method, {})
    return read_heads(folder, folder.name, positions_per_specialist, anchor_slot=anchor_slot)


def write_file(path: Path, content: dict) -> None:
    """Writes a JSON object or tensors, as the name asks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(content))
    elif path.suffix == ".safetensors":
        save_file({key: tensor.contiguous() for key, tensor in content.items()}, path, metadata={"format": "pt"})
    else:
        torch.save(content, path)


def with_embedding(tensors: Tensors) -> Tensors:
    return tensors | {"embed_tokens.weight": embedding()}


def single(
    tensors: Callable[[], Tensors], config: dict[str, Any], name: str = "model.safetensors"
) -> Callable[[], dict[str, dict]]:
    """Files of a checkpoint of one weight file."""
    return lambda: {"config.json": dict(config), name: tensors()}


def sharded(tensors: Callable[[], Tensors], config: dict[str, Any], suffix: str) -> Callable[[], dict[str, dict]]:
    """Files of a checkpoint of three shards and an index."""

    def files() -> dict[str, dict]:
        everything, stem = tensors(), "model" if suffix == "safetensors" else "pytorch_model"
        shards: dict[str, Tensors] = {f"{stem}-0000{i + 1}-of-00003.{suffix}": {} for i in range(3)}
        places = {key: list(shards)[i % 3] for i, key in enumerate(sorted(everything))}
        for key, place in places.items():
            shards[place][key] = everything[key]
        index = {"metadata": {"total_size": 1}, "weight_map": places}
        return {"config.json": dict(config), f"{stem}.{suffix}.index.json": index, **shards}

    return files


# ------------------------------------------------------------------ tensors under other names, in other company
def hass_norms() -> Tensors:
    names = ("embed_layernorm", "hidden_layernorm", "lm_head_layernorm")
    return {f"{name}.weight": torch.rand(HIDDEN, generator=torch.Generator().manual_seed(i)) + 0.5
            for i, name in enumerate(names)}  # fmt: skip


def speculators_eagle(norms: bool) -> Tensors:
    """EAGLE heads as `speculators` up to 0.6 saves them."""
    tensors = eagle_tensors(embedding=False) | (hass_norms() if norms else {})
    names = {"embed_layernorm": "embedding_layernorm", "hidden_layernorm": "transformer.input_layernorm",
             "lm_head_layernorm": "pre_lm_head_layernorm", "fc": "fusion_fc", "layers.0": "transformer"}  # fmt: skip
    renamed = {}
    for key, tensor in tensors.items():
        old = next(old for old in names if key.startswith(f"{old}."))
        renamed[names[old] + key.removeprefix(old)] = tensor
    return renamed


def qk_norms(tensors: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(2)
    return tensors | {
        f"layers.0.self_attn.{x}_norm.weight": torch.rand(HEAD_DIM, generator=generator) + 0.5 for x in "qk"
    }


def speculators_config(kind: str, **fields: Any) -> dict[str, Any]:
    """Config of `speculators`; the layer's own fields are in an object of their own."""
    layer = {key: value for key, value in LLAMA_CONFIG.items() if key not in ("architectures", "rope_theta")}
    layer |= {"head_dim": HEAD_DIM, "rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"}}
    layer |= fields.pop("layer", {})
    return {"speculators_model_type": kind, "speculators_version": "0.9.0", "transformer_layer_config": layer,
            "speculators_config": SPECULATORS_KINDS | {"algorithm": kind}, **fields}  # fmt: skip


SPECULATORS_EAGLE3 = speculators_config(
    "eagle3", architectures=["Eagle3Speculator"], draft_vocab_size=len(TOKENS), norm_before_residual=True,
    norm_before_fc=False, fc_norm=False, norm_output=False, target_hidden_size=None,
    eagle_aux_hidden_state_layer_ids=None, tie_word_embeddings=False,
)  # fmt: skip


def dflash_tensors(num_layers: int = 2, taps: int = 2, copies: bool = False) -> Tensors:
    """A block drafter; with copies of the target's weights where a writer saves them."""
    layers: Tensors = {}
    for index in range(num_layers):
        layer = {key.removeprefix("layers.0."): tensor for key, tensor in eagle_tensors(seed=index).items()
                 if key.startswith("layers.0.")}  # fmt: skip
        layer["input_layernorm.weight"] = layer["post_attention_layernorm.weight"] + 0.5
        layer |= {f"self_attn.{x}_norm.weight": layer["input_layernorm.weight"][:HEAD_DIM].clone() for x in "qk"}
        layers |= {f"layers.{index}.{key}": tensor for key, tensor in layer.items()}
    generator = torch.Generator().manual_seed(5)
    own = {name: torch.rand(HIDDEN, generator=generator) + 0.5 for name in ("hidden_norm.weight", "norm.weight")}
    fc = torch.randn(HIDDEN, taps * HIDDEN, generator=generator) * 0.3
    tensors = layers | own | {"fc.weight": fc}
    if copies:
        tensors |= {"embed_tokens.weight": embedding(), "lm_head.weight": target().lm_head.weight.detach().clone()}
    return tensors


def dflash_speculators() -> Tensors:
    """The same as `speculators` saves it, over [`TOKENS`]."""
    tensors = dflash_tensors(copies=True)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][TOKENS]
    drafted = torch.isin(torch.arange(VOCAB), TOKENS)
    return tensors | {"d2t": TOKENS - torch.arange(len(TOKENS)), "t2d": drafted}


QWEN3_CONFIG = LLAMA_CONFIG | {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2,
                               "head_dim": HEAD_DIM, "num_target_layers": 8}  # fmt: skip


def dspark_tensors() -> Tensors:
    """DSpark as DeepSpec saves it, with a gated Markov head of rank 6."""
    generator = torch.Generator().manual_seed(7)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    return dflash_tensors(copies=True) | {
        "markov_head.markov_w1.weight": weight(VOCAB, 6), "markov_head.markov_w2.weight": weight(VOCAB, 6),
        "markov_head.gate_proj.weight": weight(6, HIDDEN + 6), "markov_head.gate_proj.bias": weight(6),
        "confidence_head.proj.weight": weight(1, HIDDEN + 6), "confidence_head.proj.bias": weight(1),
    }  # fmt: skip


def dflash2_tensors() -> Tensors:
    """DFlash 2, with convolutions of two taps and a selector of rank 6."""
    generator = torch.Generator().manual_seed(8)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    convolutions = {
        f"layers.{index}.{place}_conv.{name}": weight(*shape)
        for index in range(2) for place in ("attention", "mlp")
        for name, shape in (("base_kernel", (2, 2, HIDDEN)), ("kernel_projection.weight", (4 * HIDDEN // 16, HIDDEN)))
    }  # fmt: skip
    selector = {"predecessor_codebook": (VOCAB, 6), "successor_codebook": (VOCAB, 6),
                "hidden_projection.weight": (6, HIDDEN)}  # fmt: skip
    named = {f"candidate_selector.{name}": weight(*shape) for name, shape in selector.items()}
    return dflash_tensors() | convolutions | named


def domino_tensors() -> Tensors:
    """Domino, with a recurrent state of 12 and a correction of rank 6."""
    generator = torch.Generator().manual_seed(9)
    shapes = {"prefix_gru.weight_ih_l0": (36, HIDDEN), "prefix_gru.weight_hh_l0": (36, 12),
              "embed_proj.0.weight": (6, HIDDEN + 12), "embed_proj.2.weight": (VOCAB, 6)}  # fmt: skip
    return dflash_tensors() | {name: torch.randn(*shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def dspark_speculators() -> Tensors:
    """DSpark as `speculators` saves it, over [`TOKENS`]."""
    tensors = dspark_tensors() | dflash_speculators()
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][TOKENS]
    return tensors


def llama_layer(index: int) -> Tensors:
    """One layer of the block drafter, without norms of queries and keys."""
    layer = f"layers.{index}."
    return {key.removeprefix(layer): tensor for key, tensor in dflash_tensors().items()
            if key.startswith(layer) and "q_norm" not in key and "k_norm" not in key}  # fmt: skip


def peagle_tensors() -> Tensors:
    """P-EAGLE: EAGLE-3's tensors, a further layer, and the feature of mask rows."""
    deeper = {f"layers.1.{name}": tensor for name, tensor in llama_layer(1).items()}
    mask = torch.randn(1, 1, 3 * HIDDEN, generator=torch.Generator().manual_seed(4)) * 0.3
    return eagle3_tensors("layers.0.", embedding=True) | deeper | {"mask_hidden": mask}


def mtp_tensors(prefix: str, modules: tuple[str, ...], layer: str) -> Tensors:
    """An MTP layer: its own modules under four names after a prefix, the decoder layer after another."""
    generator = torch.Generator().manual_seed(6)
    fusion, *norms = (f"{prefix}{module}.weight" for module in modules)
    own = {norm: torch.rand(HIDDEN, generator=generator) + 0.5 for norm in norms}
    fc = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.3
    return {fusion: fc} | own | {layer + name: tensor for name, tensor in llama_layer(0).items()}


def mtp_target() -> Tensors:
    return mtp_tensors("mtp.", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "mtp.layers.0.")


def mtp_speculators() -> Tensors:
    """The same as `speculators`' converter saves it, with a copy of the target's `lm_head` that is all NaN."""
    names = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
    tensors = mtp_tensors("mtp_layers.0.", names, "mtp_layers.0.")
    return tensors | {"verifier_lm_head.weight": torch.full((VOCAB, HIDDEN), torch.nan)}


QWEN3_LAYERS = {"model_type": "qwen3", "num_hidden_layers": 2, "architectures": ["Qwen3Model"]}
DFLASH = {"mask_token_id": 98, "target_layer_ids": [1, 4]}
DEEPSPEC = QWEN3_CONFIG | DFLASH | {"architectures": ["Qwen3DSparkModel"], "block_size": 4, "markov_rank": 0}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "use_sliding_window": True}


def vllm_medusa() -> Tensors:
    renamed = {}
    for key, tensor in medusa_tensors(4, 2, tied=False).items():
        head, index, rest = key.split(".", 2)
        linear = rest.startswith("linear")
        renamed[f"blocks.{head}.layers.{index}.{rest[7:]}" if linear else f"lm_heads.{head}.weight"] = tensor
    return renamed


def whole_target(prefix: str) -> Tensors:
    """A target that carries its heads."""
    state = {key: tensor.detach().clone() for key, tensor in target().state_dict().items()}
    return state | {prefix + key: tensor for key, tensor in medusa_tensors().items()}


def without_mapping(tensors: Tensors) -> Tensors:
    """EAGLE-3 over all of V."""
    kept = {key: tensor for key, tensor in tensors.items() if key not in ("d2t", "t2d")}
    return kept | {"lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.3}


def modelopt_eagle3() -> Tensors:
    return {key: tensor for key, tensor in eagle3_tensors("layers.0.").items() if key != "t2d"}


def hydra_with_embedding(prefixed: bool) -> Tensors:
    return hydra_tensors(prefixed=prefixed) | {"input_embed_fn.weight": embedding()}


def ours(method: str, **options: Any) -> Callable[[], dict[str, dict]]:
    """Files of heads in this package's own layout."""

    def files() -> dict[str, dict]:
        torch.manual_seed(11)
        heads: DraftHead = AutoDraftHead.from_target(target(), method, **options)
        for parameter in heads.parameters():
            parameter.data.normal_(0, 0.3)
        heads.config.architectures = [type(heads).__name__]
        config = json.loads(json.dumps(heads.config.to_diff_dict() | {"dtype": "float32"}))
        tied = heads.all_tied_weights_keys
        state = {key: tensor.detach().clone() for key, tensor in heads.state_dict().items() if key not in tied}
        return {"config.json": config, "model.safetensors": state}

    return files


SGLANG = LLAMA_CONFIG | {"architectures": ["LlamaForCausalLMEagle"]}
EAGLE3_SGLANG = EAGLE3_CONFIG | {"architectures": ["LlamaForCausalLMEagle3"]}
TINY_MEDUSA = {"base_model_name_or_path": "org/target", "medusa_num_heads": 2, "medusa_num_layers": 1}
HYDRA = {"base_model_name_or_path": "org/target", "hydra_num_heads": 3, "hydra_num_layers": 3,
         "hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}  # fmt: skip
NARROW = {"hidden_size": 24, "target_hidden_size": HIDDEN, "head_dim": HEAD_DIM}
POSS_OPTIONS = {"num_specialists": 2, "positions_per_specialist": 2, "tree_config": {"depth": 4, "top_k": 3,
                "total_tokens": 9}}  # fmt: skip


def fp16(tensors: Tensors) -> Tensors:
    return {key: tensor.half() if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}


def prefixed(tensors: Tensors, prefix: str, *beside: str) -> Tensors:
    return {key if key in beside else prefix + key: tensor for key, tensor in tensors.items()}


LAYOUTS: dict[str, Layout] = {
    "ours-poss": Layout(ours("poss", **POSS_OPTIONS), "specheads", "poss"),
    "ours-eagle3": Layout(ours("eagle3", draft_token_ids=TOKENS.tolist()), "specheads", "eagle3"),
    "ours-medusa": Layout(ours("medusa", num_heads=3), "specheads", "medusa"),
    "ours-hydra": Layout(ours("hydra", num_heads=3, num_blocks=2, head_arch="prefix-mlp"), "specheads", "hydra"),
    "ours-dflash": Layout(ours("dflash", num_hidden_layers=2, block_size=5), "specheads", "dflash"),
    "eagle": Layout(
        single(lambda: with_embedding(eagle_tensors(fc_bias=False)), LLAMA_CONFIG, "pytorch_model.bin"),
        "eagle", "eagle",
    ),
    "eagle-qkv-bias": Layout(
        single(lambda: eagle_tensors(qkv_bias=True, embedding=False), LLAMA_CONFIG), "eagle", "eagle"
    ),
    "eagle-sglang": Layout(
        single(
            lambda: prefixed(with_embedding(eagle_tensors()), "model.") | {"lm_head.weight": embedding()},
            SGLANG,
        ),
        "eagle", "eagle",
    ),
    "eagle-fp16-shards": Layout(
        sharded(lambda: fp16(with_embedding(eagle_tensors())), LLAMA_CONFIG, "safetensors"), "eagle", "eagle"
    ),
    "hass": Layout(
        single(lambda: with_embedding(eagle_tensors()), LLAMA_CONFIG), "eagle", "hass", "HASS-Llama3-8B-Instruct"
    ),
    "hass-norms": Layout(
        single(lambda: with_embedding(eagle_tensors() | hass_norms()), LLAMA_CONFIG), "eagle", "eagle"
    ),
    "hass-training-state": Layout(
        lambda: {"config.json": dict(LLAMA_CONFIG),
                 "state_20/model.safetensors": prefixed(with_embedding(eagle_tensors()), "module."),
                 "state_20/optimizer.bin": {"step": 1}},
        "eagle", "hass", "hass-run",
    ),
    "poss": Layout(
        single(lambda: with_embedding(eagle_tensors(4)), LLAMA_CONFIG), "poss", "poss", "PosS3-Llama3-8B-Instruct"
    ),
    "poss-pickled-shards": Layout(
        sharded(lambda: with_embedding(eagle_tensors(3)), LLAMA_CONFIG, "bin"), "poss", "poss",
        arguments={"positions_per_specialist": 2},
    ),
    "eagle3": Layout(single(eagle3_tensors, EAGLE3_CONFIG, "pytorch_model.bin"), "eagle3", "eagle3"),
    "eagle3-specforge": Layout(single(eagle3_tensors, EAGLE3_SGLANG), "eagle3", "eagle3"),
    "eagle3-modelopt": Layout(
        single(modelopt_eagle3, EAGLE3_SGLANG | {"eagle_config": MODELOPT_CONFIG}), "eagle3", "eagle3"
    ),
    "eagle3-whole-vocabulary": Layout(
        single(lambda: without_mapping(eagle3_tensors()), EAGLE3_CONFIG | {"draft_vocab_size": VOCAB}),
        "eagle3", "eagle3",
    ),
    "eagle3-narrow": Layout(
        single(lambda: eagle3_tensors(hidden=24, embedding=True), EAGLE3_SGLANG | NARROW), "eagle3", "eagle3"
    ),
    "speculators-eagle3": Layout(
        single(lambda: eagle3_tensors("layers.0."), SPECULATORS_EAGLE3), "speculators", "eagle3"
    ),
    "speculators-eagle3-qwen3": Layout(
        single(
            lambda: qk_norms(eagle3_tensors("layers.0.")),
            SPECULATORS_EAGLE3 | {"transformer_layer_config":
                                  SPECULATORS_EAGLE3["transformer_layer_config"] | {"model_type": "qwen3"}},
        ),
        "speculators", "eagle3",
    ),
    "speculators-eagle": Layout(
        single(lambda: speculators_eagle(False), speculators_config("eagle", layernorms=False, fusion_bias=True)),
        "speculators", "eagle",
    ),
    "speculators-hass-norms": Layout(
        single(lambda: speculators_eagle(True), speculators_config("eagle", layernorms=True, fusion_bias=True)),
        "speculators", "hass", "hass-speculator",
    ),
    "medusa-v1": Layout(single(lambda: medusa_tensors(5), TINY_MEDUSA, "medusa_lm_head.pt"), "medusa", "medusa"),
    "medusa-version-2": Layout(
        single(
            lambda: medusa_tensors(projections=False), TINY_MEDUSA | {"version": "2", "vocab_size": VOCAB},
            "medusa_lm_head.safetensors",
        ),
        "medusa", "medusa",
    ),
    "medusa-2-whole-model": Layout(
        sharded(lambda: whole_target("medusa_head."), LLAMA_CONFIG, "safetensors"), "medusa", "medusa"
    ),
    "medusa-modelopt": Layout(
        single(lambda: whole_target("medusa_heads."), LLAMA_CONFIG | {"medusa": {"num_medusa_heads": 3}}),
        "medusa", "medusa",
    ),
    "medusa-vllm": Layout(
        single(vllm_medusa, {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": HIDDEN,
                             "vocab_size": VOCAB, "num_heads": 4, "medusa_fc_bias": True}),
        "medusa", "medusa",
    ),
    "dflash": Layout(
        single(dflash_tensors, QWEN3_CONFIG | {"block_size": 4, "dflash_config": DFLASH}), "dflash", "dflash"
    ),
    "dflash-default-taps": Layout(
        single(dflash_tensors, QWEN3_CONFIG | {"block_size": 4, "dflash_config": {"mask_token_id": 98}}),
        "dflash", "dflash",
    ),
    "dflash-sliding": Layout(
        single(dflash_tensors, QWEN3_CONFIG | SLIDING | {"dflash_config": DFLASH | {"block_size": 4}}),
        "dflash", "dflash",
    ),
    "dflash-deepspec": Layout(single(lambda: dflash_tensors(copies=True), DEEPSPEC), "dflash", "dflash"),
    "dspark": Layout(
        single(dspark_tensors, DEEPSPEC | {"markov_rank": 6, "markov_head_type": "gated"}), "dflash", "dspark"
    ),
    "dflash2": Layout(
        single(
            dflash2_tensors,
            QWEN3_CONFIG | {"architectures": ["DFlash2DraftModel"],
                            "dflash_config": DFLASH | {"block_size": 4, "conv_kernel_size": 2, "conv_group_size": 16,
                                                       "selector_rank": 6, "selector_top_k": 8}},
        ),
        "dflash", "dflash2",
    ),
    "domino": Layout(
        single(
            domino_tensors,
            QWEN3_CONFIG | {"architectures": ["DominoDraftModel"], "block_size": 4,
                            "dflash_config": DFLASH | {"projector_type": "domino", "emb_dim": 6, "gru_hidden_dim": 12,
                                                       "pure_draft_prefix_len": 1, "shift_label": True}},
        ),
        "dflash", "domino",
    ),
    "jetspec": Layout(
        single(dflash_tensors, QWEN3_CONFIG | {"block_size": 4, "dflash_config": DFLASH | {"causal_head": True}}),
        "dflash", "jetspec", arguments={"anchor_slot": "drafts"},
    ),
    "speculators-dflash": Layout(
        single(
            dflash_speculators,
            speculators_config(
                "dflash", architectures=["DFlashSpeculator"], draft_vocab_size=len(TOKENS), block_size=4,
                mask_token_id=98, aux_hidden_state_layer_ids=[2, 5], sample_from_anchor=False,
                sliding_window_non_causal=False,
                layer=QWEN3_LAYERS,
            ),
        ),
        "speculators", "dflash",
    ),
    "speculators-dspark": Layout(
        single(
            dspark_speculators,
            speculators_config(
                "dspark", architectures=["DSparkSpeculator"], draft_vocab_size=len(TOKENS), block_size=4,
                mask_token_id=98, aux_hidden_state_layer_ids=[2, 5], sample_from_anchor=True, markov_rank=6,
                markov_head_type="gated", enable_confidence_head=True, confidence_head_with_markov=True,
                sliding_window_non_causal=False, layer=QWEN3_LAYERS,
            ),
        ),
        "speculators", "dspark",
    ),
    "speculators-dflash2": Layout(
        single(
            dflash2_tensors,
            speculators_config(
                "dflash2", architectures=["DFlash2DraftModel"], draft_vocab_size=VOCAB, block_size=4,
                mask_token_id=98, aux_hidden_state_layer_ids=[2, 5], sample_from_anchor=False, conv_kernel_size=2,
                conv_group_size=16, selector_rank=6, selector_top_k=8, sliding_window_non_causal=True,
                layer=QWEN3_LAYERS | SLIDING,
            ),
        ),
        "speculators", "dflash2",
    ),
    "peagle": Layout(
        single(
            peagle_tensors,
            EAGLE3_CONFIG | {"num_hidden_layers": 2, "ptd_token_id": 98, "norm_before_residual": False},
        ),
        "peagle", "peagle",
    ),
    "speculators-peagle": Layout(
        single(
            peagle_tensors,
            SPECULATORS_EAGLE3 | {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"],
                                  "mask_token_id": 98, "embed_requires_grad": True},
        ),
        "speculators", "peagle",
    ),
    "mtp": Layout(
        single(
            mtp_target,
            LLAMA_CONFIG | {"num_hidden_layers": 8, "mtp_num_hidden_layers": 1, "head_dim": HEAD_DIM},
        ),
        "native", "mtp", arguments={"method": "mtp"},
    ),
    "speculators-mtp": Layout(
        single(
            mtp_speculators,
            speculators_config(
                "mtp", architectures=["MTPDraftModel"], num_nextn_predict_layers=1,
                layer={"num_hidden_layers": 8, "mtp_num_hidden_layers": 1},
            ),
        ),
        "speculators", "mtp",
    ),
    "hydra": Layout(single(lambda: hydra_with_embedding(False), HYDRA, "hydra_lm_head.pt"), "hydra", "hydra"),
    "hydra-plus": Layout(
        single(lambda: hydra_with_embedding(True), HYDRA | {"hydra_head_arch": "prefix-mlp"}, "hydra_lm_head.pt"),
        "hydra", "hydra",
    ),
}  # fmt: skip
