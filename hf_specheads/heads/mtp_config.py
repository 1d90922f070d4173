"""Configuration of MTP heads, and checks whether decoder layers of a target's class can serve as MTP layers."""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

import inspect
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from ..cache.names import CACHE_NAME
from ..configuration import DraftHeadConfig
from ..errors import HeadConfigError
from ..target.identity import target_sizes
from .layers import layer_fields_for_target
from .mtp_cache import MtpCache

MOST_LAYERS = 2
FILE_FIELDS = ("transformers_version", "architectures", "dtype", "_name_or_path", "use_cache", "quantization_config")


@strict
class MtpHeadConfig(DraftHeadConfig):
    r"""Configuration of MTP layers.

    Args:
        layer_config: Config of the model whose decoder layers are used: the target's text config, with `model_type`.
        num_mtp_layers: Number of layers, 1 or 2.
        native: Whether the weights are those in the target's own checkpoint, `target["name"]`. They are then read from
            there and not saved a second time. Training sets it to `False`.
        trained_positions: Number of draft positions that training unrolled; `None` if unknown.
    """

    model_type = "specheads_mtp"
    required_fields: ClassVar[tuple[str, ...]] = (*DraftHeadConfig.required_fields, "layer_config")

    method: str = "mtp"
    layer_config: dict | None = None
    num_mtp_layers: int = 1
    native: bool = True
    trained_positions: int | None = None

    @classmethod
    def fields_for_target(cls, target: PreTrainedModel, method: str) -> dict[str, Any]:
        fields = super().fields_for_target(target, method)
        layer_config = layer_config_of(target.config)
        if layer_problem(layer_config) is not None:  # for fresh layers; native tensors would not fit it
            layer_config = llama_config_of(target)
        return {**fields, "layer_config": layer_config, "num_mtp_layers": min(layers_of(target.config), MOST_LAYERS)}

    def validate_architecture(self) -> None:
        super().validate_architecture()
        if not 1 <= self.num_mtp_layers <= MOST_LAYERS:
            raise ValueError(
                f"`num_mtp_layers` must be 1 or {MOST_LAYERS}, got {self.num_mtp_layers}; for a target with more, "
                f"pass num_mtp_layers={MOST_LAYERS} to use the first ones."
            )
        if self.hidden_size != self.feature_size:
            raise ValueError(
                f"drafted states go through the target's `lm_head`, so `hidden_size` ({self.hidden_size}) must equal "
                f"`feature_size` ({self.feature_size})."
            )

    def decoder_config(self) -> PreTrainedConfig:
        """Config of a model that consists of these layers only, all with full attention.

        Raises:
            ValueError: if transformers does not know the config, or has no causal language model for it.
        """
        fields = dict(self.layer_config or {})
        try:
            config = AutoConfig.for_model(fields.pop("model_type", None), **fields)
        except (KeyError, ValueError, AttributeError, TypeError, ArithmeticError, StrictDataclassError) as error:
            raise ValueError(f"`layer_config` is not a model config that transformers knows: {error}") from error
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(
                f"`layer_config` has model_type={config.model_type!r}, for which transformers has no causal language "
                "model."
            )
        config.num_hidden_layers = self.num_mtp_layers
        kinds = {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"], "indexer_types": ["full"]}
        for name, value in kinds.items():
            if getattr(config, name, None) is not None:
                setattr(config, name, value * self.num_mtp_layers)
        if hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = 0
        config.vocab_size, config.pad_token_id = 2, 0  # tiny, as the heads use the target's embedding
        return config


def layer_config_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of a target's text config that JSON can hold."""
    text = config.get_text_config(decoder=True)
    plain = {name: value for name, value in text.to_diff_dict().items() if name not in FILE_FIELDS}
    return {**plain, "model_type": text.model_type}


def layers_of(config: PreTrainedConfig) -> int:
    """Number of MTP layers according to a target's config; 1 if the config does not say."""
    text = config.get_text_config(decoder=True)
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
    return next((count for name in names if isinstance(count := getattr(text, name, None), int) and count > 0), 1)


def layer_problem(layer_config: dict[str, Any]) -> str | None:
    """Says why decoder layers of a config's class cannot be used by themselves; `None` if they can. A layer without
    weights is tried on one row."""
    width = layer_config.get("hidden_size") or 1
    try:
        config = MtpHeadConfig(hidden_size=width, feature_size=width, layer_config=layer_config).decoder_config()
        config._experts_implementation = "eager"  # other implementations run in 16 bits only on the meta device
        with torch.device("meta"):
            decoder = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).get_decoder()
        parameters, _ = inspect.signature(decoder.layers[0].forward).parameters, decoder.norm
        missing = [name for name in ("position_embeddings", CACHE_NAME, "attention_mask") if name not in parameters]
        if missing:
            return f"its forward takes no {missing[0]}."
        _try_out(decoder.layers[0], decoder.rotary_emb, width)
    except (LookupError, AttributeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        return " ".join(str(error).split()).rstrip(".") + "."
    return None


def _try_out(layer: nn.Module, rotary: nn.Module | None, width: int) -> None:
    """Runs one row through a layer on the meta device, as a draft would. Code that needs the values of tensors, which
    the meta device does not have, is not tried."""
    row = torch.zeros(1, 1, width, dtype=next(layer.parameters()).dtype, device="meta")
    positions = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    cache = MtpCache(1)
    cache.open_rows(1, row.device)
    rotated = None if rotary is None else rotary(row, positions, **rotary_options(rotary))
    given = {"attention_mask": row.new_zeros(1, 1, 1, 1), "position_ids": positions, "position_embeddings": rotated}
    try:
        outputs = layer(row, **given, **{CACHE_NAME: cache})
    except NotImplementedError:
        return
    except RuntimeError as error:
        if "meta tensor" in str(error):
            return
        raise ValueError(str(error)) from error
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    if outputs.shape != row.shape:
        raise ValueError(f"a layer's output has shape {list(outputs.shape)} for input of shape {list(row.shape)}")


def rotary_options(rotary: nn.Module) -> dict[str, Any]:
    """Keyword arguments of a class's own `rotary_emb`, besides rows and positions, for layers with full attention."""
    return {"layer_type": "full_attention"} if "layer_type" in inspect.signature(rotary.forward).parameters else {}


def refuse_layers_of(config: PreTrainedConfig) -> None:
    """Refuses a target whose own MTP layers cannot draft.

    Raises:
        HeadConfigError: if they cannot; the message says why.
    """
    if (problem := layer_problem(layer_config_of(config))) is not None:
        raise HeadConfigError(
            f"the layers of this target (model_type={config.model_type!r}) cannot draft by themselves: {problem} "
            "Train fresh heads for it, made with AutoDraftHead.from_target(target, 'mtp', native=False), or heads of "
            "another method."
        )


def llama_config_of(target: PreTrainedModel) -> dict[str, Any]:
    """Config of Llama layers with a target's proportions, for targets whose own layers cannot be used alone."""
    sizes = target_sizes(target)
    fields = {**layer_fields_for_target(target), "hidden_size": sizes["feature_size"]}
    text = target.config.get_text_config(decoder=True)
    return {**fields, "num_hidden_layers": text.num_hidden_layers, "model_type": "llama"}
