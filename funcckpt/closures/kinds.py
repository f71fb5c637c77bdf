"""The kinds of objects that refer to others: how each is read, and made anew."""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import nn

from .code import is_library, is_plain_python, slots_of

# Values that hold no tensor, told by their type alone.
ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, types.CodeType}
)


class Kind:
    """How an object refers to others: by which attributes, if these are always the same.

    `label` is an item of it, in messages.
    """

    def __init__(self, *parts: str, label: str = "") -> None:
        self.parts, self.label = parts, label


# And by its cells, under the names of the closure variables.
FUNCTION = Kind(
    *("__code__", "__globals__", "__name__", "__defaults__", "__kwdefaults__", "__dict__", "__qualname__"),
    *("__doc__", "__annotations__" if sys.version_info < (3, 14) else "__annotate__"),
    label="closure variable {!r}",
)
METHOD = Kind("__func__", "__self__")
BUILTIN = Kind("__self__", "__name__")  # a bound method of C
PARTIAL = Kind("func", "args", "keywords", "__dict__")
MEMBER = Kind("__func__")  # a staticmethod or classmethod
PROPERTY = Kind("fget", "fset", "fdel")
COMPILED = Kind("_orig_mod")  # a module that torch.compile has wrapped
TUPLE = Kind(label="item {!r}")  # or a named tuple, or a frozenset
LIST = Kind(label="item {!r}")  # or a deque, or a set
DICT = Kind(label="item {!r}")
CELL = Kind()
GLOBALS = Kind(label="global {!r}")  # of a module: those that code names
MODULE = Kind(label="attribute {!r}")  # of torch
OBJECT = Kind(label="attribute {!r}")
SLOTTED = Kind(label="attribute {!r}")  # an object or a module with slots
CLASS = Kind(label="attribute {!r}")  # or a module of Python
VARIABLE = Kind()  # a context variable

OBJECTS = frozenset({MODULE, OBJECT, SLOTTED})
MAPPINGS = frozenset({DICT, GLOBALS})
# What refers to others by its `__dict__` alone.
SPACES = frozenset({MODULE, OBJECT, CLASS})
# What does not change.
CONSTANT = frozenset({METHOD, BUILTIN, PARTIAL, MEMBER, PROPERTY, COMPILED, TUPLE})
# What no copy can stand for.
FIXED = frozenset({CLASS, VARIABLE})
PARTS = ("_parameters", "_buffers", "_modules")


@dataclass(slots=True)
class Node:
    """An object that was reached, and what it held then.

    `refers` has the ids of what it held. `names` are those that count, if not all do. `parent` and `key` say
    where it was found first. Once a tensor that the graph owns could be reached from it, `value` is None, and
    `like` is an empty container of its type, or a weak reference to the object.
    """

    kind: Kind
    cls: Any
    value: Any
    content: dict[Any, Any]
    refers: set[int]
    parent: int
    key: Any
    names: Any = None
    like: Any = None


class Hole(NamedTuple):
    """Stands for something that was let go, by its id. `ref` leads to a tensor while it lives."""

    number: int
    ref: Any = None


@functools.lru_cache(maxsize=4096)
def kind_of(cls: Any) -> Kind | None:
    """How instances of a class are followed, but for tensors and random streams."""
    if any([str(base.__module__).startswith("torch.distributed.") for base in cls.__mro__]):
        return None  # `fully_shard` exchanges the parameters of a module for the time of each run
    if cls in _BUILT_IN:
        return _BUILT_IN[cls]
    if cls.__name__ == "OptimizedModule":
        return COMPILED
    for base, kind in _WITH_SUBCLASSES.items():
        if issubclass(cls, base):
            return SLOTTED if kind is MODULE and slots_of(cls) else kind
    if issubclass(cls, dict) and not is_library(cls.__module__):
        return DICT
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return TUPLE
    if is_plain_python(cls):
        return SLOTTED if slots_of(cls) else OBJECT
    return None


_BUILT_IN: dict[type, Kind] = {
    **dict.fromkeys((list, deque, set), LIST),
    **dict.fromkeys((dict, OrderedDict, defaultdict), DICT),
    **dict.fromkeys((tuple, frozenset), TUPLE),
}
_WITH_SUBCLASSES: dict[type, Kind | None] = {
    types.FunctionType: FUNCTION,
    types.MethodType: METHOD,
    types.BuiltinFunctionType: BUILTIN,
    types.CellType: CELL,
    ContextVar: VARIABLE,
    functools.partial: PARTIAL,
    torch.jit.ScriptModule: None,
    nn.Module: MODULE,
    property: PROPERTY,
    **dict.fromkeys((staticmethod, classmethod), MEMBER),
    **dict.fromkeys((type, types.ModuleType), CLASS),
}


def read(kind: Kind, value: Any, names: Any = None) -> dict[Any, Any]:
    """What an object of a kind refers to; of those with names, under which names that count."""
    if kind in MAPPINGS or kind in SPACES or kind is SLOTTED:
        there = value if kind in MAPPINGS else getattr(value, "__dict__", {})
        if kind is SLOTTED:
            slots = [name for name in slots_of(value.__class__) if hasattr(value, name)]
            there = {**there, **{name: getattr(value, name) for name in slots}}
        some = there if names is None else sorted(names & there.keys())
        return dict(zip(some, map(there.__getitem__, some), strict=True))
    if kind is TUPLE or kind is LIST:
        return dict(enumerate(value))
    if kind is CELL:
        try:
            return {"cell_contents": value.cell_contents}
        except ValueError:  # not assigned yet
            return {}
    if kind is VARIABLE:
        return {"": value.get(None)}
    content = dict(zip(kind.parts, map(getattr, repeat(value), kind.parts), strict=False))
    if kind is FUNCTION:
        content.update(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
    return content


def emptied(value: Any) -> Any:
    """A container like another one, with its options and attributes, and nothing in it."""
    cls: Any = type(value)
    if cls in _BUILT_IN:
        new = value.copy()
        new.clear()
        return new
    new = cls.__new__(cls)
    new.__dict__.update(value.__dict__)
    return new
