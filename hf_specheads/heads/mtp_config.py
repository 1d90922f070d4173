"""What MTP heads are made of: their config, and the decoder layers of a target's class."""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

import inspect
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from ..cache.names import CACHE_NAME
from ..configuration import DraftHeadConfig
from ..target.identity import target_sizes
from .layers import layer_fields_for_target

MOST_LAYERS = 2
FILE_FIELDS = ("transformers_version", "architectures", "dtype", "_name_or_path", "use_cache", "quantization_config")


@strict
class MtpHeadConfig(DraftHeadConfig):
    r"""Configuration of MTP layers.

    Args:
        layer_config: Config of the model whose decoder layers they are: the target's text config, with `model_type`.
        num_mtp_layers: Layers, 1 or 2.
        native: The weights are those in the target's own checkpoint, `target["name"]`; they are read from there and
            not saved a second time. Training makes them the heads' own.
        trained_positions: Draft positions the training unrolled, `None` if unknown.
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
        if layer_problem(layer_config) is not None:  # a layer to train; of native ones the keys would not fit
            layer_config = llama_config_of(target)
        return {**fields, "layer_config": layer_config, "num_mtp_layers": min(layers_of(target.config), MOST_LAYERS)}

    def validate_architecture(self) -> None:
        super().validate_architecture()
        if not 1 <= self.num_mtp_layers <= MOST_LAYERS:
            raise ValueError(
                f"`num_mtp_layers` must be 1 or {MOST_LAYERS}, got {self.num_mtp_layers}; of a target with more, pass "
                f"num_mtp_layers={MOST_LAYERS} to use the first ones."
            )
        if self.hidden_size != self.feature_size:
            raise ValueError(
                f"drafted states go through the target's `lm_head`, so `hidden_size` ({self.hidden_size}) must equal "
                f"`feature_size` ({self.feature_size})."
            )

    def decoder_config(self) -> PreTrainedConfig:
        """Config of a model that has nothing but these layers, all of full attention.

        Raises:
            ValueError: for a `model_type` transformers has no language model for.
        """
        fields = dict(self.layer_config or {})
        try:
            config = AutoConfig.for_model(fields.pop("model_type", None), **fields)
        except (KeyError, ValueError, AttributeError, TypeError, ArithmeticError, StrictDataclassError) as error:
            raise ValueError(f"`layer_config` is no config of a model transformers knows: {error}") from error
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"`layer_config` has model_type={config.model_type!r}, which is no language model's.")
        config.num_hidden_layers = self.num_mtp_layers
        for name, value in (("layer_types", ["full_attention"]), ("mlp_layer_types", ["sparse"])):
            if getattr(config, name, None) is not None:
                setattr(config, name, value * self.num_mtp_layers)
        if hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = 0
        config.vocab_size, config.pad_token_id = 2, None  # embedding and `lm_head` are the target's
        return config


def layer_config_of(config: PreTrainedConfig) -> dict[str, Any]:
    """The text config of a target as JSON can hold it."""
    text = config.get_text_config(decoder=True)
    plain = {name: value for name, value in text.to_diff_dict().items() if name not in FILE_FIELDS}
    return {**plain, "model_type": text.model_type}


def layers_of(config: PreTrainedConfig) -> int:
    """MTP layers a target's config speaks of; 1 where it says nothing."""
    text = config.get_text_config(decoder=True)
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
    return next((count for name in names if isinstance(count := getattr(text, name, None), int) and count > 0), 1)


def layer_problem(layer_config: dict[str, Any]) -> str | None:
    """Why decoder layers of a config's class cannot serve by themselves, `None` if they can."""
    sizes = {"hidden_size": layer_config.get("hidden_size") or 1}
    try:
        config = MtpHeadConfig(**sizes, feature_size=sizes["hidden_size"], layer_config=layer_config).decoder_config()
        with torch.device("meta"):
            decoder = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).get_decoder()
        parameters = inspect.signature(decoder.layers[0].forward).parameters
        _ = decoder.norm, decoder.rotary_emb
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, AssertionError) as error:
        return str(error)
    missing = [name for name in ("position_embeddings", CACHE_NAME, "attention_mask") if name not in parameters]
    return f"its forward takes no {missing[0]}" if missing else None


def llama_config_of(target: PreTrainedModel) -> dict[str, Any]:
    """A Llama layer of a target's proportions, for fresh heads of targets whose own layers cannot stand alone."""
    sizes = target_sizes(target)
    fields = {**layer_fields_for_target(target), "hidden_size": sizes["feature_size"]}
    text = target.config.get_text_config(decoder=True)
    return {**fields, "num_hidden_layers": text.num_hidden_layers, "model_type": "llama"}
