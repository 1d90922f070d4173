"""Exports against what the engines' loaders ask for: tables of keys, shapes and config fields read off their wheels.

`data/vllm.json` and `data/sglang.json` name the wheel, its checksum and those of the files they were read from, and
say how to read them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.heads import SCALED_ROPES, scrambled_heads
from support.targets import VOCAB, deep_target
from transformers import AutoConfig

from hf_specheads import export_heads

DATA = Path(__file__).parent / "data"
TABLES = {engine: json.loads((DATA / f"{engine}.json").read_text(encoding="utf-8")) for engine in ("vllm", "sglang")}
TOKENS = list(range(0, VOCAB, 2))

EAGLE = {
    "plain": {"fc_bias": False},
    "bias of fc": {"fc_bias": True},
    "bias of q, k, v": {"fc_bias": False, "attention_bias": True},
    "bias of o": {"fc_bias": False, "attention_out_bias": True},
    "one key head": {"fc_bias": False, "num_key_value_heads": 1},
    "llama3 rope": {"fc_bias": False, "rope_parameters": SCALED_ROPES["llama3"]},
    "POSS": {"method": "poss", "fc_bias": False},
    "POSS-LoRA": {"method": "poss-lora"},
    "HASS": {"method": "hass"},
}
EAGLE3 = {
    "plain": {},
    "reduced vocabulary": {"draft_token_ids": TOKENS},
    "one key head": {"num_key_value_heads": 1, "draft_token_ids": TOKENS},
    "linear rope": {"rope_parameters": SCALED_ROPES["linear"]},
    "two levels": {"feature_layers": (1, 4)},
    "norm_output": {"norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True, "feature_layers": (0, 3, 4, 6)},
    "POSS": {"method": "poss-eagle3", "draft_token_ids": TOKENS},
}
VLLM_ONLY = {
    "norm_before_residual": {"norm_before_residual": True},
    "own embedding": {"own_embedding": True},
    "bias of q, k, v": {"attention_bias": True},
    "bias of o": {"attention_out_bias": True},
    "all biases": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    "norms of queries and keys": {"qk_norm": True},
}
CASES = [
    *(("vllm", "eagle", name) for name in EAGLE),
    *(("sglang", "eagle", name) for name in EAGLE),
    *(("vllm", "eagle3", name) for name in EAGLE3 | VLLM_ONLY),
    *(("sglang", "eagle3", name) for name in EAGLE3),
    *(("speculators", "eagle3", name) for name in EAGLE3 | VLLM_ONLY),
]


def written(folder: Path, engine: str, method: str, name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and tensors of an export."""
    options = {"method": method, **(EAGLE if method == "eagle" else EAGLE3 | VLLM_ONLY)[name]}
    target = "tiny-target" if engine == "speculators" else deep_target()
    exported = export_heads(scrambled_heads(deep_target(), **options), folder / "heads", to=engine, target=target)
    config = json.loads((exported.folder / "config.json").read_text(encoding="utf-8"))
    return config, load_file(exported.folder / "model.safetensors")


# ------------------------------------------------------------------ reading a table
def holds(when: list[list[str]], config: dict[str, Any]) -> bool:
    """The first group with a field that is there decides."""
    for group in when:
        if there := [config[field] for field in group if config.get(field) is not None]:
            return any(there)
    return False


def sizes_of(config: dict[str, Any]) -> dict[str, int]:
    width = config.get("target_hidden_size") or config["hidden_size"]
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    levels = config.get("num_aux_hidden_states") or (len(nested) if nested else 3)
    return {
        **{name: value for name, value in config.items() if isinstance(value, int)},
        "feature_width": width,
        "levels": levels,
        "features": width * levels,
        "queries": config["num_attention_heads"] * config["head_dim"],
        "keys": config["num_key_value_heads"] * config["head_dim"],
        "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
    }


def shape_of(parameter: dict[str, Any], sizes: dict[str, int]) -> tuple[int, ...]:
    shape = []
    for entry in parameter["shape"]:
        factor, _, name = entry.rpartition(" * ")
        shape.append(int(factor or 1) * sizes[name])
    return tuple(shape)


def asked_for(model: dict[str, Any], config: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Shapes of all parameters the engine builds, and the keys that may be missing from the file."""
    sizes, shapes, optional = sizes_of(config), {}, set()
    for parameter in model["parameters"]:
        if "when" in parameter and not holds(parameter["when"], config):
            continue
        count = sizes[parameter["for_each"]] if "for_each" in parameter else 1
        for index in range(count):
            key = parameter["key"].format(level=index)
            shapes[key] = shape_of(parameter, sizes)
            if parameter.get("from_target"):
                optional.add(key)
    return shapes, optional


def problems(model: dict[str, Any], config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[str]:
    """Everything the engine would refuse, leave random, or pass over."""
    found = [
        f"{name}={config.get(name)!r}" for name, known in model["config"].items() if config.get(name) not in known
    ]
    found += [f"no {name}" for name in model.get("config_present", []) if name not in config]
    if (
        not set(config["architectures"]) <= set(model["architectures"])
        or config["model_type"] not in model["model_type"]
    ):
        found.append(f"{config['architectures']} of {config['model_type']}")
    shapes, optional = asked_for(model, config)
    sizes = sizes_of(config)
    if sizes["draft_vocab_size"] != sizes["vocab_size"] or model.get("d2t_otherwise") == "read":
        shapes["d2t"] = (sizes["draft_vocab_size"],)
        if sizes["draft_vocab_size"] == sizes["vocab_size"]:
            optional.add("d2t")
    keys = {}
    for key, tensor in tensors.items():
        for old, new in model["aliases"].items():
            key = key.replace(old, new)
        keys[key] = tensor
    if "d2t" in keys and keys["d2t"].dtype != torch.int64:
        found.append(f"d2t {keys['d2t'].dtype}")
    found += [f"missing {key}" for key in shapes if key not in keys and key not in optional]
    for key, tensor in keys.items():
        if key in model["ignored"]:
            continue
        if shapes.get(key) != tuple(tensor.shape):
            found.append(f"{key} {tuple(tensor.shape)} for {shapes.get(key)}")
    return found


def table_of(engine: str, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The engine's table for an export, and the config it makes of the file's."""
    if engine == "speculators":
        return from_speculators(config)
    models = TABLES[engine]["models"].values()
    (model,) = [m for m in models if set(config["architectures"]) <= set(m.get("architectures", []))]
    return model, config


def from_speculators(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """vLLM takes `transformer_layer_config` and a few fields beside it, with defaults of its own."""
    models = TABLES["vllm"]["models"]
    rules = models["speculators"]
    for path in rules["required"]:
        value: Any = config
        for part in path.split("."):
            value = value[int(part)] if part.isdigit() else value[part]
        assert value, path
    assert config["speculators_model_type"] in rules["speculators_model_type"]
    inner = dict(config["transformer_layer_config"])
    model = models[rules["layer_model_types"][inner["model_type"]]]
    inner |= {"draft_vocab_size": config["draft_vocab_size"], "architectures": model["architectures"][-1:]}
    inner |= {field: config.get(field, default) for field, default in rules["defaults"].items()}
    if config["target_hidden_size"] is not None:
        inner["target_hidden_size"] = config["target_hidden_size"]
    assert all(field in config for field in rules["defaults"]), "vLLM and speculators have other defaults"
    return model, inner


@pytest.mark.parametrize(("engine", "method", "name"), CASES, ids=["-".join(case) for case in CASES])
def test_every_tensor_is_read_and_none_is_missing(tmp_path: Path, engine: str, method: str, name: str) -> None:
    config, tensors = written(tmp_path, engine, method, name)
    assert problems(*table_of(engine, config), tensors) == []


@pytest.mark.parametrize(
    ("engine", "change", "word"),
    [
        ("vllm", lambda c, t: t.update({"fc.bias": t["norm.weight"]}), "fc.bias"),
        ("vllm", lambda c, t: t.pop("d2t"), "missing d2t"),
        ("vllm", lambda c, t: c.update(bias=True), "bias=True"),
        ("vllm", lambda c, t: c.update(attention_bias=True), "missing layers.0.self_attn.q_proj.bias"),
        ("vllm", lambda c, t: t.update({"norm.weight": t["norm.weight"][1:]}), "norm.weight"),
        ("sglang", lambda c, t: c.update(norm_before_residual=True), "norm_before_residual=True"),
        ("sglang", lambda c, t: t.update({"midlayer.mlp.up_proj.bias": t["norm.weight"]}), "up_proj.bias"),
        ("sglang", lambda c, t: c.pop("draft_vocab_size"), "no draft_vocab_size"),
    ],
)
def test_the_check_finds_what_is_wrong(tmp_path: Path, engine: str, change: Any, word: str) -> None:
    config, tensors = written(tmp_path, engine, "eagle3", "reduced vocabulary")
    model, config = table_of(engine, config)
    change(config, tensors)
    assert any(word in problem for problem in problems(model, config, tensors))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("levels", [(2, 4, 5), (1, 4), (0, 3, 4, 6)])
def test_levels_are_counted_as_the_engine_counts(tmp_path: Path, engine: str, levels: tuple[int, ...]) -> None:
    exported = export_heads(
        scrambled_heads(deep_target(), "eagle3", feature_layers=levels), tmp_path / "heads", to=engine
    )
    config = json.loads((exported.folder / "config.json").read_text(encoding="utf-8"))
    model, _ = table_of(engine, config)
    value: Any = config
    for part in model["levels_field"].split("."):
        value = value[part]
    shift = 0 if "enter" in model["levels_count"].split(",")[0] else 1
    assert tuple(level + shift for level in value) == levels
    # Readers that know only the other field of the same name must find the same levels, or none.
    assert tuple(config["eagle_aux_hidden_state_layer_ids"]) == levels


@pytest.mark.parametrize("to", ["vllm", "sglang", "speculators", "eagle"])
@pytest.mark.parametrize("name", [None, "linear", "llama3"])
def test_transformers_reads_the_same_rope(tmp_path: Path, to: str, name: str | None) -> None:
    """Both spellings are in the file, and a reader of either comes to the same."""
    rope = {"rope_type": "default", "rope_theta": 12345.0} if name is None else SCALED_ROPES[name]
    heads = scrambled_heads(deep_target(), "eagle3", rope_parameters=rope)
    folder = export_heads(heads, tmp_path / "heads", to=to, target="tiny-target").folder
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layer = raw.get("transformer_layer_config", raw)
    flat = {key: value for key, value in layer.items() if key != "rope_parameters"}
    nested = {key: value for key, value in layer.items() if key not in ("rope_theta", "rope_scaling")}
    for fields in (layer, flat, nested):
        fields = {key: value for key, value in fields.items() if key not in ("transformers_version", "torch_dtype")}
        read = AutoConfig.for_model(**fields).rope_parameters
        assert {key: read.get(key) for key in rope} == rope


def test_the_tables_name_their_sources() -> None:
    for table in TABLES.values():
        assert table["version"] in table["wheel"] and re.fullmatch(r"[0-9a-f]{64}", table["wheel_sha256"])
        assert all(re.fullmatch(r"[0-9a-f]{64}", checksum) for checksum in table["files"].values())
