"""What a function may name, and still reach no tensor but its arguments: the functions of torch, say.

The code of a function is read once: which attributes it takes of what it has, and which global names it looks
up. What those stand for is told again by identity in each call. Allowed are constants, builtins that compute,
operators of torch that compute something from their arguments and draw no random numbers, and functions of
torch written in Python that name nothing else themselves.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import operator
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import _torch
from .closure import WRITES_UNSEEN
from .lookup import GONE, assigned_by, is_of_library

# What leads out of a tensor, or into it unseen, and what draws random numbers.
_LEADS_OUT = frozenset(WRITES_UNSEEN) | frozenset(
    "grad grad_fn output_nr requires_grad requires_grad_ retain_grad".split()
)
_DRAWS = frozenset(
    "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_ random_ "
    "uniform_".split()
)
# What Tensor has in Python beside what is written in C, and nobody can change.
_IN_PYTHON = vars(Tensor)
_methods = (*_IN_PYTHON.values(),)
# What `copyreg` notes in a class when somebody copies one of its objects.
_NOTE = "__slotnames__"
_METHODS = [x for name, x in _IN_PYTHON.items() if name != _NOTE]
_FUNCTIONS = {name: f for name, f in _IN_PYTHON.items() if isinstance(f, types.FunctionType)}
_ARE_TORCHS = all(map(is_of_library, _FUNCTIONS.values()))
ATTRIBUTES = {
    name
    for kind in (Tensor, list, tuple, dict, int, float, str, slice)
    for name in dir(kind)
    if not name.startswith("_")
} - (_LEADS_OUT | _DRAWS | _FUNCTIONS.keys())

_CONSTANTS = frozenset(
    {
        *(int, float, complex, bool, str, bytes, type(None)),
        *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
    }
)
_IN_BUILTINS = vars(builtins)
_COMPUTE = (
    "abs all any bool complex dict divmod enumerate filter float int isinstance len list map max min pow "
    "range reversed round slice sorted sum tuple zip"
).split()
# What may be called, by its id: what computes, what is raised, what makes a constant of numbers, and what is
# nothing to tensors of no subclass.
_ALLOWED = {
    id(value): value
    for value in [
        *[_IN_BUILTINS[name] for name in _COMPUTE],
        *[x for x in _IN_BUILTINS.values() if isinstance(x, type) and issubclass(x, BaseException)],
        *[x for x in vars(math).values() if isinstance(x, types.BuiltinFunctionType)],
        *(torch.tensor, warnings.warn, *_torch.FOR_SUBCLASSES),
    ]
}
# Modules through which code may go to what is allowed in them.
_MODULES = frozenset(
    {
        *(torch, torch.nn, functional, torch.special, torch.linalg, torch.fft, torch.functional, torch.jit),
        *(math, warnings, *_torch.NAMESPACES, *_torch.PASSAGES),
    }
)
# What arguments of operators are called that may draw random numbers, read files, or update statistics, which
# no version tells.
_ARGUMENTS = frozenset(
    "dropout dropout_p filename generator running_max running_mean running_min running_var train "
    "training".split()
)
# Flags that functions of torch look up, in modules that compute them.
_FLAGS = frozenset({("torch", "backends", "cudnn", "enabled")})

Path = tuple[str, ...]
# A function, what to ask it for, and the answer that is to be the same again.
_Read = tuple[Callable[[Any], Any], Any, Any]


class _NotAllowed(Exception):
    """A name leads to something else."""


def methods_are_torchs() -> bool:
    """Whether the methods of tensors are those that torch has brought."""
    global _methods
    now = (*_IN_PYTHON.values(),)
    if now == _methods:
        return True
    if [x for name, x in _IN_PYTHON.items() if name != _NOTE] != _METHODS:
        return False
    _methods = now
    return True


class Found:
    """What global names stood for at one time, and what else has to be as it was then."""

    def __init__(self, names: Sequence[str], values: list[Any], reads: Sequence[_Read]) -> None:
        self._names, self._values = names, values
        self._questions = [(ask, what) for ask, what, _ in reads]
        self._answers = [answer for *_, answer in reads]

    def is_in(self, content: dict[str, Any]) -> bool:
        """Whether the names stand for the same among some globals."""
        return all(map(operator.is_, map(content.get, self._names, repeat(GONE)), self._values))

    def holds(self) -> bool:
        """Whether all else is as it was."""
        return all(map(operator.is_, [ask(what) for ask, what in self._questions], self._answers))

    def changed(self) -> str:
        """The first that is not, in words."""
        pairs = zip(self._questions, self._answers, strict=True)
        whats: Iterator[Any] = (what for (ask, what), answer in pairs if ask(what) is not answer)
        first = next(whats)
        return str(getattr(first, "__name__", first))

    def as_globals(self) -> dict[str, Any]:
        values = zip(self._names, self._values, strict=True)
        return {name: value for name, value in values if value is not GONE}


# What code finds that names nothing.
NOTHING = Found((), [], ())


class Names:
    """The global names of some code, and what they stood for when they were looked at last."""

    def __init__(self, code: types.CodeType, paths: frozenset[Path]) -> None:
        self.code = code
        self._paths = paths
        self._names = tuple(dict.fromkeys([path[0] for path in paths]))
        self._found: Found | None = None

    def find(self, function: types.FunctionType) -> Found | None:
        """What they stand for in a function that has the code; None if that is not allowed."""
        if not self._names:
            return NOTHING
        found, content = self._found, function.__globals__
        if found is None or not (found.is_in(content) and found.holds()):
            values = [content.get(name, GONE) for name in self._names]
            try:
                found = Found(self._names, values, [*_reads(self._paths, content, set())])
            except _NotAllowed:
                return None
            self._found = found
        return found if function.__builtins__ is _IN_BUILTINS else None  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=4096)
def names_if_closed(code: types.CodeType) -> Names | None:
    """The global names of code that has no other way out of itself but to read variables around it."""
    paths = _paths(code) if _ARE_TORCHS and not assigned_by(code) else None
    return None if paths is None else Names(code, paths)


@functools.lru_cache(maxsize=4096)
def _paths(code: types.CodeType) -> frozenset[Path] | None:
    """The global names that code loads, each with the attributes that are taken of it at once.

    None if the code, or that of a function within it, takes other attributes than `ATTRIBUTES` of something
    else, assigns attributes or global variables, or imports.
    """
    paths: list[Path] = []
    is_path = False
    for instruction in dis.get_instructions(code):
        name, operation = instruction.argval, instruction.opname
        if operation == "LOAD_GLOBAL":
            paths.append((name,))
            is_path = True
        elif operation in ("LOAD_ATTR", "LOAD_METHOD") and is_path:
            paths[-1] += (name,)
        elif operation != "EXTENDED_ARG":
            is_path = False
            is_attribute = operation in ("LOAD_ATTR", "LOAD_METHOD") and name in ATTRIBUTES
            if not is_attribute and (instruction.opcode in dis.hasname or operation == "MATCH_CLASS"):
                return None
    inner = [_paths(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return None if None in inner else frozenset(paths).union(*inner)  # type: ignore[arg-type]


def _reads(paths: Iterable[Path], content: dict[str, Any], seen: set[Any]) -> Iterator[_Read]:
    """What tells that all that is found by paths is allowed, beside the globals where they begin."""
    for name, *attributes in paths:
        value = content.get(name, GONE)
        if value is GONE:
            value = _IN_BUILTINS.get(name, GONE)
            yield _IN_BUILTINS.get, name, value
        while attributes and type(value) is types.ModuleType and value in _MODULES:
            module, name = value, attributes.pop(0)
            value = vars(module).get(name, GONE)
            if module not in seen:
                seen.add(module)
                yield type, module, types.ModuleType
            yield vars(module).get, name, value
        if not ATTRIBUTES.issuperset(attributes):
            raise _NotAllowed
        if is_constant(value):
            continue
        if type(value) is not types.FunctionType or not is_of_library(value):
            raise _NotAllowed
        if value not in seen:
            seen.add(value)
            yield from _reads_of_function(value, seen)


def _reads_of_function(function: types.FunctionType, seen: set[Any]) -> Iterator[_Read]:
    """The same of a function of torch that is written in Python, which holds nothing but constants."""
    paths = None if function.__closure__ else _paths(function.__code__)
    constants = _CONSTANTS.issuperset(map(type, function.__defaults__ or ()))
    if paths is None or not constants or function.__kwdefaults__ or function.__dict__:
        raise _NotAllowed
    yield from [(get, function, get(function)) for get in _DETAILS]
    content = function.__globals__
    yield from [(content.get, name, content.get(name)) for name in {path[0] for path in paths}]
    yield from _reads(paths - _FLAGS, content, seen)


# What may be assigned of a function; the last one tells whether it has attributes.
_DETAILS: Sequence[Callable[[types.FunctionType], Any]] = (
    operator.attrgetter("__code__"),
    operator.attrgetter("__defaults__"),
    operator.attrgetter("__kwdefaults__"),
    lambda function: bool(function.__dict__),
)


def is_constant(value: Any) -> bool:
    """Whether a value is one that nobody can change, and that leads to no tensor."""
    return id(value) in _ALLOWED or type(value) in _CONSTANTS or _is_operator(value)


def _is_operator(value: Any) -> bool:
    """Whether a value is a function of torch, written in C, that computes something from its arguments."""
    if type(value) is not types.BuiltinFunctionType:
        return False
    name, module = value.__name__, value.__self__
    is_torchs = module in _torch.NAMESPACES if module else getattr(_torch.FUNCTIONS, name, None) is value
    return is_torchs and _computes(name)


@functools.cache
def _computes(name: str) -> bool:
    """Whether an operator draws no random numbers, reads no file, and writes only if its name says so."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name.startswith("_") or name in _LEADS_OUT | _DRAWS:
        return False
    for overload in [getattr(packet, overload) for overload in packet.overloads()]:
        arguments = overload._schema.arguments
        if torch.Tag.nondeterministic_seeded in overload.tags:
            return False
        if any([a.name in _ARGUMENTS for a in arguments]):
            return False
        writes = any([a.alias_info is not None and a.alias_info.is_write for a in arguments if not a.is_out])
        if writes and not name.endswith("_"):
            return False
    return True
