"""What a callable refers to, at the time of a call.

The search follows closure variables, defaults, the globals that code names, partials, bound objects, modules,
containers and plain objects. For each object, a `Node` records its content at the call. It answers two
questions later: has something changed since the call (`Found.changed`)? And what is f around other tensors,
or in its state at the call (`closures.rebuild`)?

An object of a user's class may lead far, to a trainer and its data. So only the attributes count that some
code of f names. The code of libraries is not read, but their modules and objects are searched. So are all
attributes of a class that inherits their code.

The search is a loop. It makes no call for each object, and takes some microseconds for each module.
"""

from __future__ import annotations

import operator
import random
import sys
import types
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager as ContextManager
from contextvars import ContextVar
from dataclasses import replace
from itertools import compress, repeat
from os import PathLike
from typing import Any

import torch
from numpy import ndarray
from numpy.random import BitGenerator, Generator, RandomState
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._torch.objects import below_compiler, dict_version, is_compiler, is_pullback
from . import kinds
from .code import is_installed, is_library, names_in
from .kinds import Hole, Node, about

# Hooks that run in a backward: what they refer to is not searched, so that they find what is there then.
_RUN_LATER = frozenset({"_backward_hooks", "_backward_pre_hooks"})
_HOOKS = frozenset([name for name in nn.Module().__dict__ if "_hooks" in name])
# Buffers that modules of quantization have.
_OF_OBSERVERS = frozenset(("observer_enabled", "min_val"))
# Attributes that each module or function has. They need no search while they are empty.
_OFTEN_EMPTY = frozenset(
    {*kinds.PARTS, *_HOOKS, "_non_persistent_buffers_set", "__dict__", "__annotations__"}
)
# Methods that Python and its operators call. (To name `__getattribute__` makes all attributes count.)
_WITH_SPECIAL: Any = (int, complex, bytes, defaultdict, type, property, Iterator, ContextManager, PathLike)
_SPECIAL = {
    name
    for cls in (*_WITH_SPECIAL, ndarray, Tensor)
    for name in dir(cls)
    if name.startswith("__") and callable(getattr(cls, name, None))
} - {"__init__", "__new__", "__getattribute__", "__dir__", "__sizeof__"}
_SPECIAL -= {"__getstate__", "__setstate__", "__getnewargs__", "__reduce__", "__reduce_ex__"}  # of pickle
_SPECIAL |= {f"__{side}{name.strip('_')}__" for name in dir(operator) for side in ("", "r")}
# Names that torch looks up in modules and autograd functions, and Python in any object.
_ALWAYS_NAMED = frozenset(
    {*kinds.PARTS, *_HOOKS, "training", "forward", "setup_context", "backward", "vjp", "jvp", "vmap"}
    | {*_SPECIAL, "__getattr__", "_value_", "_compiled_call_impl"}
)
# By class: how it is flattened. (Without this table, what only these functions name is not found.)
_PYTREES: dict[Any, Any] = getattr(pytree, "SUPPORTED_NODES", {})
_LOOK_UP_ANYTHING = ("getattr", "setattr", "__getattribute__", "vars", "__dict__", "asdict", "astuple")
_STREAMS = (torch.Generator, random.Random, Generator, RandomState, BitGenerator)
# Functions that update running statistics which are passed to them.
_STATISTICS = [name for name in dir(torch) if "batch_norm" in name or "instance_norm" in name]
_STATISTICS += ["_batch_norm_with_update"]  # only in torch.ops.aten
# The key of a class or an imported module: the object needs it, but it is not part of its content.
_BESIDE = object()
_DRAWING = ("random", "numpy.random")  # modules whose functions draw from their streams
# Names in code that reads, copies or puts back a stream, which then may end where it began.
_MOVES_STREAMS = frozenset(
    "fork_rng manual_seed seed clone_state get_rng_state set_rng_state get_state set_state getstate "
    "setstate".split()
)
_MOVES_OWN_STREAMS = ("state", "copy", "deepcopy", "spawn")  # if f has a stream of its own


class Found:
    """The result of a search.

    Attributes
    ----------
    nodes : dict of int to Node
        By id of the object, in the order in which they were found.
    tensors, places, marks : dict
        By id of the tensor: the tensor, and where it was found (the id of its holder, and the name there).
        `seal` removes tensors that the graph owns, and puts their attributes and class into `marks`.
    streams : list
        Random streams: `torch.Generator`, `random.Random`, generators of numpy.
    opaque : list of nn.Module and torch.jit.ScriptFunction
        What is not searched: modules of torch.distributed, and TorchScript.
    gone : set of int
        The ids of objects that must be rebuilt, since `seal` removed something that they refer to.
    names : set of str
        What code names, without that of installed packages.
    has_pullbacks : bool
        Whether f refers to what `torch.func.vjp` has returned; it is not searched, either.
    calls_compiled : bool
        Whether f refers to something that `torch.compile` has compiled.
    moves_streams, calls_backward, updates_statistics, draws_elsewhere, has_hooks_of_opacus : bool
        Whether code may set random streams; names `backward`; may update running statistics, which no version
        counter records; may draw from the global streams of Python and numpy; collects per-sample gradients.
    """

    shares_nodes = False  # with another search (`sharing`): then they do not change

    def __init__(self, root: Any, everything: bool = False) -> None:
        """With `everything`, attributes that no code names are searched, too."""
        self.root = root
        self.nodes: dict[int, Node] = {}
        self.tensors: dict[int, Tensor] = {}
        self.marks: dict[int, tuple[dict[str, Any], Any]] = {}
        self.places: dict[int, tuple[int, Any]] = {}
        self.streams: list[Any] = []
        self.opaque: list[Any] = []
        self.gone: set[int] = set()
        self.names: set[str] = set()
        self.has_pullbacks = self.calls_compiled = self.calls_backward = self.draws_elsewhere = False
        self._training: list[dict[str, Tensor | None]] = []  # the buffers of modules in training
        self.noted: set[int] = set()  # what `changed` has told so far
        self.empty: list[Any] = []  # empty at the call; `changed` adds the edges of those that no longer are
        # The modules that code imports, by name; None if they are not there yet.
        self.imported: list[tuple[str, Any]] = []
        # The ids of objects in an earlier search that this one continues, and of those in their place.
        self.renamed: dict[int, int] = {}
        self.made: set[int] = set()  # those in their place
        # Flat pairs of ids: of an object, and of what refers to it. Many small lists take the collector time.
        self._edges: list[int] = []
        self._added: list[int] = []  # the same, since the call
        no_ids: set[int] = set()
        self.led = no_ids, no_ids  # the last ids given to `leading_to`, and what it gave
        # The ids of objects that are or have a dict; these dicts; and their versions. A dict that has its
        # version of the call needs no look inside.
        self._numbers: list[int] = []
        self._dicts: list[Any] = []
        self._versions: list[int] = []
        # Those of the objects that have a dict; their classes; and these dicts.
        self._owners: list[Any] = []
        self._classes: list[Any] = []
        self._spaces: list[Any] = []
        self.rest: list[int] = []  # the ids of all other objects that can change
        self._some_edges: tuple[list[int], list[int]] | None = None
        _Search(self, everything)
        # For searches that continue this one: the order of the objects, and what was empty.
        self._order, self.empty_of_first = [*self.nodes], self.empty
        names = self.names
        self.draws_elsewhere |= "random" in names
        self.has_hooks_of_opacus = "capture_activations_hook" in names
        self.moves_streams = not names.isdisjoint(_MOVES_STREAMS)
        if self.streams:
            self.moves_streams |= not names.isdisjoint(_MOVES_OWN_STREAMS)
        self.updates_statistics = not names.isdisjoint(_STATISTICS) or bool(self._training)

    def codes(self) -> Iterator[Any]:
        """The code of each function that was found, and the name of the class of each other object.

        Also whole numbers in closures and defaults, as of a loop over layers: operators may depend on them.
        """
        for number in self._order:
            node = self.nodes[self.renamed.get(number, number)]
            yield node.value.__code__ if node.kind is kinds.FUNCTION else node.cls.__qualname__
            if node.kind is kinds.CELL or node.kind is kinds.TUPLE:
                yield short(tuple([x for x in node.content.values() if type(x) in (int, bool)]))

    def buffers_in_training(self) -> list[Tensor]:
        """The buffers of modules in training."""
        return [x for buffers in self._training for x in buffers.values() if isinstance(x, Tensor)]

    # -- changes since the call -----------------------------------------------------------------------

    def changed(self) -> set[int]:
        """The ids of the objects that have changed since the call.

        An object stays changed, even if it gets its old content back: f will assign again, to a copy.
        """
        changed, look_at = self.noted, self.rest
        if dict_version is not None and (versions := [*map(dict_version, self._dicts)]) != self._versions:
            look_at = [*look_at, *compress(self._numbers, map(operator.ne, versions, self._versions))]
        if not all(map(operator.is_, map(_attributes_of, self._owners), self._spaces)):
            replaced = map(operator.is_not, map(_attributes_of, self._owners), self._spaces)
            look_at = [*look_at, *compress(map(id, self._owners), replaced)]
        for number in look_at:
            node = self.nodes[number]
            value, content, kind, names = node.value, node.content, node.kind, node.names
            if value is None or kind in kinds.CONSTANT:
                continue
            if kind is kinds.FUNCTION:
                at_call = content["__defaults__"], content["__kwdefaults__"], content["__dict__"]
                now = value.__defaults__, value.__kwdefaults__, value.__dict__
                if any(map(operator.is_not, now, at_call)):
                    changed.add(number)
                continue
            if kind in kinds.MAPPINGS:
                there = value
            elif kind in kinds.SPACES:
                there = value.__dict__
            else:
                there, names = kinds.read(kind, value, names), None
            keys = there.keys() if names is None else there.keys() & names
            values = there.values() if names is None else map(there.get, content)
            if content.keys() != keys:
                changed.add(number)
            elif not all(map(operator.is_, values, content.values())):  # or in another order
                for name, x in content.items():
                    is_let_go = type(x) is Hole and (x.ref is None or x.ref() is there[name])
                    if there[name] is not x and not is_let_go:
                        changed.add(number)
        if any(self.empty):
            filled = {id(x): x for x in self.empty if x}
            self.empty = [x for x in self.empty if not x]
            for holder, node in [*self.nodes.items()]:
                for name, item in node.content.items():
                    if (x := filled.get(id(item))) is not None:
                        self._added, self.led = [*self._added, id(x), holder], (set(), set())
                        if id(x) not in self.nodes:
                            cls: Any = type(x)
                            self.nodes[id(x)] = Node(about(cls).kind or kinds.DICT, cls, x, {}, holder, name)
                            changed.add(id(x))
        return changed

    def edges(self) -> tuple[list[int], list[int]]:
        """The ids of objects, and of what refers to each; the last that were found first."""
        edges = [*map(self.renamed.get, self._edges, self._edges)] if self.renamed else self._edges
        if self._added:
            edges = edges + self._added
        return edges[-2::-2], edges[::-2]

    def has_other_classes(self) -> bool:
        """Whether an object has got another class since the call."""
        rest = map(self.nodes.__getitem__, self.rest)
        return [*map(type, self._owners)] != self._classes or any([type(x.value) is not x.cls for x in rest])

    def edges_of(self, of: Collection[kinds.Kind]) -> tuple[list[int], list[int]]:
        """The edges to objects of some kinds, by the ids of the search that this one continues."""
        if self._some_edges is None:
            edges, nodes, old = self._edges, self.nodes, self.renamed
            some = {n for n, node in nodes.items() if node.kind in of} | {*old}
            chosen = [*map(some.__contains__, edges[::2])]
            self._some_edges = [*compress(edges[::2], chosen)], [*compress(edges[1::2], chosen)]
        return self._some_edges

    def leading_to(self, reached: set[int]) -> set[int]:
        """`reached`, a set of ids, with those of all objects that refer to one of them and can be rebuilt."""
        if self.led[0] <= reached <= self.led[1]:
            return self.led[1]
        # What refers to an object was found before it, except in a cycle: nearly always one pass is enough.
        (numbers, holders), count, before = self.edges(), 0, reached.copy()
        while count < len(reached):
            count = len(reached)
            for holder in compress(holders, map(reached.__contains__, numbers)):
                if self.nodes[holder].kind not in kinds.FIXED:
                    reached.add(holder)
        self.led = before, reached
        return reached

    def weaken(self, tensors: Collection[Tensor], own: Collection[int] = ()) -> None:
        """Refer to `tensors` only weakly from now on, and no longer to the objects with the ids `own`."""
        if self.shares_nodes:
            self.nodes = {n: replace(node, content=node.content.copy()) for n, node in self.nodes.items()}
        holes = {number: Hole(number) for number in own}
        for x in tensors:
            holes[id(x)] = Hole(id(x), weakref.ref(x))
            self.marks[id(x)] = {**x.__dict__}, type(x)
            del self.tensors[id(x)]
        self.root = holes.get(id(self.root), self.root)
        numbers, holders = self.edges()
        for holder in {*compress(holders, map(holes.__contains__, numbers))}:
            content = self.nodes[holder].content
            for name in compress(content, map(holes.__contains__, map(id, content.values()))):
                content[name] = holes[id(content[name])]

    def seal(self, tensors: Collection[Tensor]) -> None:
        """Let go of tensors that the graph owns from now on, and of objects that would keep them alive."""
        self.gone = self.leading_to({*map(id, tensors)}) & self.nodes.keys()
        # Modules and globals are shared: they keep their content alive anyway.
        own = [n for n in self.gone if self.nodes[n].kind not in (kinds.MODULE, kinds.GLOBALS)]
        self.weaken(tensors, own)
        gone = {*own}
        for node in map(self.nodes.__getitem__, own):
            if node.kind in (kinds.DICT, kinds.RECORD, kinds.LIST):
                node.like = kinds.emptied(node.value)
            elif node.kind in kinds.OBJECTS and node.cls.__weakrefoffset__:
                node.like = weakref.ref(node.value)
            node.value = None
        stay = [*map(operator.not_, map(gone.__contains__, self._numbers))]
        of_dicts = self._numbers, self._dicts, self._versions
        self._numbers, self._dicts, self._versions = map(list, map(compress, of_dicts, repeat(stay)))
        stay = [*map(operator.not_, map(gone.__contains__, map(id, self._owners)))]
        of_owners = self._owners, self._classes, self._spaces
        self._owners, self._classes, self._spaces = map(list, map(compress, of_owners, repeat(stay)))

    # -- names for messages ---------------------------------------------------------------------------

    def where(self, number: int) -> str:
        """How f refers to the tensor with this id, in words."""
        return self.path(*self.places[number]) if number in self.places else "a captured tensor"

    def path(self, number: int, key: Any) -> str:
        """How f refers to an item of the object with this id, in words."""
        words: list[str] = []
        while (number := self.renamed.get(number, number)) in self.nodes:
            node = self.nodes[number]
            if node.parent == 0 and node.cls is tuple:  # f and its arguments
                words[-1:] = ["an argument"] if key else words[-1:]
            elif node.key in kinds.PARTS:
                words.append(f"{node.key[1:-1]} {key!r}")
            elif key in ("__defaults__", "__kwdefaults__"):
                words.append("a default argument")
            elif node.kind.label and key not in (*kinds.PARTS, _BESIDE) and not str(key).startswith("__"):
                words.append(node.kind.label.format(key))
            number, key = node.parent, node.key
        return " of ".join(words) or "a captured tensor"


class _Search:
    """A search at work."""

    has_objects = False

    def __init__(self, found: Found, everything: bool) -> None:
        self.found, self.everything = found, everything
        # Each object, the id of its holder, and its name there.
        self.pending: list[tuple[Any, int, Any]] = [(found.root, 0, _BESIDE)]
        self.seen: set[int] = set()
        # Objects of which only named attributes count, with how many names were known when they were read.
        self.named: dict[Node, int] = {}
        self.keyed: list[Node] = []  # dicts with keys that are no atoms
        root = found.root
        first = root[0] if type(root) is tuple and root else root
        self.first = below_compiler(first.__func__ if type(first) is types.MethodType else first)
        while self.pending:
            self._look()
            self._read_named()
        nodes = found.nodes
        # Modules and tensors that are keys of a dict, if they are found elsewhere, too: a registry may have
        # many others.
        for node in self.keyed:
            for key in node.content:
                if id(key) in found.tensors or (id(key) in nodes and isinstance(key, nn.Module)):
                    found._edges += id(key), id(node.value)
        # A copy of these would not follow the module. Compiled code looks at the globals of its first run.
        for node in self.named:
            if node.kind is kinds.CLASS and (space := nodes.get(id(node.value.__dict__))) is not None:
                space.kind = kinds.NAMESPACE
            elif found.calls_compiled and node.kind is kinds.GLOBALS:
                node.kind = kinds.NAMESPACE

    def _look(self) -> None:
        """Look at what is pending, and at what that holds."""
        found, pending, seen, named = self.found, self.pending, self.seen, self.named
        nodes, edges, names, empty, atoms = found.nodes, found._edges, found.names, found.empty, kinds.ATOMS
        while pending:
            value, parent, key = pending.pop()
            number = id(value)
            if key is not _BESIDE:
                edges += number, parent
            if number in seen:
                continue
            seen.add(number)
            cls: Any = type(value)
            of = about.get(id(cls)) or about(cls)
            kind, is_own, draws = of.kind, of.is_own, of.is_of_installed
            if kind is kinds.TENSOR:
                found.tensors[number], found.places[number] = value, (parent, key)
                continue
            if kind is None:
                if isinstance(value, _STREAMS) and cls is not random.SystemRandom:
                    found.streams.append(value)
                elif isinstance(value, (nn.Module, torch.jit.ScriptFunction)):
                    found.opaque.append(value)
                found.calls_compiled |= is_compiler(cls)
                continue
            owner: Any = cls
            if kind is kinds.FUNCTION:
                if is_pullback(value) and not self.everything:
                    found.has_pullbacks = True  # its tensors belong together: none can be exchanged alone
                    continue
                module = value.__globals__.get("__name__")
                is_own = value is self.first or not is_library(module)
                draws = draws or is_installed(module) or module in _DRAWING
            elif kind is kinds.CLASS:
                if isinstance(value, type):
                    of, owner = about(value), value
                    is_own, draws = of.is_own, of.is_of_installed
                else:
                    is_own = value is self.first or not is_library(value.__name__)
                    draws = draws or is_installed(value.__name__) or value.__name__ in _DRAWING
                if not is_own:  # it holds no objects of the user
                    names.add(value.__name__)  # which code may know by another name
                    found.draws_elsewhere |= draws
                    continue
                if owner is value and not is_library(cls.__module__):
                    pending.append((cls, number, _BESIDE))  # a metaclass
            found.draws_elsewhere |= draws
            is_named = is_own and of.is_pure and (kind in kinds.OBJECTS or kind is kinds.CLASS)
            is_run_later = False
            # (A key may be any object, and to compare it any code.)
            if kind is kinds.DICT and type(key) is str:
                is_run_later = key in _RUN_LATER
                if key == "__dict__":
                    holder = about(nodes[parent].cls)
                    is_named = holder.kind is kinds.RECORD and holder.is_own and holder.is_pure
            # What others keep in a threading.local may be large.
            counted = names if is_named or kind is kinds.LOCAL else None
            if counted is not None:
                names |= of.names if self.has_objects else of.names | _ALWAYS_NAMED
                self.has_objects = True
            there: Any = value if kind is kinds.DICT else value.__dict__ if kind in kinds.OWNERS else None
            # (Python 3.12 does not tell that an empty dict becomes a copy of another one.)
            if type(there) is dict and there and dict_version is not None:
                found._versions.append(dict_version(there))
                found._numbers.append(number)
                found._dicts.append(there)
                if there is not value:
                    found._owners.append(value)
                    found._classes.append(cls)
                    found._spaces.append(there)
            elif kind not in kinds.CONSTANT:
                found.rest.append(number)
            content: dict[Any, Any] = {}
            if counted is None and (kind is kinds.DICT or kind in kinds.SPACES):
                content = dict(value) if kind is kinds.DICT else value.__dict__.copy()
            elif counted is None or kind is kinds.CLASS:
                content = kinds.read(kind, value, counted)
            # Otherwise its content is read later: its class may add names.
            node = nodes[number] = Node(kind, cls, value, content, parent, key, counted)
            if counted is not None:
                named[node] = 0
            for name, item in () if is_run_later else content.items():
                if type(item) not in atoms:
                    if name in _OFTEN_EMPTY and not item:
                        empty.append(item)
                    else:
                        pending.append((item, number, name))
            if of.has_own:
                for base in owner.__mro__:
                    if not is_library(base.__module__):
                        pending.append((base, number, _BESIDE))
                if (as_tree := _PYTREES.get(cls)) is not None:
                    pending.append((as_tree.flatten_fn, number, _BESIDE))
            if kind is kinds.MODULE:
                # (Observers of quantization observe in evaluation, too.)
                if (own := value._buffers) and (value.training or not _OF_OBSERVERS.isdisjoint(own)):
                    found._training.append(own)
                if isinstance(value, torch.fx.GraphModule):
                    names.add("batch_norm")  # The code of a graph is not read: maybe it calls this.
            elif kind in kinds.KEYED:
                if not atoms.issuperset(map(type, content)):
                    self.keyed.append(node)
            elif kind is kinds.BUILTIN:
                names.add(value.__name__)
            elif kind is kinds.FUNCTION:
                self._read_code(value, number, is_own)

    def _read_code(self, function: types.FunctionType, number: int, is_own: bool) -> None:
        """What the code of a function names: globals, modules that it imports, attributes."""
        found, nodes, space = self.found, self.found.nodes, function.__globals__
        found.names.add(function.__name__)
        if id(space) not in nodes:
            node = nodes[id(space)] = Node(kinds.GLOBALS, dict, space, {}, number, "__globals__", set())
            self.named[node] = 0
            self.seen.add(id(space))
            found.rest.append(id(space))
        if not is_own:
            self.pending += [(variable, id(space), name) for name, variable in _variables_in(function)]
            return
        looked_up, of_globals, imported = names_in(function.__code__)
        found.names |= looked_up
        if nodes[id(space)].kind is kinds.GLOBALS:  # not a dict that f refers to
            nodes[id(space)].names.update(of_globals)
        found.calls_backward |= "backward" in looked_up
        for name in imported:
            module = sys.modules.get(name)
            found.imported.append((name, module))
            found.draws_elsewhere |= module is None  # an unknown module may draw
            self.pending.append((module, number, _BESIDE))

    def _read_named(self) -> None:
        """Read the attributes that code has named since the last time."""
        names = self.found.names
        is_all_named = self.everything or not names.isdisjoint(_LOOK_UP_ANYTHING)
        for node, known in self.named.items():
            if is_all_named and (node.kind in kinds.OBJECTS or node.kind is kinds.DICT):
                node.names = None
            count = -1 if node.names is None else len(node.names)
            if known == count:
                continue
            self.named[node] = count
            for name, item in kinds.read(node.kind, node.value, node.names).items():
                if name not in node.content:
                    node.content[name] = item
                    if type(item) not in kinds.ATOMS:
                        if name in _OFTEN_EMPTY and not item:
                            self.found.empty.append(item)
                        else:
                            self.pending.append((item, id(node.value), name))


_LONG = 100  # Numbers or characters, from which a key has their hash.


def short(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numbers and strings as a part of a key that outlives them."""
    # (The hashes of -1 and -2 are equal.)
    values = values if len(values) <= _LONG else (*values[:_LONG], hash(repr(values[_LONG:])))
    return tuple([hash(x) if isinstance(x, (str, bytes)) and len(x) > _LONG else x for x in values])


_attributes_of = operator.attrgetter("__dict__")


def _variables_in(function: types.FunctionType) -> Iterator[tuple[str, ContextVar[Any]]]:
    """The context variables in globals of a library's function, where its hooks collect what f computes."""
    for name in names_in(function.__code__)[1]:
        value = function.__globals__.get(name)
        cls: Any = type(value)
        inside = value.__dict__.values() if about(cls).kind is kinds.OBJECT else ()
        for x in (value, *inside):
            if type(x) is ContextVar:
                yield name, x
