"""What a search has found in modules, told again by identity.

A model that was searched is most often as it was when it is searched the next time, after the forward, and
before the recomputation. A `View` knows on which values that depends, reads them in loops that run in C, and
compares their ids: it visits no node. It holds no module and no tensor, and is over with the first of the
objects that it knows, so that while it lasts an id stands for one object.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, compress, islice, repeat
from typing import Any

from torch import Tensor

from . import _torch
from .fixed import (
    ClassNode,
    ContainerNode,
    DescriptorNode,
    MappingNode,
    MemberNode,
    PythonModuleNode,
    SetNode,
)
from .lookup import (
    ATOMS,
    GONE,
    Cached,
    Content,
    global_names,
    has_slots,
    imported,
    is_of_library,
    own_classes,
)
from .nodes import (
    MODULE_FLAGS,
    PARTS,
    DictNode,
    FunctionNode,
    MethodNode,
    ModuleNode,
    Node,
    ObjectNode,
    PartialNode,
    Rebuild,
    SequenceNode,
    TensorNode,
    TupleNode,
)

_MIN_TRIES, _MAX_VIEWS = 8, 1024
# Objects that are found by their places; any others by weak references, or held.
_PLACED = (
    *(DictNode, SequenceNode, TupleNode, MethodNode, PartialNode, ObjectNode),
    *(SetNode, MappingNode, ContainerNode, DescriptorNode, MemberNode),
)
_HELD = (ClassNode, PythonModuleNode)
# Hooks that a call runs, if there are any; what else is written of a hook is nothing without them. No view is
# made for code that asks for a state_dict, which runs others, and tells which buffers are saved.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_FLAGS = sorted(MODULE_FLAGS - {"_non_persistent_buffers_set"})
# What reading raises where an object is no more what it was.
_CHANGED = (AttributeError, IndexError, KeyError, TypeError, ValueError)

_forward_of = operator.attrgetter("forward")
state_of = operator.attrgetter("__dict__")
parts_of = operator.itemgetter(*PARTS)
hooks_of = operator.itemgetter(*_HOOKS)
values_of = operator.methodcaller("values")
_details_of = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__", "__dict__")
_cells_of = operator.attrgetter("__closure__")
_content_of = operator.attrgetter("cell_contents")
_requires_grad = operator.attrgetter("requires_grad")


class NoView(Exception):
    """Something was found that is not told by the ids of what it refers to."""


class _Values(list[Any]):
    """A list to which one may refer weakly."""

    __slots__ = ("__weakref__",)


class _StandIn(Node):
    """The first of the nodes of a view to which others refer."""

    __slots__ = ()

    def is_rebuilt(self, rebuild: Rebuild) -> bool:
        return False  # it was looked at, and is what it was


class _UnchangedModule(ModuleNode):
    """A module that is as it was: its copy takes over what it has now."""

    __slots__ = ()

    def __init__(self, value: Any, template: ModuleNode) -> None:
        self.value, self.key, self.type = value, template.key, template.type
        self.parameters, self.needed = template.parameters, True
        # What is not as it was: what leads to other tensors.
        self.children = {}

    def allocate(self, rebuild: Rebuild) -> Any:
        new = object.__new__(self.type)
        state = self.value.__dict__.copy()
        for part in PARTS:
            state[part] = state[part].copy()
        object.__setattr__(new, "__dict__", state)
        return new

    def fill(self, new: Any, rebuild: Rebuild) -> None:
        for name, child in self.children.items():
            item: Any = rebuild.build(child) if child in rebuild.nodes else rebuild.mapped[child]
            is_forward = name == ("", "forward") and "forward" not in self.value.__dict__
            self.put(new, name, types.MethodType(item, new) if is_forward else item)


class Views(dict[tuple[int, ...], "View"]):
    """The views for a plan, by the ids of what others refer to in them."""

    def __init__(self) -> None:
        self._made = self._used = 0

    def find(self, keys: tuple[int, ...]) -> tuple[View, list[Any], list[Tensor], list[Tensor]] | None:
        """A view that holds, the values in it, and of them the tensors that are tracked, and the others."""
        view = self.get(keys)
        if view is not None:
            values = view.values()
            tensors = None if values is None else view.tensors(values)
            if values is not None and tensors is not None:
                self._used += 1
                return view, values, *tensors
            self.pop(keys, None)
        return None

    def make(self, keys: tuple[int, ...], nodes: Sequence[Node]) -> None:
        """A view of nodes, if there can be one. What changes all the time gets none in the end."""
        if self._made > _MIN_TRIES + self._used:
            return
        self._made += 1
        if len(self) >= _MAX_VIEWS:
            self.clear()
        with suppress(NoView):
            self[keys] = View(nodes, functools.partial(self.pop, keys, None))


class View:
    """What is reached from some modules, as a search has found it in plain eager code.

    Parameters
    ----------
    nodes : sequence of Node
        All that is reached, from the search. They are not kept.
    forget : callable
        Called when an object is no more that the view knows.

    Raises
    ------
    NoView
        There can be none.
    """

    def __init__(self, nodes: Sequence[Node], forget: Callable[[], Any]) -> None:
        if not all(map(_is_viewable, nodes)):
            raise NoView

        def of(*kinds: type) -> list[Any]:
            return [node for node in nodes if type(node) in kinds]

        modules, functions, tensors = of(ModuleNode), of(FunctionNode), of(TensorNode)
        self._modules = [weakref.ref(node.value) for node in modules]
        self._kinds = [node.type for node in modules]
        self._kinds_once = {*self._kinds}
        self._functions = [weakref.ref(node.value) for node in functions]
        # Which parts of modules are filled; and of their attributes those that somebody may look up.
        parts = [*chain.from_iterable([parts_of(node.value.__dict__) for node in modules])]
        self._filled, self._empty = [*map(bool, parts)], [*map(operator.not_, parts)]
        self._attributes_of = [_attributes_of(node) for node in modules]
        # The dicts of classes; and calls that give what is looked up by name.
        self._classes = [base.__dict__ for node in of(ClassNode) for base in own_classes(node.value)]
        self._look_ups = [look_up for node in (*functions, *of(*_HELD)) for look_up in _look_ups_of(node)]
        self._placed: list[tuple[Node, int]] = []
        self._place([node for node in of(*_PLACED) if not _is_atomic(node.value)])
        read = self._read()
        if read is None:
            raise NoView
        values, self._names = read
        # Modules and functions come first. They are there, for there are references to them.
        self._known = len(modules) + len(functions)
        ids = [*map(id, values)]
        self._ids = ids[self._known :]
        self.places = {key: i for i, key in reversed([*enumerate(ids)])}
        # Each node without what it refers to, and where that is among the values.
        self._templates = {node.key: (_bare(node), self._items(node)) for node in nodes}
        self._referrers: dict[int, list[tuple[int, Any]]] = {}
        for node in nodes:
            for name, child in node.children.items():
                self._referrers.setdefault(child, []).append((node.key, name))
        self._tensors = [self.places[node.key] for node in tensors]
        self._types = [type(node.value) for node in tensors]
        self._tracked = [node.needed for node in tensors]
        updated = {id(x) for node in modules for x in node.updated_buffers()}
        self.updated = [self.places[node.key] for node in tensors if node.key in updated]
        self.caches = [self.places[node.key] for node in nodes if isinstance(node.value, Cached)]
        if self.tensors(values) is None:
            raise NoView
        # The values that calls may hold: those that nodes refer to, and that lead to no tracked tensor.
        needed = {node.key for node in nodes if node.needed}
        used = {self.places[node.key] for node in nodes if type(node) not in _HELD}
        used.update(*[items.values() for _, items in self._templates.values()])
        self._may_be_held = [i in used and key not in needed for i, key in enumerate(ids)]
        self._emptied = [
            key for key in needed if type(self._templates[key][0]) not in (ModuleNode, TensorNode)
        ]
        self._sealed: Callable[[], _Values | None] = lambda: None
        self._is_over: list[Any] = []
        over = self._is_over

        def end(_: Any) -> None:
            over.append(True)
            forget()

        self._watched = [*_watched(nodes, end)]

    def _items(self, node: Node) -> Content:
        return {name: self.places[id(item)] for name, item in node.items.items()}

    def _place(self, nodes: Collection[Node]) -> None:
        """Find where these are among the values, those of each other included."""
        while nodes:
            values, _ = self._read() or ((), ())
            where = {id(value): i for i, value in reversed([*enumerate(values)])}
            found = [(_bare(node), where[node.key]) for node in nodes if node.key in where]
            if not found:
                raise NoView
            self._placed += found
            nodes = [node for node in nodes if node.key not in where]

    def _read(self) -> tuple[list[Any], list[tuple[Any, ...]]] | None:
        """All values and all names that there are now; None if something is not what it was."""
        modules = [reference() for reference in self._modules]
        functions = [reference() for reference in self._functions]
        if [*map(type, modules)] != self._kinds:
            return None
        try:
            states = [*map(state_of, modules)]
            parts = [*chain.from_iterable(map(parts_of, states))]
            if any(compress(parts, self._empty)) or any(chain.from_iterable(map(hooks_of, states))):
                return None
            filled = [*compress(parts, self._filled), *self._classes]
            values = [
                *modules,
                *functions,
                *chain.from_iterable(map(values_of, filled)),
                *chain.from_iterable(
                    [of(state) for of, state in zip(self._attributes_of, states, strict=True)]
                ),
                *map(_forward_of, self._kinds_once),
                *chain.from_iterable(map(_details_of, functions)),
                *map(bool, map(state_of, functions)),
                *map(_content_of, chain.from_iterable(filter(None, map(_cells_of, functions)))),
                *chain.from_iterable([look_up() for look_up in self._look_ups]),
            ]
            for node, place in self._placed:
                values += _content(node, values[place])
        except _CHANGED:
            return None
        return values, [*map(tuple, states), *map(tuple, filled)]

    def values(self) -> list[Any] | None:
        """The values, if they are the same as in the search; None if not."""
        values, names = self._read() or (None, None)
        if values is None or names != self._names or self._is_over:
            return None
        return values if [*map(id, islice(values, self._known, None))] == self._ids else None

    def tensors(self, values: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]] | None:
        """The tensors that are tracked, and the others; None if they are not as in the search."""
        tensors = [values[i] for i in self._tensors]
        tracked = [*map(_requires_grad, tensors)]
        if tracked != self._tracked or [*map(type, tensors)] != self._types:
            return None
        if any(map(_torch.is_functorch_wrapped_tensor, tensors)):
            return None
        return [*compress(tensors, tracked)], [*compress(tensors, map(operator.not_, tracked))]

    def sealed(self, values: Sequence[Any]) -> Sequence[Any]:
        """The same values without tracked tensors, and what leads to them. All calls share them."""
        sealed = self._sealed()
        if sealed is None:
            held = zip(values, self._may_be_held, strict=True)
            sealed = _Values([value if may_be_held else None for value, may_be_held in held])
            for key in self._emptied:
                node = self.node(key, values)
                needed = {name for name, child in node.children.items() if self._templates[child][0].needed}
                sealed[self.places[key]] = node.empty(needed)
            self._sealed = weakref.ref(sealed)
        return sealed

    def node(self, key: int, values: Sequence[Any]) -> Node:
        """The node with an id, as the search has made it."""
        template, items = self._templates[key]
        node = template.copied()
        node.items = {name: values[i] for name, i in items.items()}
        if type(node) not in _HELD:
            node.value = values[self.places[key]]
        return node

    def nodes(self, values: Sequence[Any]) -> dict[int, Node]:
        return {key: self.node(key, values) for key in self._templates}

    def leading_to(self, keys: Iterable[int], values: Sequence[Any]) -> dict[int, Node]:
        """The nodes of some objects, and those from which they are reached. Tensors need none."""
        found: dict[int, Node] = {}
        pending = [key for key in keys if key in self._templates]
        seen = {*pending}
        while pending:
            key = pending.pop()
            template, _ = self._templates[key]
            if key not in found and type(template) is not TensorNode:
                found[key] = self._on_the_way(key, values)
            for referrer, name in self._referrers.get(key, ()):
                if referrer not in found:
                    found[referrer] = self._on_the_way(referrer, values)
                if isinstance(way := found[referrer], _UnchangedModule):
                    way.children[name] = key
                if referrer not in seen:
                    seen.add(referrer)
                    pending.append(referrer)
        return found

    def _on_the_way(self, key: int, values: Sequence[Any]) -> Node:
        template, _ = self._templates[key]
        if type(template) is ModuleNode:
            return _UnchangedModule(values[self.places[key]], template)
        return self.node(key, values)

    def stand_in(self, key: int, value: Any) -> Node:
        """A node for one of the objects, that does not lead on."""
        template, _ = self._templates[key]
        if type(template) is TensorNode:
            node = template.copied()
            node.value = value
        else:
            node = _StandIn(value, None, "")
            node.needed, node.frozen, node.shared = template.needed, template.frozen, template.shared
        return node

    def __contains__(self, key: int) -> bool:
        return key in self._templates


def _is_viewable(node: Node) -> bool:
    value = node.value
    if type(node) is TensorNode:
        return not (node.needed and node.shared) and not _torch.is_functorch_wrapped_tensor(value)
    if type(node) is ModuleNode:
        return not node.computed
    if isinstance(node, FunctionNode):
        module = sys.modules.get(value.__globals__.get("__name__"))
        is_of_module = module is not None and module.__dict__ is value.__globals__
        return not node.assigned_cells() and (is_of_module or is_of_library(value))
    if type(node) is ObjectNode:
        return not has_slots(type(value))
    return type(node) in (*_PLACED, *_HELD)


def _attributes_of(node: ModuleNode) -> Callable[[Content], Iterable[Any]]:
    looked_up = [name for part, name in node.items if not part]
    return getter((*_FLAGS, *looked_up))


@functools.lru_cache(maxsize=4096)
def getter(names: tuple[str, ...]) -> Callable[[Content], Iterable[Any]]:
    return operator.itemgetter(*names)


def _look_ups_of(node: Node) -> Iterator[Callable[[], Iterable[Any]]]:
    value = node.value
    if isinstance(node, ClassNode):
        yield functools.partial(getattr, value, "__mro__")
    elif isinstance(node, PythonModuleNode):
        yield functools.partial(map, value.__dict__.get, tuple(node.looked_up), repeat(GONE))
    elif isinstance(node, FunctionNode):
        names = [*node.state]
        if not is_of_library(value):
            names += global_names(value.__code__)
            yield functools.partial(map, sys.modules.get, imported(value.__code__), repeat(GONE))
        yield functools.partial(map, value.__globals__.get, names, repeat(GONE))


def _is_atomic(value: Any) -> bool:
    """Whether a value is a tuple of numbers and names, which holds nothing, and stays what it is."""
    return type(value) is tuple and ATOMS.issuperset(map(type, value))


def _content(node: Node, value: Any) -> list[Any]:
    """The values that tell what an object refers to."""
    kind = type(value)
    if type(node) is ObjectNode:
        return [
            kind,
            *[base.__dict__.get("__call__") for base in kind.__mro__],
            *(d := getattr(value, "__dict__", {})),
            *d.values(),
        ]
    items = node.read(value)
    if isinstance(node, SetNode):  # its names are made anew
        return [kind, *value]
    names = chain.from_iterable(items) if isinstance(node, ContainerNode) else items
    return [kind, *names, *items.values()]


def _bare(node: Node) -> Node:
    """A node that holds only what nothing is held by."""
    bare = node.copied()
    bare.items = {}
    if type(node) not in _HELD:
        bare.value = None
    if isinstance(bare, TensorNode):
        bare.snapshot = None
    return bare


def _watched(nodes: Iterable[Node], end: Callable[[Any], None]) -> Iterator[Any]:
    """References that make sure that no id is another object's: to what holds nothing, and weak ones."""
    placed = {node.key for node in nodes if type(node) in _PLACED and not _is_atomic(node.value)}
    for node in nodes:
        yield from getattr(node.value, "__dict__", ()) if type(node) is ObjectNode else node.items
        if isinstance(node, FunctionNode):
            yield node.value.__code__
        for value in (*node.items.values(), *[value for _, value in node.extra()]):
            if type(value) in ATOMS or _is_atomic(value) or isinstance(value, type | types.ModuleType):
                yield value
            elif not isinstance(value, Tensor) and id(value) not in placed:
                try:
                    yield weakref.ref(value, end)
                except TypeError:
                    raise NoView from None
