"""Compiled steps that later processes find on disk, and need not compile again.

What a step costs whoever compiles it with all its kernels known already is the compiler's reading of the model: the
greater part of the first compiled call of a process. torch can write down what it has made of a function; whether that
may be used is ours to say ([`premises`]).
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

MOST_OF_ONE = 8  # variants of a step that live side by side, in a process and on disk
DEFAULTS = {"backend": "inductor", "fullgraph": True, "dynamic": False}
SINCE = "2.13"  # torch writes down what it has made of such functions, with guards that can be told
FOLDER = "specheads"  # within inductor's


@dataclasses.dataclass
class Code:
    """What the compiler has made of a step.

    Args:
        premises: Under which it does what the step does.
        modules: That it calls by names of its own.
        stamps: Of the files in which what the compiler read is defined, by module.
        written: As torch writes it down.
        function: That it is, with the arguments of the step; `None` until it has been read.
    """

    premises: Premises
    modules: dict[str, str]
    stamps: dict[str, tuple[int, int]]
    written: bytes
    function: Callable | None = None

    def fits(self, step: Callable, arguments: dict[str, Any]) -> bool:
        """Whether the premises hold; not those of modules that are gone."""
        try:
            named = self._named
        except ImportError:
            return False
        return self.premises.hold(arguments, {**step.__globals__, **named})

    def is_of_these_files(self) -> bool:
        """Whether what the compiler read has not changed since."""
        try:
            return all(_stamp(module) == stamp for module, stamp in self.stamps.items())
        except NotPortable:
            return False

    def read(self) -> Callable:
        """The function."""
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
    """The compiled steps of a pair.

    Args:
        options: Of `torch.compile`.

    Attributes:
        codes: In use, by step and shape.
    """

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self.codes: dict[tuple, list[Code]] = {}
        self._on_disk: dict[tuple, list[Code]] = {}
        self._refused: set[tuple] = set()

    def get(self, step: Callable, shape: tuple, args: tuple) -> Callable | None:
        """Code of a step for these arguments: the process's, from disk or compiled now.

        Args:
            step: A function of a module.
            shape: Whatever makes graphs differ.
            args: Of the step.

        Returns:
            `None` if what there is could not be kept.

        Raises:
            torch._dynamo.exc.FailOnRecompileLimitHit: It has been compiled too often.
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
                raise torch._dynamo.exc.FailOnRecompileLimitHit(f"{step.__name__} is another in every call")
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
        except Exception as error:  # of files that something else has written, or a C++ compiler that is gone
            logger.debug("%s cannot be read: %s", folder, error)
            return None
        return found


def keeps(options: dict[str, Any], device: torch.device) -> bool:
    """Whether steps compiled so can be kept: on a CPU, by inductor as it comes, unless it keeps nothing itself."""
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
    """Compiled and written; what cannot be kept is found out after it was compiled, so that is written as well."""
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
        with contextlib.suppress(OSError):  # other processes delete as well, and files may be others'
            old.unlink()
    return code


def _compiled(step: Callable, args: tuple, arguments: dict[str, Any], options: dict[str, Any]) -> Code:
    try:
        return _by_torch(step, args, arguments, options)
    except (torch._dynamo.exc.TorchDynamoException, ConstraintViolationError, torch.OutOfMemoryError, NotPortable):
        raise
    except Exception as error:  # what torch compiles and cannot write down, and places inside torch that may move
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
    made._artifacts.source_info = type(sources)(inlined_sources=set())  # whole modules, which nobody asks for
    return Code(premises, modules, stamps, type(made).serialize(made).serialized_data, made.fn)


def _module_called(name: str, step: Callable) -> str:
    value = step.__globals__.get(name)
    if not isinstance(value, ModuleType):
        raise NotPortable(f"{name}, a {type(value).__qualname__}")
    return value.__name__


# ---------------------------------------------------------------------- on disk
def _stamp(module: str) -> tuple[int, int]:
    """Of a module's file: time and size."""
    loaded = sys.modules.get(module)
    try:
        file = loaded.__file__ if loaded is not None else importlib.util.find_spec(module).origin  # type: ignore
        found = os.stat(file)  # type: ignore[arg-type]
    except (AttributeError, ImportError, TypeError, ValueError, OSError) as error:
        raise NotPortable(f"{module}, which has no file") from error
    return found.st_mtime_ns, found.st_size


def _folder(step: Callable, shape: tuple, args: tuple) -> Path:
    """Where a step's code lies. All that it depends on without the compiler's knowing makes the name."""
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
    """In an order of their own: sets have another in every process."""
    settings = config.save_config_portable()
    ordered = sorted(settings.items())
    return [(name, sorted(value) if isinstance(value, (set, frozenset)) else value) for name, value in ordered]


@functools.cache
def _engine() -> list[tuple]:
    """The code that makes code."""
    files = sorted(file for file in Path(__file__).parents[1].rglob("*") if file.suffix in (".py", ".c"))
    return [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]


def _all_in(folder: Path) -> list[Code]:
    """The newest first."""
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
    """As a whole or not at all."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "wb") as new:
            new.write(written)
        os.replace(name, file)
    except OSError as error:
        logger.debug("%s was not kept: %s", file, error)
