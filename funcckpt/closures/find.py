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

import operator
import random
import sys
import types
import weakref
from collections.abc import Iterable
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
    libraries_of,
    names_of,
    own_classes,
)
from .kinds import (
    ATOMS,
    ATTRIBUTES,
    DEFAULTS,
    GLOBALS,
    KWDEFAULTS,
    OBJECTS,
    PARTS,
    SPACES,
    Hole,
    Key,
    Kind,
    Node,
    emptied,
    kind_of,
    label,
    new_function,
    read,
)

_HOOKS = frozenset([name for name in nn.Module().__dict__ if "_hooks" in name])
# What a module has in any case, and need not be looked at while it is empty.
_OFTEN_EMPTY = frozenset({*PARTS, *_HOOKS, "_non_persistent_buffers_set"})
# What torch's code looks up in modules and autograd functions, and Python's in callables.
_ALWAYS_NAMED = frozenset(
    {*PARTS, *_HOOKS, "training", "forward", "__call__", "setup_context", "backward", "vjp", "jvp", "vmap"}
) | {
    f"__{name}__"
    for name in (
        "getitem setitem getattr len iter next contains enter exit bool float int index neg abs invert eq ne "
        "lt le gt ge add radd sub rsub mul rmul truediv rtruediv floordiv mod pow rpow matmul rmatmul and or"
    ).split()
}
_LOOK_UP_ANYTHING = ("getattr", "setattr", "__getattribute__", "vars", "__dict__", "asdict", "astuple")
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
_STATISTICS = (
    *("batch_norm", "instance_norm", "native_batch_norm"),
    *("_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm", "miopen_batch_norm"),
)
_MOVES_STREAMS = ("fork_rng", "manual_seed", "set_rng_state", "set_state", "seed")
# What does not change, and what no copy can stand for.
_CONSTANT = (Kind.METHOD, Kind.BUILTIN, Kind.PARTIAL, Kind.TUPLE, Kind.MEMBER, Kind.COMPILED)
FIXED = (Kind.CLASS, Kind.VARIABLE)
# What is everybody's: it holds what it holds now, whoever refers to it.
_STAYING = (Kind.GLOBALS, Kind.MODULE)


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
        "_empty",
        "_places",
        "_training",
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
        self._training: list[int] = []  # the dicts of buffers of modules that are training
        self._empty: list[tuple[Any, int, str]] = []  # parts of modules, in which there was nothing to follow
        self.streams: list[Any] = []
        self.draws_elsewhere = self.calls_backward = False
        # The ids of objects that have to be made anew, since what they hold was let go.
        self.gone: set[int] = set()
        self._search(root, everything)

    def _search(self, root: Any, everything: bool) -> None:
        nodes, tensors, places, names = self.nodes, self.tensors, self._places, set(_ALWAYS_NAMED)
        # Objects of which only attributes count that are named, and how many names there were then.
        named: list[Node] = []
        known, expanded = len(names), 0
        libraries: set[Any] = set()
        first = root[0] if type(root) is tuple and root else root
        if type(first) is types.MethodType:
            first = first.__func__
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
                is_own = value is first or not is_library(module)
                if not is_own:
                    libraries.add(module)
                    names.add(value.__name__)
                if is_own or value.__closure__ or value.__defaults__ or value.__kwdefaults__:
                    content = read(Kind.FUNCTION, value)
                    if is_own:
                        content[GLOBALS] = space
                    nodes[number] = Node(
                        Kind.FUNCTION, value, content, {*map(id, content.values())}, parent, key
                    )
                    for name, item in content.items():
                        if item is not None and item is not space:
                            pending.append((item, number, name))
                    if is_own:
                        names |= names_of(value.__code__)
                        self.calls_backward |= "backward" in value.__code__.co_names
                        for name in imported(value.__code__):
                            if name in sys.modules:
                                pending.append((sys.modules[name], number, "__class__"))
                            else:
                                self.draws_elsewhere = True  # for all that is known
                        node = nodes.get(id(space))
                        if node is None:
                            node = Node(Kind.GLOBALS, space, {}, set(), number, GLOBALS, set())
                            nodes[id(space)] = node
                        for name in global_names(value.__code__):
                            if name not in node.names:
                                node.names.add(name)
                                if name in space:
                                    item = node.content[name] = space[name]
                                    if type(item) not in ATOMS:
                                        node.refers.add(id(item))
                                        pending.append((item, id(space), name))
            elif isinstance(value, Tensor):
                tensors[number], places[number] = value, (parent, key)
            elif (how := kind_of(kind)) is None:
                if isinstance(value, _STREAMS) and not isinstance(value, random.SystemRandom):
                    self.streams.append(value)
            else:
                names_that_count: Any = None
                if how in OBJECTS or how is Kind.CLASS:
                    module = value.__name__ if isinstance(value, types.ModuleType) else kind.__module__
                    if isinstance(value, type):
                        names_that_count = names if value in own_classes(value) else ()
                    elif not is_library(module):
                        names_that_count = names
                    else:
                        libraries.add(module)
                        if how is Kind.CLASS:
                            names_that_count = ()
                elif how is Kind.BUILTIN:
                    names.add(value.__name__)
                if how is Kind.DICT:
                    content = dict(value)
                elif how in SPACES and not names_that_count:
                    content = {} if names_that_count == () else value.__dict__.copy()
                else:
                    content = read(how, value, names_that_count)
                refers = {*map(id, content.values())}
                node = nodes[number] = Node(how, value, content, refers, parent, key, names_that_count)
                if names_that_count is names:
                    named.append(node)
                if how is Kind.MODULE:
                    for name, item in content.items():
                        if type(item) not in ATOMS:
                            if name not in _OFTEN_EMPTY or item:
                                pending.append((item, number, name))
                            else:
                                self._empty.append((item, number, name))
                    if content.get("_buffers") and value.training:
                        self._training.append(id(value._buffers))
                else:
                    for name, item in content.items():
                        if type(item) not in ATOMS:
                            pending.append((item, number, name))
                if how in OBJECTS:
                    libraries |= libraries_of(kind)
                    for base in own_classes(kind):
                        pending.append((base, number, "__class__"))
                elif isinstance(value, type):
                    for base in own_classes(value):
                        pending.append((base, number, "__class__"))
            if not pending and (known < len(names) or (everything and expanded < len(named))):
                known, expanded = len(names), len(named)  # new code names more
                has_all = everything or not names.isdisjoint(_LOOK_UP_ANYTHING)
                for node in named:
                    now = read(node.kind, node.value)
                    if has_all and node.kind in OBJECTS:
                        node.names, counted = None, [*now]
                    else:
                        counted = [*compress(now, map(names.__contains__, now))]
                    for name in counted:
                        if name not in node.content:
                            item = node.content[name] = now[name]
                            if type(item) not in ATOMS:
                                node.refers.add(id(item))
                                pending.append((item, id(node.value), name))
        self.draws_elsewhere |= any(map(is_installed, libraries)) or (
            "random" in names and not libraries.isdisjoint(_DRAWING)
        )
        self.moves_streams = not names.isdisjoint(_MOVES_STREAMS)
        self.updates_statistics = not names.isdisjoint(_STATISTICS) or bool(self._training)

    def buffers_in_training(self) -> list[Tensor]:
        """The buffers of the modules that are training."""
        buffers: list[Tensor] = []
        for number in self._training:
            buffers += [x for x in self.nodes[number].content.values() if isinstance(x, Tensor)]
        return buffers

    # -- as it was ----------------------------------------------------------------------------------

    def changed(self) -> set[int]:
        """The ids of the objects that refer to something else than at the call."""
        changed = set()
        for number, node in self.nodes.items():
            value, content, kind, names = node.value, node.content, node.kind, node.names
            there: Any
            if value is None or kind in _CONSTANT:
                continue
            if kind is Kind.FUNCTION:
                if (
                    value.__defaults__ is not content[DEFAULTS]
                    or value.__kwdefaults__ is not content[KWDEFAULTS]
                    or (value.__dict__ or None) is not content[ATTRIBUTES]
                ):
                    changed.add(number)
                continue
            if kind is Kind.DICT or kind is Kind.GLOBALS:
                there = value
            elif kind in SPACES:
                there = value.__dict__
            else:
                there, names = read(kind, value, names), None
            size = len(there) if names is None else len(there.keys() & names)
            if size != len(content) or not all(map(there.__contains__, content)):
                changed.add(number)
            elif not all(map(operator.is_, map(there.get, content), content.values())):
                for name, before in content.items():
                    x = there[name]
                    if x is not before and type(before) is not Key:
                        if type(before) is not Hole or before() is not x:
                            changed.add(number)
                            break
        for there, number, name in self._empty:
            if there and id(there) not in self.nodes:
                self.nodes[id(there)] = Node(Kind.DICT, there, {}, set(), number, name)
                changed.add(id(there))
        return changed

    def leading_to(self, reached: set[int]) -> set[int]:
        """The objects with some ids, and those that refer to them by a way that can be rebuilt."""
        backwards = [*self.nodes.items()][::-1]  # most of what an object refers to was met after it
        size = -1
        while size < len(reached):
            size = len(reached)
            for number, node in backwards:
                if number not in reached and node.kind not in FIXED and not reached.isdisjoint(node.refers):
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
            if number in gone or node.kind in FIXED:
                for name, item in content.items():
                    if id(item) in owned:
                        hole = content[name] = Hole(item)
                        hole.number = id(item)
                    elif id(item) in gone and self.nodes[id(item)].kind not in _STAYING:
                        content[name] = Key(id(item))
        self.gone |= gone
        for number in gone:
            node = self.nodes[number]
            if node.kind not in _STAYING:
                node.like = _like(node)
                node.value = None
        if id(self.root) in gone:
            self.root = Key(id(self.root))

    def weaken(self, tensors: Iterable[Tensor]) -> None:
        """Hold tensors no longer, but for what refers to them now."""
        holes = {id(x): Hole(x) for x in tensors}
        for key, hole in holes.items():
            hole.number = key
            del self.tensors[key]
        for node in self.nodes.values():
            for name, item in node.content.items():
                if id(item) in holes:
                    node.content[name] = holes[id(item)]

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
            parts.append(label(node, key))
            number, key = node.parent, node.key
        return " of ".join([part for part in parts if part]) or "a captured tensor"


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
    if kind in OBJECTS:
        try:
            return type(value), weakref.ref(value)
        except TypeError:
            return type(value), lambda: None
    return type(value)
