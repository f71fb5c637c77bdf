"""The kinds of objects that refer to others, and how each is read."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from .._torch.objects import is_of_dynamo
from .code import is_installed, is_library, is_plain_python, names_for, slots_of

# Types whose values hold no tensor.
ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, types.CodeType}
    | {torch.SymInt, torch.SymFloat, torch.SymBool}  # sizes that are no numbers, in a trace
)


class Kind:
    """How an object refers to others. `parts` are its attributes, if they are always the same.

    `label` names one of its items in messages.
    """

    def __init__(self, *parts: str, label: str = "") -> None:
        self.parts, self.label = parts, label


# Also its cells, under the names of the closure variables.
FUNCTION = Kind(
    *("__code__", "__globals__", "__name__", "__defaults__", "__kwdefaults__", "__dict__", "__qualname__"),
    *("__doc__", "__module__", "__annotations__" if sys.version_info < (3, 14) else "__annotate__"),
    label="closure variable {!r}",
)
METHOD = Kind("__func__", "__self__")
BUILTIN = Kind("__self__", "__name__")  # a bound method that is written in C
PARTIAL = Kind("func", "args", "keywords", "__dict__")
MEMBER = Kind("__func__")  # a staticmethod or classmethod
PROXY = Kind("mapping")
PROPERTY = Kind("fget", "fset", "fdel", "__doc__")
TUPLE = Kind(label="item {!r}")  # or a named tuple, or a frozenset
LIST = Kind(label="item {!r}")  # or a deque, or a set
DICT = Kind(label="item {!r}")
RECORD = Kind(label="item {!r}")  # a dict that may have attributes, too: they are its item `__dict__`
CELL = Kind()
GLOBALS = Kind(label="global {!r}")  # of a module: those that code names
NAMESPACE = Kind(label="global {!r}")  # the same, of a module that f reaches, too, or of compiled code
MODULE = Kind(label="attribute {!r}")  # of torch
OBJECT = Kind(label="attribute {!r}")
SLOTTED = Kind(label="attribute {!r}")  # an object or a module with slots
CLASS = Kind(label="attribute {!r}")  # or a module of Python
VARIABLE = Kind()  # a context variable
LOCAL = Kind(label="attribute {!r}")  # a threading.local, as this thread sees it
TENSOR = Kind()

OBJECTS = frozenset({MODULE, OBJECT, SLOTTED, LOCAL})
OWNERS = frozenset({MODULE, OBJECT})  # of a `__dict__` that is a dict of their own
MAPPINGS = frozenset({DICT, GLOBALS, NAMESPACE})
KEYED = frozenset({DICT, RECORD})  # Their keys may be modules.
# Kinds that refer to others only by their `__dict__`.
SPACES = frozenset({MODULE, OBJECT, CLASS, LOCAL})
# Kinds that do not change.
CONSTANT = frozenset({METHOD, BUILTIN, PARTIAL, MEMBER, PROXY, PROPERTY, TUPLE})
# Kinds that no copy can replace.
FIXED = frozenset({CLASS, VARIABLE, LOCAL, NAMESPACE})
PARTS = ("_parameters", "_buffers", "_modules")


@dataclass(slots=True, eq=False)
class Node:
    """An object that was found, and its content at the call.

    `names` are the names that count; None if all do. `parent` and `key` say where the object was found first.
    If it leads to a tensor that the graph owns, `seal` sets `value` to None; then `like` is an empty
    container of its type, or a weak reference to the object.
    """

    kind: Kind
    cls: Any
    value: Any
    content: dict[Any, Any]
    parent: int
    key: Any
    names: Any = None
    like: Any = None


class Hole(NamedTuple):
    """Stands for an object that was let go, with this id. `ref` refers to it weakly, if it is a tensor."""

    number: int
    ref: Any = None


class About(NamedTuple):
    """What is known of a class."""

    kind: Kind | None  # of its instances; None if they are not searched
    slots: tuple[str, ...]  # their names
    is_own: bool  # the user's, not a library's
    is_of_installed: bool  # whether it or a base belongs to an installed package
    has_own: bool  # whether it or a base does not belong to a library
    is_pure: bool  # whether it inherits no code of libraries, which may look up any attribute
    names: frozenset[str]  # of attributes that no code needs to name


# Classes of libraries that look up no attributes, or only those that are known; and modules of such classes.
_KNOWN = frozenset({nn.Module, Dataset, IterableDataset})
_NAME_NOTHING = frozenset({"abc", "builtins", "collections.abc", "contextlib", "enum", "numbers", "typing"})


class _Abouts(dict[int, About]):
    """What is known of classes, by their ids. It does not keep them alive, as `lru_cache` would."""

    def __init__(self) -> None:
        self._refs: dict[int, Any] = {}

    def __call__(self, cls: Any) -> About:
        number = id(cls)
        if number not in self:
            own = [base for base in cls.__mro__ if not is_library(base.__module__)]
            of_installed = any([is_installed(base.__module__) for base in cls.__mro__])
            others = {*cls.__mro__}.difference(own, _KNOWN)
            is_pure = _NAME_NOTHING.issuperset([base.__module__ for base in others])
            what = _kind_of(cls), slots_of(cls), cls in own, of_installed, bool(own), is_pure, names_for(cls)
            self[number] = About(*what)

            def forget(_: Any) -> None:
                self.pop(number, None)
                self._refs.pop(number, None)

            self._refs[number] = weakref.ref(cls, forget)
        return self[number]


about = _Abouts()


def is_expanded_weight(cls: Any) -> bool:
    """Whether a tensor is of torch's own per-sample gradients: to read any attribute of it is an error."""
    return cls.__name__ == "ExpandedWeight" and "torch.nn.utils._expanded_weights" in cls.__module__


def _kind_of(cls: Any) -> Kind | None:
    if is_expanded_weight(cls):
        return None
    if issubclass(cls, Tensor):
        return TENSOR
    if any([str(base.__module__).startswith("torch.distributed.") for base in cls.__mro__]):
        return None  # `fully_shard` exchanges the parameters of a module during each run
    if any([base.__name__.startswith("AbstractGradSample") for base in cls.__mro__]):
        return None  # of Opacus: it puts hooks on each layer, which would lead to the whole model
    if cls in _BUILT_IN:
        return _BUILT_IN[cls]
    for base, kind in _WITH_SUBCLASSES.items():
        if issubclass(cls, base):
            return SLOTTED if kind is MODULE and slots_of(cls) else kind
    if issubclass(cls, dict) and (is_installed(cls.__module__) or not is_library(cls.__module__)):
        if slots_of(cls):
            return None  # a copy would lack what they hold
        return RECORD if cls.__dictoffset__ and not _computes_dict(cls) else DICT
    if issubclass(cls, tuple) and (hasattr(cls, "_fields") or hasattr(cls, "n_sequence_fields")):
        return TUPLE  # the latter are results of torch, as of `torch.linalg.qr`
    if is_plain_python(cls) and not is_of_dynamo(cls):
        return SLOTTED if slots_of(cls) else OBJECT
    return None


_BUILT_IN: dict[type, Kind] = {
    **dict.fromkeys((list, deque, set), LIST),
    **dict.fromkeys((dict, OrderedDict, defaultdict, Counter), DICT),
    **dict.fromkeys((tuple, frozenset), TUPLE),
    WeakKeyDictionary: OBJECT,  # of functools.singledispatch
}
_WITH_SUBCLASSES: dict[type, Kind | None] = {
    types.FunctionType: FUNCTION,
    types.MethodType: METHOD,
    types.BuiltinFunctionType: BUILTIN,
    types.CellType: CELL,
    ContextVar: VARIABLE,
    threading.local: LOCAL,
    functools.partial: PARTIAL,
    torch.jit.ScriptModule: None,
    nn.Module: MODULE,
    property: PROPERTY,
    **dict.fromkeys((staticmethod, classmethod), MEMBER),
    types.MappingProxyType: PROXY,
    **dict.fromkeys((type, types.ModuleType), CLASS),
}


def read(kind: Kind, value: Any, names: Any = None) -> dict[Any, Any]:
    """The content of an object: what it refers to, by name. With `names`, only these."""
    if kind in MAPPINGS or kind in SPACES or kind is SLOTTED:
        there = value if kind in MAPPINGS else getattr(value, "__dict__", {})
        if kind is SLOTTED:
            slots = [name for name in about(value.__class__).slots if hasattr(value, name)]
            there = {**there, **{name: getattr(value, name) for name in slots}}
        if names is None:
            return dict(there)
        if len(there) > len(names):
            return {name: there[name] for name in sorted(names & there.keys())}
        return {name: x for name, x in dict(there).items() if name in names}
    if kind is RECORD:  # its own methods may compute items
        items = dict((OrderedDict if isinstance(value, OrderedDict) else dict).items(value))
        return items if value.__dict__ is value else {**items, "__dict__": value.__dict__}
    if kind is TUPLE or kind is LIST:
        return dict(enumerate(value))
    if kind is CELL:
        try:
            return {"cell_contents": value.cell_contents}
        except ValueError:  # not assigned yet
            return {}
    if kind is VARIABLE:
        try:
            return {"": value.get()}
        except LookupError:  # it has no value, and no default
            return {}
    if kind is PARTIAL:  # a subclass may have attributes with these names (as in pyro)
        state = *functools.partial.__reduce__(value)[2][:3], value.__dict__
        return dict(zip(kind.parts, state, strict=True))
    if kind is PROXY:
        return dict(zip(kind.parts, gc.get_referents(value), strict=True))
    content = dict(zip(kind.parts, map(getattr, repeat(value), kind.parts), strict=False))
    if kind is FUNCTION:
        content.update(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
    return content


def _computes_dict(cls: Any) -> bool:
    """Whether `__dict__` of an instance is a property, as in the package munch."""
    return any([isinstance(base.__dict__.get("__dict__"), property) for base in cls.__mro__])


def emptied(value: Any) -> Any:
    """An empty container of the same type, with the same options."""
    cls: Any = type(value)
    if cls in _BUILT_IN or _computes_dict(cls):
        new = value.copy()
        new.clear()
        return new
    base: Any = next(filter(_BUILT_IN.__contains__, cls.__mro__))
    new = base.__new__(cls)  # not by the __new__ of cls, which may be the user's
    if isinstance(value, defaultdict):
        new.default_factory = value.default_factory
    if cls.__dictoffset__ and value.__dict__ is value:  # its items are its attributes
        new.__dict__ = new
    return new
