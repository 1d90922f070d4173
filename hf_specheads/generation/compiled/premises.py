"""The premises of compiled code: what it takes for granted, in a form that other processes can check.

torch's compiler records guards: what its code depends on among everything the compiler looked at. It keeps them as
addresses in this process, or not at all. Here they become questions about expressions, with the answers they had:
names where identity counted, and for functions also a hash of their code. A guard that cannot be expressed so is
refused ([`NotPortable`]).
"""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import hashlib
import inspect
import marshal
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, cast

import torch
from torch import nn
from torch._C._dynamo.guards import TensorGuards

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout)
_GROUPS = (tuple, list, torch.Size)
Question = tuple[str, int, Any]
_BUILTINS = re.compile(r"__builtins_dict___\d+")


class NotPortable(Exception):
    """Code depends on something that only this process knows; the message says on what."""


# ---------------------------------------------------------------------- portable descriptions of values
@functools.lru_cache(maxsize=4096)
def code_hash(code: types.CodeType) -> str:
    """Hash of what a function does, independent of its place in a file."""
    constants = [code_hash(one) if inspect.iscode(one) else repr(one) for one in code.co_consts]
    described = repr((code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
    return hashlib.sha256(described.encode()).hexdigest()[:24]


def _type_name(kind: type) -> str:
    """Name of a class. For modules it includes a hash of the forward's code, as somebody may have replaced that."""
    if issubclass(kind, nn.Module):
        return _module_name(kind, kind.forward)  # type: ignore[arg-type]
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.lru_cache(maxsize=4096)
def _module_name(kind: type, forward: Callable) -> str:
    return f"{kind.__module__}.{kind.__qualname__} {_function_name(inspect.unwrap(forward))}"


def _function_name(function: Any) -> str:
    code = getattr(function, "__code__", None)
    name = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', None)}"
    return name if code is None else f"{name} {code_hash(code)}"


def _type(value: Any, _: Any = None) -> str:
    return _type_name(type(value))


def _named(value: Any, _: Any = None) -> Any:
    """Portable name of a value whose identity the compiler checks."""
    if isinstance(value, type):
        return _type_name(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, types.CodeType):
        return code_hash(value)
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return _function_name(value)
    if isinstance(value, enum.Enum):
        return f"{_type(value)} {value.name}"
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(value)
    if isinstance(value, (types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType)):
        return f"{_type_name(value.__objclass__)} {value.__name__}"
    return _constant(value)


def _constant(value: Any, _: Any = None) -> Any:
    """A plain value together with its type, as 1, 1.0 and `True` are equal.

    Raises:
        NotPortable: The value is of another kind.
    """
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, _GROUPS):
        return type(value).__name__, tuple(map(_named, value))
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, frozenset(map(_named, value))
    if isinstance(value, (types.CodeType, enum.Enum, type, types.FunctionType)):
        return _named(value)
    raise NotPortable(f"a {type(value).__qualname__}")


def _tensor(value: torch.Tensor, any_size: tuple[int, ...]) -> tuple:
    """What a graph may depend on of a tensor, all but its numbers; dimensions in `any_size` may have any size."""
    sizes = tuple(None if place in any_size else size for place, size in enumerate(value.shape))
    return (
        _type_name(type(value)), value.dtype, value.device, value.layout, value.requires_grad, sizes,
        None if any_size else value.stride(), torch._C._dispatch_keys(value).raw_repr(),
    )  # fmt: skip


def _keys(value: Mapping, _: Any) -> list:
    return list(map(_named, value))


def _length(value: Any, _: Any) -> tuple[str, int]:
    return type(value).__name__, len(value)


def _lacks_own(value: Any, attr: str) -> bool:
    return attr not in getattr(value, "__dict__", ())


def _has(value: Any, attr: str) -> bool:
    return hasattr(value, attr)


def _contains(value: Any, key: Any) -> bool:
    return key in value


def _truth(value: Any, _: Any) -> bool:
    return bool(value)


# How each kind of guard, by the compiler's name for it, is answered for a value.
QUESTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "TYPE_MATCH": _type, "TENSOR_MATCH": _tensor, "CONSTANT_MATCH": _constant, "EQUALS_MATCH": _constant,
    "BOOL_MATCH": _constant, "NONE_MATCH": _constant, "ID_MATCH": _named, "CLOSURE_MATCH": _named,
    "FUNCTION_MATCH": _named, "BUILTIN_MATCH": _named, "CLASS_MATCH": _named, "MODULE_MATCH": _named,
    "SEQUENCE_LENGTH": _length, "EMPTY_NN_MODULE_HOOKS_DICT": _length, "DICT_KEYS_MATCH": _keys, "HASATTR": _has,
    "NOT_PRESENT_IN_GENERIC_DICT": _lacks_own, "DICT_CONTAINS": _contains, "DICT_NOT_CONTAINS": _contains,
    "SET_CONTAINS": _contains, "SET_NOT_CONTAINS": _contains, "SHAPE_ENV": _truth,
}  # fmt: skip
# Kinds of guards on the process as a whole. They are all checked together, by [`process_state`].
OF_THE_PROCESS = {
    "GLOBAL_STATE", "GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "TORCH_FUNCTION_STATE", "DEFAULT_DEVICE",
    "AUTOGRAD_SAVED_TENSORS_HOOKS", "FSDP_TRAINING_STATE", "GLOBAL_STATE_MATCH",
}  # fmt: skip


def process_state() -> tuple:
    """Settings of torch in this process that compiled code may depend on."""
    torch_functions = torch._C._len_torch_function_stack(), torch._C._is_torch_function_enabled()
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled(),
        torch.get_float32_matmul_precision(), torch.get_default_device(), torch_functions,
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
    )  # fmt: skip


# ---------------------------------------------------------------------- premises
@dataclass(frozen=True)
class Premises:
    """Premises of one piece of compiled code.

    Args:
        places: Marshalled code of a function that returns the values in question, from the arguments by name (`L`) and
            the global names of the compiled code (`G`).
        questions: What is asked about the values: kind of guard, index of the value, and a further operand or `None`.
        answers: Answers to the questions, in order.
        same: Pairs of indices of values that are the same object.
        state: State of the process, by [`process_state`].
    """

    places: bytes
    questions: tuple[Question, ...]
    answers: tuple
    same: tuple[tuple[int, int], ...]
    state: tuple

    def __reduce__(self) -> tuple:
        return Premises, (self.places, self.questions, self.answers, self.same, self.state)

    def hold(self, arguments: dict[str, Any], names: Mapping[str, Any]) -> bool:
        """Whether the premises hold.

        Args:
            arguments: Arguments of the step, by name.
            names: Global names that the compiled code uses, with their values.
        """
        if process_state() != self.state:
            return False
        try:
            values = self._values(arguments, _Names(names))
            if self._found is not None and self._found.again(values):
                return True
            holds = _answers(self.questions, values) == self.answers
            holds = holds and all(values[one] is values[other] for one, other in self.same)
        except Exception:  # something that the premises ask about no longer exists
            return False
        if holds:
            self.__dict__["_found"] = _Found(self.questions, self.same, values)
        return holds

    @property
    def name(self) -> str:
        """A name that equal premises share."""
        return hashlib.sha256(repr(self.__reduce__()[1:]).encode()).hexdigest()[:16]

    @functools.cached_property
    def _values(self) -> Callable[[dict, Mapping], list]:
        return _function(marshal.loads(self.places))

    @functools.cached_property
    def _found(self) -> _Found | None:
        return None


def premises_of(guards: Iterable[Any], arguments: dict[str, Any], names: Mapping[str, Any]) -> Premises:
    """Premises of code that has just been compiled.

    Args:
        guards: As `guard_filter_fn` gets them (torch's `GuardFilterEntry`).
        arguments: Arguments that the code was compiled with, by name.
        names: Global names that the code uses, with their values.

    Raises:
        NotPortable: A guard cannot be expressed for other processes.
    """
    asked, places = _asked(guards)
    code = _code_of(places)
    try:
        values = _function(code)(arguments, _Names(names))
    except Exception as error:
        raise NotPortable(f"{type(error).__name__}: {error}") from error
    questions = tuple((kind, place, _more(kind, more, values[place])) for kind, place, more in asked if kind != _SAME)
    same = tuple((place, more) for kind, place, more in asked if kind == _SAME)
    return Premises(marshal.dumps(code), questions, _answers(questions, values), same, process_state())


_SAME = "DUPLICATE_INPUT"


def _asked(guards: Iterable[Any]) -> tuple[Sequence[Question], Sequence[str]]:
    """The questions that the guards ask, each once, and the expressions ("places") they ask about."""
    places: dict[str, int] = {}
    asked: dict[Question, None] = {}

    def place(name: str) -> int:
        return places.setdefault(name, len(places))

    for guard in guards:
        kind, name, source = guard.guard_type, guard.orig_guard.name, guard.orig_guard.create_fn
        told = source.keywords if isinstance(source, functools.partial) else {}
        if kind in OF_THE_PROCESS:
            continue
        if kind == "SHAPE_ENV":
            asked |= {(kind, place(code), None): None for code in guard.orig_guard.code_list or ()}
        elif kind == _SAME:
            asked[kind, place(name), place(told["source_b"].name)] = None
        elif kind in QUESTIONS:
            asked[kind, place(name), told.get("attr", told.get("key"))] = None
        else:
            raise NotPortable(f"a guard {kind}")
    return list(asked), list(places)


def _more(kind: str, more: Any, value: Any) -> Any:
    if kind == "TENSOR_MATCH":
        return tuple(sorted(getattr(value, "_dynamo_dynamic_indices", ())))
    if QUESTIONS[kind] is _contains:
        _constant(more)
    return more


def _answers(questions: Iterable[Question], values: Sequence[Any]) -> tuple:
    return tuple(QUESTIONS[kind](values[place], more) for kind, place, more in questions)


def _code_of(places: Iterable[str]) -> types.CodeType:
    """Code of a function that evaluates expressions; parts that several have in common are evaluated once."""
    parts = _Parts()
    values = [parts.visit(ast.parse(place, mode="eval").body) for place in places]
    lines = [*parts.lines, ast.Return(ast.List(values, ast.Load()))]
    module = ast.parse("def places(L, G): pass")
    cast(ast.FunctionDef, module.body[0]).body = lines
    return next(one for one in compile(ast.fix_missing_locations(module), "<premises>", "exec").co_consts
                if inspect.iscode(one))  # fmt: skip


class _Parts(ast.NodeTransformer):
    """Gives every part of the expressions a variable, so that it is evaluated once."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.lines: list[ast.stmt] = []

    def visit(self, node: ast.AST) -> Any:
        """Returns the variable of a part, or the node itself if it gets none."""
        if isinstance(node, (ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)):
            return node
        self.generic_visit(node)
        if not isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
            return node
        if (part := ast.dump(node)) not in self.known:
            self.known[part] = f"part{len(self.known)}"
            self.lines.append(ast.Assign([ast.Name(self.known[part], ast.Store())], node))
        return ast.Name(self.known[part], ast.Load())


def _function(code: types.CodeType) -> Callable[[dict, Mapping], list]:
    """The function that evaluates the places, with the names that torch's own guards may use."""
    from torch._dynamo import guards

    return types.FunctionType(code, {**guards.SYMPY_INTERP, **guards._get_closure_vars()})


class _Names(dict):
    """Global names that compiled code uses. The compiler's name for the builtins differs between processes, so any
    such name is accepted."""

    def __missing__(self, name: str) -> Any:
        if _BUILTINS.fullmatch(name):
            return vars(builtins)
        raise KeyError(name)


# ---------------------------------------------------------------------- checking again, faster
class _Found:
    """Values with which premises held, for a faster check: if new values equal them, most questions need not be asked.

    Args:
        questions: As in [`Premises`].
        same: As in [`Premises`].
        values: The values that the questions are about.
    """

    def __init__(self, questions: Iterable[Question], same: Iterable[tuple[int, int]], values: list):
        groups: dict[Any, list[Question]] = {}
        for question in questions:
            groups.setdefault(_group(question), []).append(question)
        self._again = groups.get(None, [])
        self._answers = _answers(self._again, values)
        self._named, named = _taken(groups.get(_named), values)
        self._names = list(map(_code_or_self, named))
        self._constant, self._constants = _taken(groups.get(_constant), values)
        self._sized, sized = _taken(groups.get(_length), values)
        self._sizes = list(map(len, sized))
        self._typed = [*_places(groups.get(_type)), *self._sized, *self._constant]
        self._types = [type(values[place]) for place in self._typed]
        self._forwards = {kind: kind.forward for kind in self._types if issubclass(kind, nn.Module)}
        self._tensors, tensors = _taken(groups.get(_tensor), values)
        sizes: Any = [list(tensor.shape) for tensor in tensors]
        strides: Any = [list(tensor.stride()) for tensor in tensors]
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self._same = list(same)

    def again(self, values: list) -> bool:
        """Whether the premises hold for these values too; `False` if all questions must be asked to know."""
        return (
            all(map(is_, [_code_or_self(values[place]) for place in self._named], self._names))
            and [type(values[place]) for place in self._typed] == self._types
            and [values[place] for place in self._constant] == self._constants
            and [len(values[place]) for place in self._sized] == self._sizes
            and all(kind.forward is forward for kind, forward in self._forwards.items())
            and self._guards.check(*[values[place] for place in self._tensors])
            and _answers(self._again, values) == self._answers
            and all(values[one] is values[other] for one, other in self._same)
        )


def _group(question: Question) -> Any:
    kind, _, more = question
    asks = QUESTIONS[kind]
    return asks if asks in (_named, _constant, _length, _type) or (asks is _tensor and not more) else None


def _code_or_self(value: Any) -> Any:
    """The code of a function, because functions made anew in every call share it; any other value itself."""
    return value.__code__ if type(value) is types.FunctionType else value


def _places(questions: Iterable[Question] | None) -> list[int]:
    return list(dict.fromkeys(place for _, place, _ in questions or ()))


def _taken(questions: Iterable[Question] | None, values: list) -> tuple[list[int], list]:
    places = _places(questions)
    return places, [values[place] for place in places]
