"""POSS heads whose specialists are LoRA adapters of one decoder layer (POSS: arXiv 2506.03566; LoRA: 2106.09685).

Specialist 0 is the base layer alone; every later specialist adds its own low-rank adapter to the layer's seven
projections. Specialist 0 needs no adapter, because the base layer is trained as well. All specialists share `fc` and
the norm. Everything else (drafting, draft caches, training) is as in POSS.
"""

# No postponed annotations in this file: `@strict` checks only types it sees as types, and ignores strings.

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from huggingface_hub.dataclasses import strict
from torch import nn

from ..errors import WarmStartError
from ..publishing.card.facts import Published
from .base import DraftHead
from .layers import DraftDecoderLayer
from .poss import POSS_PAPERS, PossHead, PossHeadConfig
from .specialists import SpecialistHead, SpecialistHeadConfig

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as LoraLinear

__all__ = ["PossLoraHead", "PossLoraHeadConfig"]

ADAPTED_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MAX_SPECIALISTS = 32  # a limit, because building the adapters one by one takes time
LORA_PAPER = "LoRA: Low-Rank Adaptation of Large Language Models, [arXiv:2106.09685](https://arxiv.org/abs/2106.09685)"


def adapter_of(specialist: int) -> str:
    """Name of a specialist's adapter, which is part of the names of its tensors in a checkpoint."""
    return f"specialist_{specialist}"


@strict
class PossLoraHeadConfig(PossHeadConfig):
    r"""Configuration of POSS heads with LoRA specialists: one decoder layer and L - 1 adapters of it.

    Args:
        specialist_rank: Rank r of every adapter.
        specialist_alpha: Scale of the adapters: an adapter adds `specialist_alpha / specialist_rank * B A x` to a
            projection of x. Defaults to twice the rank.
    """

    model_type = "specheads_poss_lora"
    required_fields: ClassVar[tuple[str, ...]] = (
        *PossHeadConfig.required_fields, "specialist_rank", "specialist_alpha",
    )  # fmt: skip

    method: str = "poss-lora"
    specialist_rank: int = 16
    specialist_alpha: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.specialist_alpha is None:
            self.specialist_alpha = 2 * self.specialist_rank
        super().__post_init__(**kwargs)

    def validate_specialists(self) -> None:
        super().validate_specialists()
        for name in ("specialist_rank", "specialist_alpha"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.num_specialists > MAX_SPECIALISTS:
            raise ValueError(f"`num_specialists` must be at most {MAX_SPECIALISTS}, got {self.num_specialists}.")
        if self.specialist_rank > self.hidden_size:
            raise ValueError(
                f"`specialist_rank` ({self.specialist_rank}) must not exceed `hidden_size` ({self.hidden_size}); "
                "full specialists (method 'poss') are smaller than adapters of that rank."
            )


class LoraDecoderLayer(DraftDecoderLayer):
    """A decoder layer that acts as a different specialist in every call.

    The specialist is an argument of the call, so that gradient checkpointing recomputes a pass as the same specialist.
    Switching only sets which adapter peft's layers add. peft's own `set_adapter` would also freeze the other adapters,
    which would drop their gradients from passes already run.
    """

    def __init__(self, config: PossLoraHeadConfig):
        from peft import LoraConfig, inject_adapter_in_model  # imported here, so that other heads do not need peft
        from peft.tuners.lora import LoraLayer

        super().__init__(config, layer_idx=0)
        for specialist in range(1, config.num_specialists):
            adapter = LoraConfig(
                r=config.specialist_rank,
                lora_alpha=config.specialist_alpha or 2 * config.specialist_rank,
                target_modules=list(ADAPTED_MODULES),
            )
            inject_adapter_in_model(adapter, self, adapter_name=adapter_of(specialist))
            del self.peft_config  # otherwise peft warns about several adapters, which are intended here
        self.requires_grad_(True)  # peft has frozen the base layer
        self._adapted = tuple(module for module in self.modules() if isinstance(module, LoraLayer))

    def forward(self, *args: Any, specialist: int = 0, **kwargs: Any) -> torch.Tensor:
        """Runs [`DraftDecoderLayer.forward`] as one of the specialists."""
        self.become(specialist)
        return super().forward(*args, **kwargs)

    def become(self, specialist: int) -> None:
        """Switches to a specialist: from now on, its adapter is added and its draft cache is written."""
        self.self_attn.layer_idx = specialist
        for module in self._adapted:
            module._active_adapter = [adapter_of(specialist)] if specialist else []


class PossLoraHead(PossHead):
    """One decoder layer and L - 1 adapters; specialist i is the layer with adapter i, specialist 0 the layer alone."""

    config_class = PossLoraHeadConfig
    config: PossLoraHeadConfig
    published: ClassVar[dict[str, Published]] = {
        "poss-lora": Published("POSS with LoRA specialists", (LORA_PAPER, *POSS_PAPERS))
    }
    _no_split_modules = ["LoraDecoderLayer"]

    def __init__(self, config: PossLoraHeadConfig):
        from peft.tuners.lora import LoraLayer

        super().__init__(config)
        # `post_init` has initialised adapters like other projections, but an untrained adapter must add nothing.
        for module in self.layers[0].modules():
            if isinstance(module, LoraLayer):
                for name in module.lora_A:
                    module.reset_lora_parameters(name, init_lora_weights=True)

    def build_layers(self, config: SpecialistHeadConfig) -> nn.ModuleList:
        return nn.ModuleList([LoraDecoderLayer(self.config)])

    @property
    def link_layers(self) -> None:
        """None, because one layer serves all specialists in turn."""
        return None

    def layer_of(self, specialist: int) -> Callable[..., torch.Tensor]:
        return partial(self.layers[0], specialist=specialist)

    # ------------------------------------------------------------------ from and to other heads
    @torch.no_grad()
    def specialist_state(self, specialist: int) -> dict[str, torch.Tensor]:
        """Weights of one specialist with its adapter merged in, by the names of a [`DraftDecoderLayer`]."""
        adapter, state = adapter_of(specialist), {}
        for name, parameter in self.layers[0].named_parameters():
            if ".lora_" in name:
                continue
            parent, _, leaf = name.rpartition(".base_layer.")
            if not parent:
                state[name] = parameter.detach().clone()
                continue
            module = cast("LoraLinear", self.layers[0].get_submodule(parent))
            added = leaf == "weight" and adapter in module.lora_A
            state[f"{parent}.{leaf}"] = parameter + module.get_delta_weight(adapter) if added else parameter.clone()
        return state

    def to_poss(self) -> PossHead:
        """Converts to POSS heads that draft the same, with every adapter merged into a full layer of its own."""
        left_out = ("specialist_rank", "specialist_alpha", "model_type", "architectures")
        fields = {name: value for name, value in self.config.to_dict().items() if name not in left_out}
        heads = PossHead(PossHeadConfig.from_dict({**fields, "method": PossHeadConfig.method}))
        heads.to(device=self.device, dtype=self.dtype).start_from(self)
        heads._chosen_tree = self._chosen_tree
        return heads.train(self.training)

    @classmethod
    def fields_of_source(cls, source: DraftHead) -> dict[str, Any]:
        fields = super().fields_of_source(source)
        if isinstance(source, PossLoraHead):
            adapters = ("specialist_rank", "specialist_alpha")
            return fields | {name: getattr(source.config, name) for name in adapters}
        if source.config.num_specialists > 1:
            raise WarmStartError(
                f"the {source.config.num_specialists} full specialists of these {source.config.method} heads do not "
                "fit into one layer with adapters; start from EAGLE or HASS heads."
            )
        return fields

    def layers_from(self, source: SpecialistHead) -> dict[str, torch.Tensor]:
        """Weights for our layer in a warm start, by our names. From EAGLE or HASS heads, it is their only layer, and
        every specialist then drafts alike. From heads of this family, it includes the adapters; specialists that the
        source lacks get its last adapter."""
        own = self.layers[0].state_dict()
        names = {name.replace(".base_layer.", "."): name for name in own if ".lora_" not in name}
        weights = {names.get(name, name): value for name, value in source.specialist_state(0).items()}
        weights |= {name: value for name, value in own.items() if ".lora_" in name}
        last = source.config.num_specialists - 1
        for specialist in range(1, self.config.num_specialists if last else 0):
            theirs = f".{adapter_of(min(specialist, last))}."
            for name, value in source.layers[0].state_dict().items():
                if theirs in name:
                    weights[name.replace(theirs, f".{adapter_of(specialist)}.")] = value
        return {f"layers.0.{name}": value for name, value in weights.items()}
