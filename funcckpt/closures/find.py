"""What a callable refers to, at the time of a call.

`find` follows closure variables, defaults, the globals that code names, partials, bound objects, modules,
containers and plain objects. Of each it remembers what it held: a `Node`. Two questions are asked
afterwards: is everything as it was (`Found.changed`), and what would f be around other tensors, or as it
was at the call (`closures.rebuild`).

Objects of the user's own classes may lead far, to a trainer and its data. Of these only the attributes count
that some code of f names. Code of libraries is not read; what its modules and objects hold is.

A search is one loop: it costs some microseconds for each module, and no call for each object.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .code import (
    global_names,
    imported,
    is_installed,
    is_library,
    is_plain_python,
    libraries_of,
    names_of,
    own_classes,
    slots_of,
)

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
    OBJECT = "an object with attributes, a module among them"
    CLASS = "a class or a module of Python: no copy can stand for it"
    VARIABLE = "a context variable"
    COMPILED = "a module that torch.compile has wrapped"


@dataclass(slots=True)
class Node:
    """An object that was reached, and what it held then.

    `names` are those that count, if not all do. `parent` and `key` say where it was found first. Once a
    tensor that the graph owns could be reached from it, `value` is None, and `like` is what is needed to make
    another one.
    """

    kind: Kind
    value: Any
    content: dict[Any, Any]
    parent: int
    key: Any
    names: Any = None
    like: Any = None


class Hole(weakref.ref[Tensor]):
    """Stands for a tensor that the graph owns: says its id, and whether it is still in its place."""

    __slots__ = ("number",)

    number: int


class Key:
    """Stands for an object that was let go, by its id."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


_PARTS = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}
_HOOKS = frozenset([name for name in nn.Module().__dict__ if "_hooks" in name])
# What a module has in any case, and need not be looked at while it is empty.
_OFTEN_EMPTY = frozenset({*_PARTS, *_HOOKS, "_non_persistent_buffers_set"})
# What torch's code looks up in modules and autograd functions, and Python's in callables.
_ALWAYS_NAMED = frozenset(
    {*_PARTS, *_HOOKS, "training", "forward", "__call__", "setup_context", "backward", "vjp", "jvp", "vmap"}
) | {
    f"__{name}__"
    for name in (
        "getitem setitem getattr len iter next contains enter exit bool float int index neg abs invert eq ne "
        "lt le gt ge add radd sub rsub mul rmul truediv rtruediv floordiv mod pow rpow matmul rmatmul and or"
    ).split()
}
_LOOK_UP_ANYTHING = ("getattr", "setattr", "__getattribute__", "vars", "__dict__", "asdict", "astuple")
_LISTS = (list, deque, set)
_DICTS = (dict, OrderedDict, defaultdict)
_MEMBERS = (staticmethod, classmethod, property)
_STREAMS = (
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
)
# Modules of libraries from whose own random streams code may draw, if it names "random" as well.
_DRAWING = frozenset({"random", "numpy", "numpy.random", "statistics"})
# Functions that update the running statistics that they are given.
_STATISTICS = ("batch_norm", "instance_norm")
_MOVES_STREAMS = ("fork_rng", "manual_seed", "set_rng_state", "set_state", "seed")
# How a function refers to what is no closure variable.
DEFAULTS, KWDEFAULTS, ATTRIBUTES, GLOBALS = "*defaults", "*kwdefaults", "*attributes", "*globals"


@functools.lru_cache(maxsize=4096)
def _kind_of(kind: Any) -> Kind | None:
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
        return Kind.COMPILED if kind.__name__ == "OptimizedModule" else Kind.OBJECT
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
        return Kind.OBJECT
    return None


# What does not change, and what no copy can stand for.
_CONSTANT = (Kind.METHOD, Kind.BUILTIN, Kind.PARTIAL, Kind.TUPLE, Kind.MEMBER, Kind.COMPILED)
_FIXED = (Kind.CLASS, Kind.VARIABLE)


def read(kind: Kind, value: Any, names: Any = None) -> dict[Any, Any]:
    """What an object of a kind refers to; of those with names, under which names that count."""
    if kind is Kind.GLOBALS:
        there = names & value.keys()
        return dict(zip(there, map(value.__getitem__, there), strict=True))
    if kind is Kind.OBJECT or kind is Kind.CLASS:
        if kind is Kind.OBJECT and (slots := slots_of(value.__class__)):
            content = {name: getattr(value, name) for name in slots if hasattr(value, name)}
            content.update(getattr(value, "__dict__", ()))
        else:
            content = value.__dict__
        if names is None:
            return dict(content)
        return dict(compress(content.items(), map(names.__contains__, content)))
    if kind is Kind.FUNCTION:
        content = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        content[DEFAULTS], content[KWDEFAULTS] = value.__defaults__, value.__kwdefaults__
        content[ATTRIBUTES] = value.__dict__ or None
        return content
    if kind is Kind.DICT:
        return dict(value)
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


class Found:
    """What a search has found.

    Attributes
    ----------
    nodes : dict of int to Node
        By the id of the object, in the order in which they were met.
    tensors : dict of int to Tensor
        By their ids. `seal` takes away those that the graph owns.
    streams : list
        Random streams: `torch.Generator`, `random.Random`, generators of numpy.
    moves_streams : bool
        Whether code may draw random numbers and leave the streams where they were.
    calls_backward : bool
        Whether code names `backward`.
    updates_statistics : bool
        Whether f may update running statistics, of which no version counter tells.
    draws_elsewhere : bool
        Whether code is reached that may draw from the streams of Python's and numpy's modules.
    """

    __slots__ = (
        "_marked",
        "_places",
        "calls_backward",
        "draws_elsewhere",
        "gone",
        "moves_streams",
        "nodes",
        "root",
        "streams",
        "tensors",
        "updates_statistics",
    )

    def __init__(self, root: Any, everything: bool = False) -> None:
        """With `everything`, also attributes that no code names."""
        self.root = root
        self.nodes: dict[int, Node] = {}
        self.tensors: dict[int, Tensor] = {}
        self._places: dict[int, tuple[int, Any]] = {}
        self.streams: list[Any] = []
        self.draws_elsewhere = self.calls_backward = False
        # The ids of objects that have to be made anew, since what they hold was let go.
        self.gone: set[int] = set()
        # Those with a mark in the place of something.
        self._marked: set[int] = set()
        self._search(root, everything)

    def _search(self, root: Any, everything: bool) -> None:
        nodes, tensors, places, names = self.nodes, self.tensors, self._places, set(_ALWAYS_NAMED)
        # Objects of which only attributes count that are named, and how many names there were then.
        named: list[Node] = []
        known, expanded = len(names), 0
        libraries: set[Any] = set()
        pending: list[tuple[Any, int, Any]] = [(root, 0, "")]
        while pending:
            value, parent, key = pending.pop()
            kind: Any = type(value)
            number = id(value)
            if number in nodes or number in tensors:
                pass
            elif kind is types.FunctionType:
                space = value.__globals__
                module = space.get("__name__")
                is_own = not is_library(module)
                if not is_own:
                    libraries.add(module)
                if is_own or value.__closure__ or value.__defaults__ or value.__kwdefaults__:
                    content = read(Kind.FUNCTION, value)
                    nodes[number] = Node(Kind.FUNCTION, value, content, parent, key)
                    pending.extend(
                        [(item, number, name) for name, item in content.items() if item is not None]
                    )
                    if is_own:
                        names |= names_of(value.__code__)
                        self.calls_backward |= "backward" in value.__code__.co_names
                        for name in imported(value.__code__):
                            if name in sys.modules:
                                pending.append((sys.modules[name], number, "__class__"))
                            else:
                                self.draws_elsewhere = True  # for all that is known
                        content[GLOBALS] = space
                        node = nodes.get(id(space))
                        if node is None:
                            node = nodes[id(space)] = Node(Kind.GLOBALS, space, {}, number, GLOBALS, set())
                        for name in global_names(value.__code__):
                            if name not in node.names:
                                node.names.add(name)
                                if name in space:
                                    item = node.content[name] = space[name]
                                    if type(item) not in ATOMS:
                                        pending.append((item, id(space), name))
            elif isinstance(value, Tensor):
                tensors[number], places[number] = value, (parent, key)
            elif (how := _kind_of(kind)) is None:
                if isinstance(value, _STREAMS) and not isinstance(value, random.SystemRandom):
                    self.streams.append(value)
            else:
                names_that_count: Any = None
                if how is Kind.OBJECT or how is Kind.CLASS:
                    module = value.__name__ if isinstance(value, types.ModuleType) else kind.__module__
                    if isinstance(value, type):
                        names_that_count = names if value in own_classes(value) else ()
                    elif not is_library(module):
                        names_that_count = names
                    else:
                        libraries.add(module)
                        if how is Kind.CLASS:
                            names_that_count = ()
                content = read(how, value, names_that_count)
                node = nodes[number] = Node(how, value, content, parent, key, names_that_count)
                if names_that_count is names:
                    named.append(node)
                for name, item in content.items():
                    if type(item) not in ATOMS and (name not in _OFTEN_EMPTY or item):
                        pending.append((item, number, name))
                if how is Kind.OBJECT:
                    pending.extend([(base, number, "__class__") for base in own_classes(kind)])
                    libraries |= libraries_of(kind)
                elif isinstance(value, type):
                    pending.extend([(base, number, "__class__") for base in own_classes(value)])
            if not pending and (known < len(names) or (everything and expanded < len(named))):
                known, expanded = len(names), len(named)  # new code names more
                has_all = everything or not names.isdisjoint(_LOOK_UP_ANYTHING)
                for node in named:
                    now = read(node.kind, node.value)
                    if has_all and node.kind is Kind.OBJECT:
                        node.names, counted = None, [*now]
                    else:
                        counted = [*compress(now, map(names.__contains__, now))]
                    for name in counted:
                        if name not in node.content:
                            item = node.content[name] = now[name]
                            if type(item) not in ATOMS:
                                pending.append((item, id(node.value), name))
        self.draws_elsewhere |= any(map(is_installed, libraries)) or (
            "random" in names and not libraries.isdisjoint(_DRAWING)
        )
        self.moves_streams = not names.isdisjoint(_MOVES_STREAMS)
        self.updates_statistics = not names.isdisjoint(_STATISTICS) or bool(self.buffers_in_training())

    def buffers_in_training(self) -> list[Tensor]:
        """The buffers of the modules that are training."""
        found = []
        for node in self.nodes.values():
            if node.key == "_buffers" and node.content and node.kind is Kind.DICT:
                parent = self.nodes[node.parent]
                if isinstance(parent.value, nn.Module) and parent.value.training:
                    found += [x for x in node.content.values() if isinstance(x, Tensor)]
        return found

    # -- as it was ----------------------------------------------------------------------------------

    def changed(self) -> set[int]:
        """The ids of the objects that refer to something else than at the call."""
        changed = set()
        filled: list[tuple[int, str, Any]] = []
        for number, node in self.nodes.items():
            value, content, kind = node.value, node.content, node.kind
            if value is None or kind in _CONSTANT:
                continue
            there = value if kind is Kind.DICT else read(kind, value, node.names)
            if GLOBALS in content and kind is Kind.FUNCTION:
                there[GLOBALS] = content[GLOBALS]
            same = len(there) == len(content) and all(map(there.__contains__, content))
            if not same or not all(map(operator.is_, map(there.get, content), content.values())):
                if not same or not all(map(_is_it, map(there.get, content), content.values())):
                    changed.add(number)
            if kind is Kind.OBJECT and isinstance(value, nn.Module):
                filled += [(number, name, content[name]) for name in _OFTEN_EMPTY if content.get(name)]
        for number, name, there in filled:
            if id(there) not in self.nodes and isinstance(there, dict):  # it was empty, and not looked at
                self.nodes[id(there)] = Node(Kind.DICT, there, {}, number, name)
                changed.add(id(there))
        return changed

    def leading_to(self, reached: set[int]) -> set[int]:
        """The objects with some ids, and those that refer to them by a way that can be rebuilt."""
        backwards = [*self.nodes.items()][::-1]  # most of what an object refers to was met after it
        size = -1
        while size < len(reached):
            size = len(reached)
            for number, node in backwards:
                if number not in reached and node.kind not in _FIXED:
                    of = number_of if number in self._marked else id
                    if not reached.isdisjoint(map(of, node.content.values())):
                        reached.add(number)
        return reached

    def seal(self, tensors: Iterable[Tensor]) -> None:
        """Let go of tensors that the graph owns from now on, and of all that would hold them."""
        owned = {id(x): x for x in tensors if id(x) in self.tensors}
        if not owned:
            return
        for key in owned:
            del self.tensors[key]
        gone = {number for number in self.leading_to({*owned}) if number in self.nodes}
        for number, node in self.nodes.items():
            content = node.content
            if number in gone or node.kind in _FIXED:
                for name, item in content.items():
                    if id(item) in owned:
                        self._marked.add(number)
                        content[name] = _hole(item)
                    elif id(item) in gone and not _stays(self.nodes[id(item)]):
                        content[name] = Key(id(item))
                        self._marked.add(number)
        self.gone |= gone
        for number in gone:
            node = self.nodes[number]
            if not _stays(node):
                node.like = _like(node)
                node.value = None
        if id(self.root) in gone:
            self.root = Key(id(self.root))

    def weaken(self, tensors: Iterable[Tensor]) -> None:
        """Hold tensors no longer, but for what refers to them now."""
        holes = {id(x): _hole(x) for x in tensors}
        for key in holes:
            del self.tensors[key]
        for number, node in self.nodes.items():
            for name, item in node.content.items():
                if id(item) in holes:
                    node.content[name] = holes[id(item)]
                    self._marked.add(number)

    # -- in words -----------------------------------------------------------------------------------

    def has_met(self, number: int) -> bool:
        """Whether the tensor with an id was found."""
        return number in self._places

    def where(self, number: int) -> str:
        """How f refers to the tensor with an id, in words."""
        return self.path(*self._places[number]) if number in self._places else "a captured tensor"

    def path(self, number: int, key: Any) -> str:
        """An item of an object, and how f refers to that, in words."""
        parts = []
        while number in self.nodes:
            node = self.nodes[number]
            parts.append(_label(node, key))
            number, key = node.parent, node.key
        return " of ".join([part for part in parts if part]) or "a captured tensor"


def _is_it(x: Any, before: Any) -> bool:
    """Whether something is what it was, or what a mark stands for."""
    return x is before or (before() is x if type(before) is Hole else type(before) is Key)


def number_of(x: Any) -> int:
    return x.number if type(x) is Hole or type(x) is Key else id(x)


def _hole(x: Tensor) -> Hole:
    hole = Hole(x)
    hole.number = id(x)
    return hole


def _stays(node: Node) -> bool:
    """Whether an object is everybody's: it holds what it holds now, whoever refers to it."""
    return node.kind is Kind.GLOBALS or (node.kind is Kind.OBJECT and isinstance(node.value, nn.Module))


def _like(node: Node) -> Any:
    """What is needed of an object to make another one like it."""
    value, kind = node.value, node.kind
    if kind is Kind.FUNCTION:
        cells = value.__closure__
        return new_function(value, value.__globals__, cells and (*[types.CellType() for _ in cells],))
    if kind in (Kind.DICT, Kind.LIST):
        return emptied(value)
    if kind is Kind.BUILTIN:
        return value.__name__
    if kind is Kind.OBJECT:
        try:
            return type(value), weakref.ref(value)
        except TypeError:
            return type(value), lambda: None
    return type(value)


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


def _label(node: Node, key: Any) -> str:
    kind = node.kind
    if kind is Kind.GLOBALS:
        return f"global {key!r}"
    if kind is Kind.FUNCTION:
        if key in (DEFAULTS, KWDEFAULTS):
            return "a default argument"
        return "" if key in (ATTRIBUTES, GLOBALS) else f"closure variable {key!r}"
    if kind is Kind.OBJECT:
        return "" if key in _PARTS or key == "__class__" else f"attribute {key!r}"
    if kind is Kind.CLASS:
        return "" if key == "__class__" else f"attribute {key!r} of {node.value.__name__}"
    if kind is Kind.DICT and node.key in _PARTS:
        return f"{_PARTS[node.key]} {key!r}"
    return f"item {key!r}" if kind in (Kind.DICT, Kind.LIST, Kind.TUPLE) else ""
