"""Keeps compiled steps on disk, so that later processes need not compile them again.

Even if all kernels of a step are cached already, the compiler has to read the model, which takes most of the first
compiled call of a process. torch can serialise what it has compiled from a function. Whether the result may be used is
decided here, by its [`premises`].
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from transformers.utils import logging
from transformers.utils.import_utils import is_torch_greater_or_equal

from .guards import GUARD_HOOKS, quick_compiler
from .premises import NotPortable, Premises, premises_of

logger = logging.get_logger(__name__)

MOST_OF_ONE = 8  # most variants of one step and shape, in a process and on disk
DEFAULTS = {"backend": "inductor", "fullgraph": True, "dynamic": False}
SINCE = "2.13"  # first torch version that can serialise such functions and exposes their guards
FOLDER = "specheads"  # subfolder of inductor's cache folder


@dataclasses.dataclass
class Code:
    """Compiled code of a step.

    Args:
        premises: Conditions under which the code does what the step does.
        modules: Modules that the code uses under names of its own: module names by these names.
        stamps: Time and size, by module, of the source files that the compiler read, torch's own excepted.
        written: The code as torch serialises it; emptied once it has been read.
        function: The code as a function with the arguments of the step; `None` until it has been read.
    """

    premises: Premises
    modules: dict[str, str]
    stamps: dict[str, tuple[int, int]]
    written: bytes
    function: Callable | None = None

    def fits(self, step: Callable, arguments: dict[str, Any]) -> bool:
        """Whether the premises hold; `False` if a module that the code uses no longer exists."""
        try:
            named = self._named
        except ImportError:
            return False
        return self.premises.hold(arguments, {**step.__globals__, **named})

    def is_of_these_files(self) -> bool:
        """Whether the source files that the compiler read are unchanged."""
        try:
            return all(_stamp(module) == stamp for module, stamp in self.stamps.items())
        except NotPortable:
            return False

    def read(self) -> Callable:
        """The function, deserialised at first use."""
        if self.function is None:
            from torch._dynamo.aot_compile import AOTCompiledFunction

            with quick_compiler():
                self.function = AOTCompiledFunction.deserialize(self.written, dict(self._named)).fn
            self.written = b""
        return self.function

    @functools.cached_property
    def _named(self) -> dict[str, ModuleType]:
        return {name: importlib.import_module(module) for name, module in self.modules.items()}


class KeptSteps:
    """The compiled steps of a pair that other processes can use as well.

    Args:
        options: Options of `torch.compile`.

    Attributes:
        codes: Code in use in this process, by step and shape.
    """

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self.codes: dict[tuple, list[Code]] = {}
        self._on_disk: dict[tuple, list[Code]] = {}
        self._refused: set[tuple] = set()

    def get(self, step: Callable, shape: tuple, args: tuple) -> Callable | None:
        """Code of a step for these arguments: in use already, from disk, or compiled now.

        Args:
            step: A function defined at module level.
            shape: Everything that makes graphs of the step differ.
            args: Arguments of the step.

        Returns:
            The code; `None` if the step cannot be kept.

        Raises:
            torch._dynamo.exc.FailOnRecompileLimitHit: The step has been compiled too often.
        """
        key, arguments = (step, shape), _signature(step).bind(*args).arguments
        if key in self._refused:
            return None
        try:
            return self._get(key, arguments, args)
        except NotPortable as reason:
            logger.debug("%s is compiled in every process: it depends on %s", step.__name__, reason)
            self._refused.add(key)
            return None

    def _get(self, key: tuple, arguments: dict[str, Any], args: tuple) -> Callable:
        step, shape = key
        codes = self.codes.setdefault(key, [])
        if (found := _fitting(codes, step, arguments)) is not None:
            return found.read()
        folder = _folder(step, shape, args)
        if (found := self._from_disk(key, folder, arguments)) is None:
            if len(codes) >= MOST_OF_ONE:
                raise torch._dynamo.exc.FailOnRecompileLimitHit(f"{step.__name__} differs in every call")
            found = _made(folder, step, args, arguments, self.options)
        codes.append(found)
        return found.read()

    def _from_disk(self, key: tuple, folder: Path, arguments: dict[str, Any]) -> Code | None:
        if key not in self._on_disk:
            self._on_disk[key] = _all_in(folder)
        if (found := _fitting(self._on_disk[key], key[0], arguments)) is None:
            return None
        self._on_disk[key].remove(found)
        try:
            found.read()
        except Exception as error:  # the file may be damaged or foreign, or the C++ compiler may be gone
            logger.debug("%s cannot be read: %s", folder, error)
            return None
        return found


def keeps(options: dict[str, Any], device: torch.device) -> bool:
    """Whether steps compiled with these options can be kept: only on a CPU, by inductor with default options, and if
    inductor's own caches are on."""
    if options != DEFAULTS or device.type != "cpu" or not is_torch_greater_or_equal(SINCE):
        return False
    settings = torch._inductor.config
    return bool(settings.fx_graph_cache) and not settings.force_disable_caches


@functools.cache
def _signature(step: Callable) -> inspect.Signature:
    return inspect.signature(step)


def _fitting(codes: Iterable[Code], step: Callable, arguments: dict[str, Any]) -> Code | None:
    return next((code for code in codes if code.fits(step, arguments)), None)


# ---------------------------------------------------------------------- compiling
def _made(folder: Path, step: Callable, args: tuple, arguments: dict[str, Any], options: dict[str, Any]) -> Code:
    """Compiles a step and writes it to disk. Whether it can be kept is known only after compilation, so a refusal is
    written to disk as well, and spares later processes the attempt."""
    refused = Path(f"{folder}.refused")
    if refused.exists():
        raise NotPortable(refused.read_text(encoding="utf-8"))
    try:
        code = _compiled(step, args, arguments, options)
    except NotPortable as reason:
        _write(refused, str(reason).encode())
        raise
    _write(folder / code.premises.name, pickle.dumps(dataclasses.replace(code, function=None)))
    code.written = b""
    for old in _files(folder)[MOST_OF_ONE:]:
        with contextlib.suppress(OSError):  # other processes delete too, and files may belong to other users
            old.unlink()
    return code


def _compiled(step: Callable, args: tuple, arguments: dict[str, Any], options: dict[str, Any]) -> Code:
    try:
        return _by_torch(step, args, arguments, options)
    except (torch._dynamo.exc.TorchDynamoException, ConstraintViolationError, torch.OutOfMemoryError, NotPortable):
        raise
    except Exception as error:  # torch may fail to serialise what it compiled, or its internals may have moved
        raise NotPortable(f"{type(error).__name__}: {error}") from error


def _by_torch(step: Callable, args: tuple, arguments: dict[str, Any], options: dict[str, Any]) -> Code:
    guards: list[Any] = []

    def note(all_of_them: Sequence[Any]) -> list[bool]:
        guards[:] = all_of_them
        return [False] * len(guards)

    compiled: Any = torch.compile(step, **options, options={"guard_filter_fn": note})
    with torch._dynamo.config.patch(GUARD_HOOKS), quick_compiler():
        made = compiled.aot_compile((args, {}))
    runs, sources = made._artifacts.runtime_env, made.source_info()
    modules = dict(runs.import_sources)
    for name in runs.external_refs - {*modules, *runs.used_globals, made._artifacts.backend_id}:
        modules[name] = _module_called(name, step)
    premises = premises_of(guards, arguments, {**step.__globals__, **made.fn.__globals__})
    read = {source.module for source in sources.inlined_sources}
    stamps = {module: _stamp(module) for module in sorted(read) if module.partition(".")[0] != "torch"}
    made._artifacts.source_info = type(sources)(inlined_sources=set())  # texts of whole modules, which nobody needs
    return Code(premises, modules, stamps, type(made).serialize(made).serialized_data, made.fn)


def _module_called(name: str, step: Callable) -> str:
    value = step.__globals__.get(name)
    if not isinstance(value, ModuleType):
        raise NotPortable(f"{name}, a {type(value).__qualname__}")
    return value.__name__


# ---------------------------------------------------------------------- on disk
def _stamp(module: str) -> tuple[int, int]:
    """Time and size of a module's file."""
    loaded = sys.modules.get(module)
    try:
        file = loaded.__file__ if loaded is not None else importlib.util.find_spec(module).origin  # type: ignore
        found = os.stat(file)  # type: ignore[arg-type]
    except (AttributeError, ImportError, TypeError, ValueError, OSError) as error:
        raise NotPortable(f"{module}, which has no file") from error
    return found.st_mtime_ns, found.st_size


def _folder(step: Callable, shape: tuple, args: tuple) -> Path:
    """Folder of a step's code. Its name is a hash of everything the code depends on that no guard covers."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    settings = [_settings(config) for config in (torch._inductor.config, torch._dynamo.config)]
    described = repr((
        step.__name__, shape, list(map(_kind, args)), torch.__version__, transformers.__version__, sys.version,
        torch.backends.cpu.get_cpu_capability(), settings, _engine(),
    ))  # fmt: skip
    if (address := re.search(r"\S+ (?:object )?at 0x", described)) is not None:
        raise NotPortable(address[0])
    return Path(cache_dir(), FOLDER, hashlib.sha256(described.encode()).hexdigest()[:32])


def _kind(arg: Any) -> tuple[str, str]:
    config = getattr(arg, "config", None)
    described = config.to_json_string() if isinstance(config, transformers.PreTrainedConfig) else ""
    return f"{type(arg).__module__}.{type(arg).__qualname__}", described


def _settings(config: Any) -> list[tuple[str, Any]]:
    """Settings of a torch config in a fixed order, as the order of sets differs between processes."""
    settings = config.save_config_portable()
    ordered = sorted(settings.items())
    return [(name, sorted(value) if isinstance(value, (set, frozenset)) else value) for name, value in ordered]


@functools.cache
def _engine() -> list[tuple]:
    """Path, time and size of every source file of the engine, which decides what is compiled and how."""
    files = sorted(file for file in Path(__file__).parents[1].rglob("*") if file.suffix in (".py", ".c"))
    return [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]


def _all_in(folder: Path) -> list[Code]:
    """All valid code in a folder, newest first."""
    codes = []
    for file in _files(folder)[:MOST_OF_ONE]:
        try:
            code = pickle.loads(file.read_bytes())
        except Exception as error:
            logger.debug("%s cannot be read: %s", file, error)
            continue
        if isinstance(code, Code) and code.is_of_these_files():
            codes.append(code)
    return codes


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda file: -file.stat().st_mtime_ns)
    except OSError:
        return []


def _write(file: Path, written: bytes) -> None:
    """Writes a file atomically; failure is only logged."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "wb") as new:
            new.write(written)
        os.replace(name, file)
    except OSError as error:
        logger.debug("%s was not kept: %s", file, error)
