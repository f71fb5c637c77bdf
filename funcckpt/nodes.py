"""The objects that a search reaches, and how others like them are made.

A node is an object that was reached; `Rebuild` makes another one like it, in which other tensors stand
for some.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import operator
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import _torch
from .errors import EscapeError, describe
from .lookup import (
    ALLOCATORS,
    GONE,
    Content,
    assigned_by,
    attributes_of,
    global_names,
    imported,
    is_library,
    is_of_library,
    is_own,
    names_of,
)

PARTS = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}
_MODULE_STATE = frozenset(nn.Module().__dict__)
MODULE_HOOKS = frozenset([name for name in _MODULE_STATE - PARTS.keys() if "_hooks" in name])
MODULE_FLAGS = _MODULE_STATE - PARTS.keys() - MODULE_HOOKS
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# Elements up to which a buffer of a training module is copied before the forward, and up to which
# the copy is kept without a sign that the buffer has changed: batch_norm gives none.
MAX_SNAPSHOT = 1 << 20
_MAX_STATISTICS = 1 << 20

# Elements up to which a copy on a device is kept rather than compared.
_MAX_WITHOUT_WAITING = 1 << 12

# How far it spreads that something has to be held as it is: a function whose variables may be
# assigned is copied with what binds it; a module, with whatever refers to it.
_THAWED, BOUND, HELD = 0, 1, 2
Mapped = Mapping[int, Tensor]


def is_tracked(x: Tensor) -> bool:
    """Whether some transform looks at `x`: it requires grad, belongs to a level, or is dual."""
    x = _torch.alive(x)
    if _torch.is_functorch_wrapped_tensor(x):
        return not _torch.is_left_over(x)
    return x.requires_grad or _torch.is_plain_dual(x)


def may_be_statistics(x: Tensor) -> bool:
    """Whether `x` looks like the running statistics that batch_norm updates unseen."""
    return (
        x.dim() == 1
        and x.is_floating_point()
        and not x.requires_grad
        and 0 < x.numel() <= _MAX_STATISTICS
        and (type(x) is Tensor or not isinstance(x, nn.Parameter))
    )


def snapshot_of_statistics(x: Tensor) -> TensorNode | None:
    """`x` as it is now, if it looks like them; to be settled after the first run."""
    if not may_be_statistics(x):
        return None
    node = TensorNode(x, None, "")
    node.take_snapshot(of_buffer=False)
    return node


class Node:
    """An object that was reached, and how another one like it is made."""

    __slots__ = (
        "assigned",
        "children",
        "frozen",
        "items",
        "key",
        "label",
        "needed",
        "parent",
        "shared",
        "value",
    )

    def __init__(self, value: Any, parent: int | None, label: str) -> None:
        self.value = value
        self.key = id(value)
        self.parent = parent
        self.label = label
        # What the object refers to, by name, and the ids of those that may matter.
        self.items: Content = {}
        self.children: dict[Any, int] = {}
        # Whether a tracked tensor is reached from here.
        self.needed = False
        # Whether something is reached from here that has to be held as it is now.
        self.frozen = _THAWED
        # Whether a rebuilt f finds the original.
        self.shared = False
        # What f has assigned in its first run.
        self.assigned: frozenset[Any] = frozenset()

    @property
    def is_copied(self) -> bool:
        """Whether a rebuilt f may find another object in its place."""
        return self.needed

    @property
    def is_of_library(self) -> bool:
        """Whether the object is one of a library's, which stores what it likes (`LSTM._flat_weights`)."""
        return isinstance(self.value, nn.Module) and is_library(type(self.value).__module__)

    def identity(self) -> Any:
        """What tells it from others of its type that refer to the same types by the same names."""
        return None

    def is_made_anew(self, name: Any) -> bool:
        """Whether what has this name is assigned before it is used, in each run."""
        return False

    def names(self) -> frozenset[str]:
        """What the code of this object may look up in classes and Python modules."""
        return frozenset()

    def read(self, value: Any) -> Content:
        """What an object of this kind refers to, by name."""
        return {}

    def extra(self) -> Iterable[tuple[Any, Any]]:
        """What else is reached from it, and is not an item of its own."""
        return ()

    def label_of(self, name: Any) -> str:
        return ""

    def allocate(self, rebuild: Rebuild) -> Any:
        """A new object; complete if it is immutable, and empty otherwise."""
        raise NotImplementedError

    def put(self, target: Any, name: Any, value: Any) -> None:
        """Make an object of this kind refer to something else."""
        raise NotImplementedError

    def remove(self, target: Any, name: Any) -> None:
        """Make it refer to something no more."""
        del target[name]

    def fill(self, new: Any, rebuild: Rebuild) -> None:
        for name in self.items:
            self.put(new, name, rebuild.item(self, name))

    def assignable(self, value: Any) -> Content:
        """The part of `read` that f could assign while it runs."""
        return self.read(value)

    def changed_names(self) -> frozenset[Any]:
        """Under which names the object refers to something else than at the time of the search."""
        return self.differing_names(self.read(self.value))

    def differing_names(self, now: Content) -> frozenset[Any]:
        return frozenset(
            [
                name
                for name in now.keys() | self.items.keys()
                if now.get(name, GONE) is not self.items.get(name, GONE)
            ]
        )

    def has_changed(self) -> bool:
        """Whether something was assigned since that was not f's own doing."""
        changed = self.changed_names() - self.assigned
        # Where f adds something itself, as to a list of its calls, others may as well.
        return len(changed & self.items.keys() if self.assigned else changed) > 0

    def changes(self) -> Iterator[Any]:
        """The items that are others than at the time of the search; new ones do not count."""
        now = self.read(self.value)
        return self.differing(now)

    def differing(self, now: Content) -> Iterator[Any]:
        for name, item in self.items.items():
            if now.get(name, GONE) is not (item() if isinstance(item, Sealed) else item):
                yield name

    def was_assigned(self) -> bool:
        """Whether f, which has just run, assigned something here: `assigned` is what has changed."""
        return len(self.assigned) > 0

    def updated_buffers(self) -> Iterable[Tensor]:
        """Tensors that f may update, and that the recomputation must find as they were."""
        return ()

    def empty(self, needed: Collection[Any]) -> Any:
        """What `allocate` needs of the original, without the items that are `needed`."""
        return type(self.value)

    def copied(self) -> Node:
        """Another node for the same object."""
        node = object.__new__(type(self))
        for kind in type(self).__mro__:
            for name in getattr(kind, "__slots__", ()):
                setattr(node, name, getattr(self, name))
        return node

    def seal(self, nodes: Mapping[int, Node]) -> None:
        needed = {name for name, child in self.children.items() if nodes[child].needed}
        if not self.shared:
            self.value = self.empty(needed)
        for name in needed & self.items.keys():
            item = self.items[name]
            if not self.shared:
                self.items[name] = None
            elif isinstance(item, Tensor):
                self.items[name] = Sealed(item)

    def is_rebuilt(self, rebuild: Rebuild) -> bool:
        return self.needed or (self.frozen > _THAWED and not rebuild.first)


class Sealed(weakref.ref[Tensor]):
    """Stands for a tensor that the graph owns, to tell whether it is still in its place."""

    __slots__ = ()


class NamedNode(Node):
    """An object with attributes, of which only those count that some code may look up."""

    __slots__ = ()

    # The names that the code of the closure looks up. They become more during the search.
    looked_up: set[str]

    @property
    def is_named(self) -> bool:
        """Whether names matter: no library has code for this object."""
        return True

    def named(self, content: Content) -> Content:
        if self._may_look_up_anything():
            return content
        return {name: item for name, item in content.items() if name in self.looked_up}

    def _may_look_up_anything(self) -> bool:
        return not (self.is_named and self.looked_up.isdisjoint(LOOK_UP_ANYTHING))

    def may_look_up(self, name: Any) -> bool:
        return name in self.looked_up or self._may_look_up_anything()


class TensorNode(Node):
    __slots__ = ("is_buffer", "snapshot")

    def __init__(self, value: Any, parent: int | None, label: str) -> None:
        super().__init__(value, parent, label)
        self.is_buffer = False
        # The version and a copy of a tensor that f may update.
        self.snapshot: tuple[int | None, Tensor] | None = None

    def take_snapshot(self, of_buffer: bool) -> None:
        self.is_buffer |= of_buffer
        if self.snapshot is None and self.value.numel() <= MAX_SNAPSHOT:
            copy, _ = _torch.physical(self.value.clone())  # active levels wrap what they make
            self.snapshot = version_of(self.value), copy
            self.frozen = HELD

    def settle(self, writes_unseen: bool) -> bool:
        """Forget a copy that is not needed; whether there is one that is."""
        if self.snapshot is None:
            return False
        version, copy = self.snapshot
        seen = version_of(self.value) != version
        if not (self.is_buffer if seen else self._was_updated_unseen(copy, writes_unseen)):
            self.snapshot = None
            self.frozen = _THAWED
        return self.snapshot is not None

    def _was_updated_unseen(self, before: Tensor, writes_unseen: bool) -> bool:
        is_put_back = may_be_statistics(self.value) or (self.is_buffer and writes_unseen)
        if not (is_put_back or writes_unseen):
            return False
        if _torch.is_tracing() or (
            self.value.device.type != "cpu" and before.numel() <= _MAX_WITHOUT_WAITING
        ):
            return is_put_back  # there is no value yet, or to look would be to wait for the device
        return not torch.equal(_torch.physical(self.value)[0], before)

    def allocate(self, rebuild: Rebuild) -> Any:
        if self.needed:
            return rebuild.mapped[self.key]
        return self.value.clone() if self.snapshot is None else self.snapshot[1].clone()

    def fill(self, new: Any, rebuild: Rebuild) -> None:
        pass

    def seal(self, nodes: Mapping[int, Node]) -> None:
        if self.needed:
            self.value = None


class FunctionNode(Node):
    """A Python function: its cells, defaults, attributes, and the globals that its code names."""

    __slots__ = ("cells", "code", "left", "state")

    def __init__(self, value: Any, parent: int | None, label: str) -> None:
        super().__init__(value, parent, label)
        # Somebody may give it another.
        self.code = value.__code__
        # The ids of its cells, which other functions may share.
        self.cells = dict(zip(value.__code__.co_freevars, map(id, value.__closure__ or ()), strict=True))
        # The variables that some function assigns. They are state, and not constants of the call.
        self.state = assigned_by(value.__code__)
        # Those of them that the first run has not assigned, and what they were.
        self.left: Content = {}

    def assigned_cells(self) -> set[int]:
        return {self.cells[name] for name in self.state if name in self.cells}

    def share(self, assigned: Collection[int]) -> None:
        if assigned:
            self.state |= {name for name, cell in self.cells.items() if cell in assigned}
        if self.cells.keys() - self.state:
            self.frozen = BOUND

    def identity(self) -> Any:
        return self.value.__code__, is_of_library(self.value)

    def leave_state(self, now: Content) -> None:
        """After the first run, which has left what it refers to as it is `now`."""
        self.left = {
            name: item
            for name, item in self.items.items()
            if name[1] in self.state and now.get(name, GONE) is item and not isinstance(item, Tensor)
        }

    def reassigned(self) -> Iterator[Any]:
        if self.left:
            now = self.assignable(self.value)
            for name, item in self.left.items():
                if now.get(name, GONE) is not item:
                    yield name

    def names(self) -> frozenset[str]:
        function = self.value
        return frozenset() if is_of_library(function) else names_of(function.__code__)

    def extra(self) -> Iterable[tuple[Any, Any]]:
        if not is_of_library(self.value):
            for name in imported(self.value.__code__):
                if name in sys.modules:
                    yield ("import", name), sys.modules[name]

    def read(self, value: Any) -> Content:
        code = value.__code__
        content: Content = {}
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # not assigned yet
                content["cell", name] = cell.cell_contents
        if value.__defaults__:
            content["defaults", ""] = value.__defaults__
        if value.__kwdefaults__:
            content["kwdefaults", ""] = value.__kwdefaults__
        if value.__dict__:
            content["dict", ""] = value.__dict__
        if not is_of_library(value):
            for name in global_names(code):
                if name in value.__globals__:
                    content["global", name] = value.__globals__[name]
        return content

    def label_of(self, name: Any) -> str:
        kind, variable = name
        return {
            "cell": f"closure variable {variable!r}",
            "global": f"global {variable!r}",
            "import": f"the imported module {variable!r}",
            "defaults": "a default argument",
            "kwdefaults": "a default argument",
            "dict": "an attribute of the function",
            "code": "the code",
        }[kind]

    def allocate(self, rebuild: Rebuild) -> Any:
        function = self.value
        namespace = function.__globals__
        if any(self._replaces(name, rebuild) for name in self.items):
            namespace = rebuild.namespace(namespace)
        cells = None
        if function.__closure__ is not None:
            names = self.code.co_freevars
            cells = tuple(
                [
                    cell if self._shares(name, rebuild) else rebuild.cell(self.cells[name])
                    for name, cell in zip(names, function.__closure__, strict=True)
                ]
            )
        return _function(function, self.code, namespace, cells)

    def _shares(self, name: str, rebuild: Rebuild) -> bool:
        """Whether a copy keeps the original's cell."""
        if rebuild.replaces(self.children.get(("cell", name))):
            return False
        return rebuild.first or ("cell", name) not in self.items or name in self.state

    def _replaces(self, name: tuple[str, str], rebuild: Rebuild) -> bool:
        """Whether a copy has another value for a global variable than the original has now."""
        kind, variable = name
        if kind != "global":
            return False
        if rebuild.replaces(self.children.get(name)):
            return True
        return not rebuild.first and self._was_reassigned(variable)

    def _was_reassigned(self, variable: str) -> bool:
        function = self.value
        if variable in self.state:
            return False
        return function.__globals__.get(variable) is not self.items["global", variable]

    def changed_names(self) -> frozenset[Any]:
        now = {"defaults": self.value.__defaults__, "kwdefaults": self.value.__kwdefaults__}
        return frozenset(
            [
                name
                for name, item in self.items.items()
                if (name[0] == "global" and self._was_reassigned(name[1]))
                or (name[0] in now and now[name[0]] is not item)
            ]
            + self._changed_code()
        )

    def _changed_code(self) -> list[Any]:
        return [] if self.value.__code__ is self.code else [("code", "")]

    def changes(self) -> Iterator[Any]:
        yield from self._changed_code()
        for name in super().changes():
            if name[1] not in self.state:
                yield name

    def was_assigned(self) -> bool:
        return any(
            self.items.get(name, GONE) is not item for name, item in self.assignable(self.value).items()
        )

    def fill(self, new: Any, rebuild: Rebuild) -> None:
        for name in self.items:
            kind, variable = name
            if kind == "global":
                place = self._replaces(name, rebuild)
            else:
                place = kind != "cell" or not self._shares(variable, rebuild)
            if place:
                self.put(new, name, rebuild.item(self, name))

    def put(self, target: Any, name: Any, value: Any) -> None:
        kind, variable = name
        if kind == "cell":
            index = target.__code__.co_freevars.index(variable)
            target.__closure__[index].cell_contents = value
        elif kind == "global":
            target.__globals__[variable] = value
        elif kind == "defaults":
            target.__defaults__ = value
        elif kind == "kwdefaults":
            target.__kwdefaults__ = value
        else:
            target.__dict__.update(value)

    def remove(self, target: Any, name: Any) -> None:
        kind, variable = name
        if kind == "cell":
            del target.__closure__[target.__code__.co_freevars.index(variable)].cell_contents
        else:
            del target.__globals__[variable]

    def assignable(self, value: Any) -> Content:
        code = value.__code__
        names = self.state
        content: Content = {}
        if not names:
            return content
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            if name in names:
                with suppress(ValueError):
                    content["cell", name] = cell.cell_contents
        for name in names - set(code.co_freevars):
            if name in value.__globals__:
                content["global", name] = value.__globals__[name]
        return content

    def empty(self, needed: Collection[Any]) -> Any:
        function = self.value
        cells = function.__closure__
        if cells is not None:
            cells = tuple(
                [
                    types.CellType() if ("cell", name) in needed else cell
                    for name, cell in zip(self.code.co_freevars, cells, strict=True)
                ]
            )
        return _function(function, self.code, function.__globals__, cells)


_DETAILS = [
    "__qualname__",
    "__module__",
    "__doc__",
    "__annotate__" if sys.version_info >= (3, 14) else "__annotations__",
    *(["__type_params__"] if sys.version_info >= (3, 12) else []),
]


def _function(
    like: types.FunctionType,
    code: types.CodeType,
    namespace: dict[str, Any],
    cells: tuple[types.CellType, ...] | None,
) -> types.FunctionType:
    """A function like another one, around other variables."""
    new = types.FunctionType(code, namespace, like.__name__, None, cells)
    for name in _DETAILS:
        setattr(new, name, getattr(like, name))
    return new


class FrozenNode(Node):
    """An object that is complete when it is made."""

    __slots__ = ()

    def label_of(self, name: Any) -> str:
        return f"item {name}" if isinstance(name, int) else ""

    def fill(self, new: Any, rebuild: Rebuild) -> None:
        pass

    def assignable(self, value: Any) -> Content:
        return {}

    def kind(self) -> type:
        return self.value if isinstance(self.value, type) else type(self.value)


class MethodNode(FrozenNode):
    __slots__ = ()

    def read(self, value: Any) -> Content:
        return {"function": value.__func__, "self": value.__self__}

    def allocate(self, rebuild: Rebuild) -> Any:
        return types.MethodType(rebuild.item(self, "function"), rebuild.item(self, "self"))


class CompiledNode(FrozenNode):
    """A module that `torch.compile` has wrapped: recomputed as it was written."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        return {"": value._orig_mod}

    def allocate(self, rebuild: Rebuild) -> Any:
        return rebuild.item(self, "")


class BuiltinMethodNode(FrozenNode):
    """A bound method that is no Python function: of a tensor, a dict, an iterator, a context variable."""

    __slots__ = ("name",)

    def read(self, value: Any) -> Content:
        self.name = value.__name__
        return {"self": value.__self__}

    def allocate(self, rebuild: Rebuild) -> Any:
        return getattr(rebuild.item(self, "self"), self.name)


class PartialNode(FrozenNode):
    __slots__ = ()

    def read(self, value: Any) -> Content:
        return {
            "function": value.func,
            "args": value.args,
            "keywords": value.keywords,
            "dict": value.__dict__,
        }

    def allocate(self, rebuild: Rebuild) -> Any:
        new = self.kind()(
            rebuild.item(self, "function"),
            *rebuild.item(self, "args"),
            **rebuild.item(self, "keywords"),
        )
        new.__dict__.update(rebuild.item(self, "dict"))
        return new


class TupleNode(FrozenNode):
    __slots__ = ()

    def read(self, value: Any) -> Content:
        return dict(enumerate(value))

    def allocate(self, rebuild: Rebuild) -> Any:
        # A named tuple may have a __new__ of its own, which was called when the original was made.
        return tuple.__new__(self.kind(), [rebuild.item(self, i) for i in self.items])


class IteratorNode(Node):
    """An iterator over a container: a recomputation finds it where it was at the call."""

    __slots__ = ("start",)

    def __init__(self, value: Any, parent: int | None, label: str) -> None:
        super().__init__(value, parent, label)
        self.frozen = HELD
        self.start = copy.copy(value)

    def allocate(self, rebuild: Rebuild) -> Any:
        return copy.copy(self.start)


_CONTAINERS: tuple[Any, ...] = ([], (), {}, {}.values(), {}.items(), set(), "", b"", range(0), range(1 << 70))
ITERATORS = frozenset([type(iter(container)) for container in _CONTAINERS])


class CollectionNode(Node):
    """A list, deque or dict. It may be long: each item that holds nothing should cost as little as it can."""

    __slots__ = ()

    def label_of(self, name: Any) -> str:
        return f"item {name!r}"

    def changed_names(self) -> frozenset[Any]:
        now = self.read(self.value)
        return frozenset() if _are_identical(now, self.items) else self.differing_names(now)

    def allocate(self, rebuild: Rebuild) -> Any:
        return _cleared(self.value)

    def empty(self, needed: Collection[Any]) -> Any:
        return _cleared(self.value)


class SequenceNode(CollectionNode):
    """A list or deque."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        return dict(zip(_first_numbers(len(value)), value, strict=True))

    def changes(self) -> Iterator[Any]:
        return iter(("of another length",)) if len(self.value) != len(self.items) else super().changes()

    def put(self, target: Any, name: Any, value: Any) -> None:
        if name < len(target):
            target[name] = value
        else:
            target.append(value)


class DictNode(CollectionNode):
    __slots__ = ()

    def read(self, value: Any) -> Content:
        return dict(value)

    def put(self, target: Any, name: Any, value: Any) -> None:
        target[name] = value


class ObjectNode(NamedNode):
    """An instance of a Python class: of its `__dict__` and its slots, what some code may look up."""

    __slots__ = ("looked_up", "origin")

    def __init__(self, value: Any, parent: int | None, label: str) -> None:
        super().__init__(value, parent, label)
        self.origin = _weak(value)

    @property
    def is_named(self) -> bool:
        return is_own(type(self.value))

    def read(self, value: Any) -> Content:
        content = attributes_of(value)
        return self.named(content)

    def extra(self) -> Iterable[tuple[Any, Any]]:
        call = inspect.getattr_static(type(self.value), "__call__", None)
        if isinstance(call, types.FunctionType):
            yield "__call__", call
        yield "__class__", type(self.value)

    def label_of(self, name: Any) -> str:
        return "" if name in ("__call__", "__class__") else f"attribute {name!r}"

    def allocate(self, rebuild: Rebuild) -> Any:
        kind = self.value if isinstance(self.value, type) else type(self.value)
        new: Any = next(base for base in ALLOCATORS if issubclass(kind, base)).__new__(kind)
        # What nobody looks up by a name that is known is what it is now.
        for name, item in attributes_of(self.origin()).items():
            if not self.may_look_up(name):
                self.put(new, name, item)
        return new

    def put(self, target: Any, name: Any, value: Any) -> None:
        object.__setattr__(target, name, value)

    def remove(self, target: Any, name: Any) -> None:
        object.__delattr__(target, name)


class _Places(dict[str, tuple[str, str]]):
    """The names by which `ModuleNode` knows what is in one part of a module: the same tuples each time."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __missing__(self, name: str) -> tuple[str, str]:
        if len(self) >= _MANY_PLACES:
            self.clear()
        place = self[name] = self._part, name
        return place


_MANY_PLACES = 4096
_PLACES = {part: _Places(part) for part in (*PARTS, "")}


class ModuleNode(NamedNode):
    """An `nn.Module`: parameters, buffers, submodules and attributes, as they are at the call.

    Buffers of a module that is training are copied before the forward: f may update them (running
    statistics, the vectors of spectral norm), and the recomputation has to start from what they
    were, and must not update them again.
    """

    __slots__ = ("computed", "hooks", "looked_up", "origin", "parameters", "state", "type")

    def __init__(self, value: Any, parent: int | None, label: str) -> None:
        super().__init__(value, parent, label)
        self.frozen = HELD
        self.type = type(value)
        self.origin = _weak(value)
        state = value.__dict__
        self.parameters = {name for name, x in state["_parameters"].items() if _is_parameter(x)}
        # What weight_norm, spectral_norm and prune of torch.nn.utils assign before each forward.
        self.computed: Collection[Any] = ()
        if hooks := state["_forward_pre_hooks"]:
            self.computed = {
                ("", getattr(hook, "name", None) or getattr(hook, "_tensor_name", None))
                for hook in hooks.values()
                if type(hook).__module__.startswith("torch.nn.utils.")
            }
        self.state = {name: state[name] for name in MODULE_FLAGS if name in state}
        # Hooks may be registered and removed later: these are there now.
        self.hooks = {name: state[name].copy() for name in MODULE_HOOKS if state.get(name)}

    @property
    def is_named(self) -> bool:
        return is_own(self.type)

    def read(self, value: Any) -> Content:
        state = value.__dict__
        content: Content = {}
        for part in PARTS:
            if items := state[part]:
                content.update(zip(map(_PLACES[part].__getitem__, items), items.values(), strict=True))
        attributes = {name: state[name] for name in state if name not in _MODULE_STATE}
        if attributes:
            attributes = self.named(attributes)
        for name in _HOOKS:
            if item := state.get(name):
                attributes[name] = item
        if attributes:
            names = map(_PLACES[""].__getitem__, attributes)
            content.update(zip(names, attributes.values(), strict=True))
        return content

    def extra(self) -> Iterable[tuple[Any, Any]]:
        forward = getattr(self.type, "forward", None)
        if isinstance(forward, types.FunctionType):
            yield ("", "forward"), forward
        yield ("", "__class__"), self.type

    def changes(self) -> Iterator[Any]:
        yield from super().changes()
        now = self.value.__dict__
        for name, item in self.state.items():
            if now.get(name) != item:
                yield "", name
        for name in MODULE_HOOKS:
            if (now.get(name) or None) != self.hooks.get(name):
                yield "", name

    def label_of(self, name: Any) -> str:
        part, attribute = name
        if attribute == "__class__":
            return ""
        return f"{PARTS.get(part, 'attribute')} {attribute!r}"

    def allocate(self, rebuild: Rebuild) -> Any:
        new = object.__new__(self.type)
        state = {**self.state, **{name: OrderedDict() for name in MODULE_HOOKS}, **self.hooks}
        for part in PARTS:
            state[part] = {}
        origin = self.origin()
        if origin is not None and not self._may_look_up_anything():
            for name, item in origin.__dict__.items():
                if name not in _MODULE_STATE and name not in self.looked_up:
                    state[name] = item  # as in other objects
        object.__setattr__(new, "__dict__", state)
        forward = self.children.get(("", "forward"))
        node = None if forward is None else rebuild.nodes.get(forward)
        if node is not None and ("", "forward") not in self.items:
            # The class is shared; an instance may have a forward of its own.
            if node.needed or node.frozen == HELD or getattr(self.type, "forward", None) is not node.value:
                state["forward"] = types.MethodType(rebuild.build(forward), new)
        return new

    def is_made_anew(self, name: Any) -> bool:
        return name in self.computed

    def changed_names(self) -> frozenset[Any]:
        return super().changed_names() - frozenset(self.computed)

    def updated_buffers(self) -> Iterable[Tensor]:
        if self.value.training:
            return [x for x in self.value._buffers.values() if isinstance(x, Tensor)]
        return ()

    def put(self, target: Any, name: Any, value: Any) -> None:
        part, attribute = name
        if part:
            if part == "_parameters" and attribute in self.parameters and type(value) is Tensor:
                value._is_param = True  # what `isinstance(value, nn.Parameter)` asks
            target.__dict__[part][attribute] = value
        else:
            target.__dict__[attribute] = value

    def remove(self, target: Any, name: Any) -> None:
        part, attribute = name
        del (target.__dict__[part] if part else target.__dict__)[attribute]

    def empty(self, needed: Collection[Any]) -> Any:
        return None


class FixedNode(Node):
    """What no copy can stand for: f finds the original."""

    __slots__ = ()

    @property
    def is_copied(self) -> bool:
        return False

    def is_rebuilt(self, rebuild: Rebuild) -> bool:
        return False

    def label_of(self, name: Any) -> str:
        return f"item {name!r}"


LOOK_UP_ANYTHING = (
    *("getattr", "setattr", "__getattribute__", "vars", "__dict__", "__slots__"),
    *("attrgetter", "asdict", "astuple", "fields", "copy"),
)


class Rebuild:
    """One rebuilding of a closure: shared and cyclic references stay shared and cyclic."""

    def __init__(self, nodes: Mapping[int, Node], mapped: Mapped, first: bool) -> None:
        self.nodes = nodes
        self.mapped = mapped
        self.first = first
        self._built: dict[int, Any] = {}
        self._namespaces: dict[int, dict[str, Any]] = {}
        self._placed: list[tuple[Node, Any, Content]] = []
        self._unfilled: list[tuple[Node, Any]] = []
        self._filling = False
        self._cells: dict[int, types.CellType] = {}

    def build(self, key: int | None) -> Any:
        if key is None:
            return None
        node = self.nodes[key]
        if not node.is_rebuilt(self):
            return node.value
        if key in self._built:
            return self._built[key]
        is_outermost = not self._filling
        self._filling = True
        try:
            new = self._built[key] = node.allocate(self)
            if isinstance(node, DictNode):  # a partial function takes what is in it
                self._fill(node, new)
            else:
                self._unfilled.append((node, new))
            # One after another, since references may be longer than Python's stack is deep.
            while is_outermost and self._unfilled:
                self._fill(*self._unfilled.pop())
        finally:
            self._filling = not is_outermost
        return new

    def _fill(self, node: Node, new: Any) -> None:
        node.fill(new, self)
        if self.first:
            self._placed.append((node, new, node.assignable(new)))

    def item(self, node: Node, name: Any) -> Any:
        """What stands for the thing that `node` calls `name`."""
        child = node.children.get(name)
        if child in self.nodes:
            return self.build(child)
        item = node.items[name]
        return item if child is None else self.mapped.get(child, item)

    def replaces(self, key: int | None) -> bool:
        """Whether another object stands for the one with an id, if there is one."""
        node = None if key is None else self.nodes.get(key)
        return node is not None and node.is_rebuilt(self)

    def cell(self, original: int) -> types.CellType:
        """The cell that stands for one, given by its id, in all functions of a rebuilding."""
        return self._cells.setdefault(original, types.CellType())

    def namespace(self, original: dict[str, Any]) -> dict[str, Any]:
        """A copy of a module's globals, the same for all functions of a rebuilding."""
        if id(original) not in self._namespaces:
            self._namespaces[id(original)] = dict(original)
        return self._namespaces[id(original)]

    def write_back(self, name_of_f: str) -> None:
        """Repeat on the originals what f assigned on the copies."""
        originals = {id(new): self.nodes[key].value for key, new in self._built.items()}
        for node, new, placed in self._placed:
            now = node.assignable(new)
            for name, value in now.items():
                if (name in placed and placed[name] is value) or node.is_made_anew(name):
                    continue
                if isinstance(value, Tensor) and (constant := _torch.constant_of(value)) is not None:
                    value = constant  # a table, made once
                    originals[id(value)] = value
                leaves, structure = pytree.tree_flatten(value, is_leaf=lambda x: id(x) in originals)
                for x in leaves:
                    is_escape = isinstance(x, Tensor) and id(x) not in originals
                    if is_escape and (x is value or not node.is_of_library):
                        raise EscapeError(
                            f"remat({name_of_f}) stores a tensor ({describe(x)}) as "
                            f"{node.label_of(name)}. It belongs to the inside of the checkpoint, and its "
                            "gradient would be lost: return it from the function."
                        )
                if any(id(x) in originals for x in leaves):
                    value = pytree.tree_unflatten([originals.get(id(x), x) for x in leaves], structure)
                node.put(node.value, name, value)
            for name in reversed([name for name in placed if name not in now]):
                node.remove(node.value, name)
        for node in self.nodes.values():
            if isinstance(node, FixedNode):
                for name, value in node.read(node.value).items():
                    if id(value) in originals and value is not originals[id(value)]:
                        raise EscapeError(
                            f"remat({name_of_f}) stores an object ({type(value).__name__}) as "
                            f"{node.label_of(name)}. Under a transform it is a copy: return it from the "
                            "function."
                        )


def _is_parameter(x: Any) -> bool:
    return type(x) is nn.Parameter or isinstance(x, nn.Parameter)


def version_of(x: Tensor) -> int | None:
    """How often `x` was changed in place; inference tensors do not count."""
    return None if x.is_inference() else x._version


def versions_of(tensors: Iterable[Tensor]) -> list[int | None]:
    tensors = [*tensors]
    try:
        return [*map(_version, tensors)]
    except RuntimeError:  # inference tensors have none
        return [*map(version_of, tensors)]


_version = operator.attrgetter("_version")


def _are_identical(now: Content, before: Content) -> bool:
    """Whether two mappings have the same objects for keys and values, in the same order."""
    return (
        len(now) == len(before)
        and all(map(operator.is_, now, before))
        and all(map(operator.is_, now.values(), before.values()))
    )


_numbers: tuple[int, ...] = ()


def _first_numbers(count: int) -> Iterator[int]:
    """The numbers from 0, the same objects each time."""
    global _numbers
    if len(_numbers) < count:
        _numbers = (*_numbers, *range(len(_numbers), 2 * count))
    return itertools.islice(_numbers, count)


def _cleared(value: Any) -> Any:
    """An empty container like `value`, with its options (`default_factory`, `maxlen`)."""
    new = value.copy()
    new.clear()
    return new


def _weak(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: None
