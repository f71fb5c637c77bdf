"""The kinds of objects that refer to others: how each is read, and made anew."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from .code import is_library, is_plain_python, slots_of

# Values that hold no tensor, told by their type alone.
ATOMS = frozenset(
    {
        *(int, float, complex, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented)),
        *(slice, range, torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
        *(types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType),
        *(types.CodeType, types.MemberDescriptorType, weakref.ref),
    }
)


class Kind(Enum):
    """How an object refers to others. The value says whether it can be told to refer to something else."""

    FUNCTION = "a Python function: cells, defaults, globals, attributes"
    CELL = "the cell of a closure variable"
    GLOBALS = "the globals of a module, of which those count that code names"
    METHOD = "a bound method"
    BUILTIN = "a bound method of C"
    PARTIAL = "a partial function"
    MEMBER = "a staticmethod, classmethod or property"
    TUPLE = "a tuple, named tuple or frozenset"
    LIST = "a list, deque or set"
    DICT = "a dict"
    MODULE = "a module of torch"
    OBJECT = "an object with attributes"
    SLOTTED = "an object with slots"
    CLASS = "a class or a module of Python: no copy can stand for it"
    VARIABLE = "a context variable"
    COMPILED = "a module that torch.compile has wrapped"

    __hash__ = object.__hash__  # Enum's own is a call in Python


@dataclass(slots=True)
class Node:
    """An object that was reached, and what it held then.

    `refers` has the ids of what it held. `names` are those that count, if not all do. `parent` and `key` say
    where it was found first. Once a tensor that the graph owns could be reached from it, `value` is None, and
    `like` is what is needed to make another one.
    """

    kind: Kind
    value: Any
    content: dict[Any, Any]
    refers: set[int]
    parent: int
    key: Any
    names: Any = None
    like: Any = None


class Hole(weakref.ref[Tensor]):
    """Stands for a tensor that the graph owns: says its id, and whether it is still in its place."""

    __slots__ = ("number",)

    number: int


class Key(int):
    """Stands for an object that was let go: its id."""

    __slots__ = ()


PARTS = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}
_LISTS = (list, deque, set)
_DICTS = (dict, OrderedDict, defaultdict)
_MEMBERS = (staticmethod, classmethod, property)
# How a function refers to what is no closure variable.
DEFAULTS, KWDEFAULTS, ATTRIBUTES, GLOBALS = "*defaults", "*kwdefaults", "*attributes", "*globals"


@functools.lru_cache(maxsize=4096)
def kind_of(kind: Any) -> Kind | None:
    """How instances of a class are followed, but for functions, tensors and random streams."""
    if any(str(base.__module__).startswith("torch.distributed.") for base in kind.__mro__):
        return None  # `fully_shard` exchanges the parameters of a module for the time of each run
    if issubclass(kind, (types.MethodType, types.BuiltinFunctionType)):
        return Kind.METHOD if kind is types.MethodType else Kind.BUILTIN
    if issubclass(kind, functools.partial):
        return Kind.PARTIAL
    if issubclass(kind, nn.Module):
        if issubclass(kind, torch.jit.ScriptModule):
            return None
        return Kind.COMPILED if kind.__name__ == "OptimizedModule" else Kind.MODULE
    if kind in _DICTS or (issubclass(kind, dict) and not is_library(kind.__module__)):
        return Kind.DICT
    if kind in _LISTS:
        return Kind.LIST
    if issubclass(kind, tuple) or kind is frozenset:
        return Kind.TUPLE if kind in (tuple, frozenset) or hasattr(kind, "_fields") else None
    if kind is types.CellType:
        return Kind.CELL
    if issubclass(kind, _MEMBERS):
        return Kind.MEMBER
    if issubclass(kind, type | types.ModuleType):
        return Kind.CLASS
    if kind is ContextVar:
        return Kind.VARIABLE
    if is_plain_python(kind):
        return Kind.SLOTTED if slots_of(kind) else Kind.OBJECT
    return None


OBJECTS = frozenset({Kind.MODULE, Kind.OBJECT, Kind.SLOTTED})
# What refers to others by its `__dict__` alone.
SPACES = frozenset({Kind.MODULE, Kind.OBJECT, Kind.CLASS})


def read(kind: Kind, value: Any, names: Any = None) -> dict[Any, Any]:
    """What an object of a kind refers to; of those with names, under which names that count."""
    if kind is Kind.GLOBALS:
        there = names & value.keys()
        return dict(zip(there, map(value.__getitem__, there), strict=True))
    if kind is Kind.DICT or kind in SPACES:
        there = value if kind is Kind.DICT else value.__dict__
        return dict(there) if names is None else dict(compress(there.items(), map(names.__contains__, there)))
    if kind is Kind.SLOTTED:
        content = {name: getattr(value, name) for name in slots_of(value.__class__) if hasattr(value, name)}
        content.update(getattr(value, "__dict__", ()))
        return content if names is None else {name: x for name, x in content.items() if name in names}
    if kind is Kind.FUNCTION:
        content = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        content[DEFAULTS], content[KWDEFAULTS] = value.__defaults__, value.__kwdefaults__
        content[ATTRIBUTES] = value.__dict__ or None
        return content
    if kind is Kind.TUPLE or kind is Kind.LIST:
        return dict(enumerate(value))
    if kind is Kind.CELL:
        try:
            return {"": value.cell_contents}
        except ValueError:  # not assigned yet
            return {}
    if kind is Kind.METHOD:
        return {"function": value.__func__, "self": value.__self__}
    if kind is Kind.BUILTIN:
        of = value.__self__
        return {} if of is None or isinstance(of, types.ModuleType | type) else {"self": of}
    if kind is Kind.PARTIAL:
        content = {"function": value.func, "args": value.args, "keywords": value.keywords}
        return {**content, "attributes": value.__dict__}
    if kind is Kind.VARIABLE:
        return {"": value.get(None)}
    if kind is Kind.COMPILED:
        return {"": value._orig_mod}
    return {"": value.fget if isinstance(value, property) else value.__func__}


def emptied(value: Any) -> Any:
    """A container like another one, with its options and attributes, and nothing in it."""
    kind: Any = type(value)
    if kind in _DICTS or kind in _LISTS:
        new = value.copy()
        new.clear()
        return new
    new = kind.__new__(kind)
    new.__dict__.update(value.__dict__)
    return new


def new_function(
    like: types.FunctionType, namespace: dict[str, Any], cells: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    """A function with the code of another one, around other variables."""
    new = types.FunctionType(like.__code__, namespace, like.__name__, None, cells)
    new.__qualname__, new.__module__, new.__doc__ = like.__qualname__, like.__module__, like.__doc__
    if sys.version_info < (3, 14):
        new.__annotations__ = like.__annotations__
    else:  # not computed before they are read
        new.__annotate__ = like.__annotate__
    return new


def label(node: Node, key: Any) -> str:
    kind = node.kind
    if kind is Kind.GLOBALS:
        return f"global {key!r}"
    if kind is Kind.FUNCTION:
        if key in (DEFAULTS, KWDEFAULTS):
            return "a default argument"
        return "" if key in (ATTRIBUTES, GLOBALS) else f"closure variable {key!r}"
    if kind in OBJECTS:
        return "" if key in PARTS or key == "__class__" else f"attribute {key!r}"
    if kind is Kind.CLASS:
        return "" if key == "__class__" else f"attribute {key!r} of {node.value.__name__}"
    if kind is Kind.DICT and node.key in PARTS:
        return f"{PARTS[node.key]} {key!r}"
    return f"item {key!r}" if kind in (Kind.DICT, Kind.LIST, Kind.TUPLE) else ""
