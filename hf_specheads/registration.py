"""Makes `AutoConfig` know draft heads from `import hf_specheads` on, without loading torch or transformers.

The classes of draft heads need torch, transformers and some of its models. Importing these takes seconds, which
`specheads --help`, or a program that may never meet draft heads, should not spend. So `AutoConfig` receives stand-ins
as soon as it is imported itself. The first configuration requested from a stand-in imports [`heads`], which registers
the real classes in their place, with `AutoModel` as well, and installs the hook in `generate` ([`dispatch`]).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

AUTO_CONFIG = "transformers.models.auto.configuration_auto"
# The `model_type` of every family; `heads.auto.HEADS` maps each of them to its class.
MODEL_TYPES = (
    "specheads_dflash",
    "specheads_dflash2",
    "specheads_domino",
    "specheads_draft_lm",
    "specheads_dspark",
    "specheads_eagle",
    "specheads_eagle3",
    "specheads_hydra",
    "specheads_lookup",
    "specheads_medusa",
    "specheads_mtp",
    "specheads_peagle",
    "specheads_poss",
    "specheads_poss_eagle3",
    "specheads_poss_lora",
)


def expect_heads() -> None:
    """Registers the stand-ins now, or as soon as `AutoConfig` is imported; harmless when repeated."""
    if AUTO_CONFIG in sys.modules:
        register_stand_ins(importlib.import_module(AUTO_CONFIG))  # `import_module` waits if a thread is importing it
    elif not any(isinstance(finder, _AfterAutoConfig) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterAutoConfig())


def register_stand_ins(module: ModuleType) -> None:
    """Registers a stand-in with `module.AutoConfig` for every family that is not registered yet."""
    for model_type in MODEL_TYPES:
        if model_type not in module.CONFIG_MAPPING:
            module.AutoConfig.register(model_type, _stand_in(model_type))


def _stand_in(model_type: str) -> type:
    def config_class() -> Any:
        from .heads.auto import HEADS  # this import registers the real classes

        return HEADS[model_type].config_class

    class StandIn:
        """Forwards what `AutoConfig` calls on a configuration class to the real class."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return config_class()(*args, **kwargs)

        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
            return config_class().from_dict(*args, **kwargs)

        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            return config_class().from_pretrained(*args, **kwargs)

    StandIn.model_type = model_type  # type: ignore[attr-defined]
    return StandIn


class _AfterAutoConfig(importlib.abc.MetaPathFinder):
    """Import hook for one module: loads it as usual, registers the stand-ins afterwards, and removes itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != AUTO_CONFIG:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register_stand_ins(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
