"""f around other tensors, and in its state at the call.

To rebuild f, each object that leads to a replaced or changed object is copied: functions with new cells and
globals, containers, shallow copies of modules and objects. All other objects are shared with the original.
Copies need no lock and no undo, and threads may share f.

A class or a context variable cannot be copied. Its old content is put back during a run.
"""

from __future__ import annotations

import gc
import operator
import sys
import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from .._torch.objects import is_pullback
from . import kinds
from .code import is_library
from .find import Found
from .kinds import Hole, Node

_DEEPEST = 20  # tuples and functions in each other: deeper ones are chains, and no tables
_WRITABLE = frozenset({kinds.CELL, kinds.LIST, kinds.RECORD, *kinds.MAPPINGS, *kinds.OBJECTS})


def put_marks(x: Tensor, attributes: dict[str, Any], cls: Any) -> None:
    """Give a tensor that stands for another one what f can see of that: its attributes, and its class.

    Not a class for which torch keeps something else.
    """
    x.__dict__.update(attributes | x.__dict__)
    if cls is Tensor or type(x) is not Tensor:
        return
    if cls is not nn.Parameter and cls.__torch_dispatch__ is Tensor.__torch_dispatch__:
        x.__class__ = cls
    elif nn.Parameter in cls.__mro__:
        x._is_param = True  # type: ignore[attr-defined]


class Rebuilt:
    """A context manager around one run of the rebuilt f, which is its attribute `callable`.

    Shared and cyclic references stay shared and cyclic.
    """

    def __init__(self, found: Found, mapped: dict[int, Any], changed: Iterable[int] = ()) -> None:
        """`mapped` has replacements of tensors, by id."""
        self._nodes = found.nodes
        self._dirty = found.leading_to({*mapped, *changed, *found.gone})
        # The replacement of each object, by id of the original; `originals` is the inverse.
        self._built: dict[int, Any] = {**mapped}
        self.originals: dict[int, Any] = {}
        for number, x in mapped.items():
            attributes, cls = found.marks.get(number, ({}, Tensor))
            if (original := found.tensors.get(number)) is not None:
                attributes, cls, self.originals[id(x)] = original.__dict__, type(original), original
            if cls is nn.Parameter and not attributes:  # as nearly always: without a call
                x._is_param = True  # type: ignore[attr-defined]
            elif attributes or cls is not Tensor:
                put_marks(x, attributes, cls)
        # The initial content of copies to which f may write.
        self._placed: dict[int, dict[Any, Any]] = {}
        # Classes and context variables, with their content now and during the run.
        self._put_back: list[tuple[Node, dict[Any, Any], dict[Any, Any]]] = []
        # Dicts that have modules as keys. They are filled at the end: a hash may read attributes.
        self._keyed: list[tuple[int, dict[Any, Any], dict[int, Any]]] = []
        self.callable = found.root
        # Whether copies refer to each other; the ids of those whose content is being made; all copies; what
        # they hold that is no copy: attributes of objects, and the cells of functions.
        self.is_cyclic = False
        self._open: set[int] = set()
        self._made: list[Any] = []
        self._spaces: list[Any] = []

    def __enter__(self) -> Any:
        self.callable = self._items({"": self.callable})[""]
        for number, node in self._nodes.items():
            if node.kind not in kinds.FIXED:
                continue
            held = {number, *[x.number if type(x) is Hole else id(x) for x in node.content.values()]}
            if not held.isdisjoint(self._dirty):
                now = kinds.read(node.kind, node.value, node.names)
                self._put_back.append((node, now, self._items(node.content)))
        for number, items, keys in self._keyed:
            placed = self._placed[number] = {keys[id(key)]: x for key, x in items.items()}
            _put(self._nodes[number].kind, self._built[number], {}, placed)
        for node, now, then in self._put_back:
            _put(node.kind, node.value, now, then)
        return self.callable

    def __exit__(self, kind: Any, *exception: Any) -> None:
        if kind is None:  # items appended to copies of lists are appended to the originals
            for number, placed in self._placed.items():
                there = self._nodes[number].value
                if isinstance(there, list):
                    there.extend(self._built[number][len(placed) :])
        for node, now, then in self._put_back:
            there = kinds.read(node.kind, node.value, node.names)
            if node.kind is not kinds.LOCAL:  # another thread may have written other attributes meanwhile
                there = {name: x for name, x in then.items() if name in there}
            _put(node.kind, node.value, there, now)

    def _items(self, content: dict[Any, Any]) -> dict[Any, Any]:
        """The content of an object, with replacements."""
        built, dirty = self._built, self._dirty
        items = {}
        for name, x in content.items():
            number = x.number if type(x) is Hole else id(x)
            if number in built:
                x = built[number]
                self.is_cyclic |= number in self._open
            elif number in dirty:
                x = self._make(number)
            elif type(x) is Hole:
                x = x.ref()
            items[name] = x
        return items

    def _make(self, number: int) -> Any:
        """A copy of an object, with replacements in its content."""
        node = self._nodes[number]
        kind, value, cls = node.kind, node.value, node.cls
        if kind in kinds.FIXED:
            return value
        if kind in _WRITABLE:
            if kind is kinds.CELL:
                new: Any = types.CellType()
            elif kind in kinds.OBJECTS:
                base = types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object
                new = base.__new__(_without_finalizer(cls) if hasattr(cls, "__del__") else cls)
            else:
                new = {} if cls is dict else kinds.emptied(node.like if value is None else value)
            self._built[number] = new  # before its content is made, which may refer to it
            self._open.add(number)
            items = self._items(node.content)
            self._open.remove(number)
            if kind in kinds.OWNERS:
                self._spaces.append(new.__dict__)
            if kind in kinds.KEYED and not {*map(id, items)}.isdisjoint(self._dirty):
                self._keyed.append((number, items, self._items({id(key): key for key in items})))
                items = {}
            self._placed[number] = items
            original = value
            if value is None and isinstance(node.like, weakref.ref):
                original = node.like()
            if original is not None and node.names is not None:  # other attributes are as they are now
                now = kinds.read(kind, original)
                items = {name: x for name, x in now.items() if name not in node.names} | items
            if cls is dict or kind in kinds.SPACES:
                (new if cls is dict else new.__dict__).update(items)
            else:
                _put(kind, new, {}, items)
        else:
            items = self._items(node.content)
            if number in self._built:  # it refers to itself, and is made already
                return self._built[number]
            new = _made_of(kind, cls, items)
            if kind is kinds.FUNCTION:
                self._spaces.append(new.__closure__)
            self._built[number] = new
        self.originals.setdefault(id(new), value)
        self._made.append(new)
        return new

    def release(self) -> None:
        """Empty copies that refer to each other, if nothing else does: they would wait for the collector."""
        made, spaces = self._made, self._spaces
        self.__dict__.clear()  # lets go of all else
        held = Counter(map(id, gc.get_referents(*made, *spaces)))
        # To this object only this method refers, as to the others: by the list, the loop and the argument.
        made.append(object())
        *counts, alone = [sys.getrefcount(x) for x in made]
        if any([count > held[id(x)] + alone for x, count in zip(made, counts, strict=False)]):
            return
        for space in spaces:
            if isinstance(space, dict):
                space.clear()
        for x in made:
            if type(x) is types.CellType:
                del x.cell_contents
            elif type(x) is dict:  # such as the globals of a function that is in them
                x.clear()

    def write_back(self) -> None:
        """Repeat on the originals what f assigned to copies in its first run."""
        get, assigned, self._placed = self.originals.get, self._placed, {}
        for node, now, then in self._put_back:
            after = kinds.read(node.kind, node.value, node.names)
            for name in then.keys() - after.keys():
                now.pop(name, None)
            for name, x in after.items():
                if name not in then or then[name] is not x:
                    now[name] = get(id(x), x)
        for number, placed in assigned.items():
            node, copy = self._nodes[number], self._built[number]
            if node.cls is dict or node.kind in kinds.SPACES:  # as nearly always, and faster
                there = copy if node.cls is dict else copy.__dict__
                keys = there.keys() if node.names is None else there.keys() & node.names
                if keys == placed.keys() and all(map(operator.is_, map(there.get, placed), placed.values())):
                    continue
            now = kinds.read(node.kind, copy, node.names)
            if now.keys() != placed.keys() or not all(map(operator.is_, map(placed.get, now), now.values())):
                anew = _made_anew(node)
                before, after = [
                    {get(id(name), name): get(id(x), x) for name, x in items.items() if name not in anew}
                    for items in (placed, now)
                ]
                _put(node.kind, node.value, before, after)


def put_back(found: Found) -> None:
    """Undo what f has assigned since the call."""
    for number in found.changed():
        node = found.nodes[number]
        if node.kind is kinds.VARIABLE and not node.content:
            continue  # it cannot be without a value again
        if node.kind in _WRITABLE or node.kind in kinds.FIXED:
            _put(node.kind, node.value, kinds.read(node.kind, node.value, node.names), node.content)


def _without_finalizer(cls: Any) -> Any:
    """The class of a copy: its end must not run `__del__`, which would close what the original still uses."""
    content = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls)(cls.__name__, (cls,), {**content, "__slots__": (), "__del__": lambda self: None})


def _put(kind: kinds.Kind, there: Any, before: dict[Any, Any], after: dict[Any, Any]) -> None:
    """Change the content of an object from `before` to `after`."""
    if kind is kinds.LIST:
        there.clear()
        there.update(after.values()) if isinstance(there, set) else there.extend(after.values())
    elif kind is kinds.VARIABLE:
        there.set(after.get(""))
    else:
        if kind in kinds.SPACES and kind is not kinds.CLASS:
            there = there.__dict__
        of: Any = type if isinstance(there, type) else object
        give, take = of.__setattr__, of.__delattr__
        if isinstance(there, dict):
            of = OrderedDict if isinstance(there, OrderedDict) else dict
            give, take = of.__setitem__, of.__delitem__
        for name in before.keys() - after.keys():
            take(there, name)
        for name, x in after.items():
            if name not in before or before[name] is not x:
                is_attributes = kind is kinds.RECORD and type(name) is str and name == "__dict__"
                (object.__setattr__ if is_attributes else give)(there, name, x)


def _made_anew(node: Node) -> set[str]:
    """The attributes that hooks compute before each forward, as `torch.nn.utils.spectral_norm` does."""
    # Without a hook, f itself stores such attributes, and others may read them.
    if node.kind is not kinds.MODULE or not node.value._forward_pre_hooks:
        return set()
    return {name.rpartition("_")[0] for name in node.value._parameters}


def exchange_stored(
    found: Found, changed: Iterable[int], instead: dict[int, Any], alive: Callable[[Tensor], Tensor]
) -> set[int]:
    """Replace what f stored in `changed` objects, and in the containers and objects that it made and stored.

    `instead` has replacements by id; other tensors are replaced by `alive(x)`. Returns the ids of all else
    that was looked at.
    """
    places: list[Any] = [*map(found.nodes.__getitem__, changed)]
    # By id: what is there after this, also of what is not exchanged. What was there at the call stays.
    after: dict[int, Any] = {number: node.value for number, node in found.nodes.items()} | instead
    for node in places:
        now = kinds.read(node.kind, node.value, node.names)
        then = {name: _exchanged(x, after, alive, places) for name, x in now.items()}
        if node.kind in kinds.KEYED and not kinds.ATOMS.issuperset(map(type, now)):
            keys = [_exchanged(key, after, alive, places) for key in now]
            if any(map(operator.is_not, keys, now)):  # all are put there anew, in their order
                _put(node.kind, node.value, now, {key: x for key, x in now.items() if key == "__dict__"})
                then, now = dict(zip(keys, then.values(), strict=True)), {}
        if now.keys() != then.keys() or not all(map(operator.is_, then.values(), now.values())):
            _put(node.kind, node.value, now, then)
    return after.keys() - instead.keys()


# Kinds of objects that are made anew around other parts; all others are filled anew.
_MADE_OF_PARTS = kinds.CONSTANT | {kinds.FUNCTION}


def _made_of(kind: kinds.Kind, cls: Any, items: dict[Any, Any]) -> Any:
    """An object of a kind that does not change, of its parts."""
    parts = items.values()
    if kind is kinds.FUNCTION:
        code, namespace, name, defaults, *_ = parts
        cells = (*map(items.__getitem__, code.co_freevars),) or None
        new: Any = types.FunctionType(code, namespace, name, defaults, cells)
        for name in kind.parts[4:]:
            setattr(new, name, items[name])
        return new
    if kind is kinds.BUILTIN:
        return getattr(*parts)
    if kind is kinds.PARTIAL:
        new = cls.__new__(cls, items["func"])
        new.__setstate__((*parts,))
        return new
    if kind is not kinds.TUPLE:
        return cls(*parts)
    if cls is frozenset or hasattr(cls, "n_sequence_fields"):
        return cls([*parts])
    return tuple.__new__(cls, parts)  # not by the __new__ of a named tuple, which may be the user's


def _exchanged(
    x: Any, after: dict[int, Any], alive: Callable[[Tensor], Tensor], places: list[Any], depth: int = 0
) -> Any:
    """What takes the place of `x`. Adds to `places` what f has made and can be changed."""
    cls: Any = type(x)
    kind: Any = None if cls in kinds.ATOMS else kinds.about(cls).kind
    if id(x) not in after:
        if kind is kinds.FUNCTION and is_pullback(x):
            return x  # its tensors belong together
        if kind is kinds.TENSOR:
            after[id(x)] = alive(x)
        elif kind in _MADE_OF_PARTS and depth < _DEEPEST:
            after[id(x)] = x
            parts, items = kinds.read(kind, x), {}
            for name, part in parts.items():
                if name == "__globals__":  # all would be too many: those of f are known
                    items[name] = after.get(id(part), part)
                else:
                    items[name] = _exchanged(part, after, alive, places, depth + 1)
            if any(map(operator.is_not, items.values(), parts.values())):
                after[id(x)] = _made_of(kind, cls, items)
        elif kind in _WRITABLE:
            after[id(x)] = x
            places.append(Node(kind, cls, x, {}, 0, ""))
    return after.get(id(x), x)


def stored(found: Found, changed: Iterable[int]) -> Iterator[tuple[Tensor, str]]:
    """The tensors that f stored in `changed` objects in its first run, and where."""
    for number in changed:
        node = found.nodes[number]
        of_library = node.kind is kinds.MODULE and is_library(node.cls.__module__)
        for key, value in kinds.read(node.kind, node.value, node.names).items():
            # As _flat_weights of LSTM, in which the hooks of weight_norm also put what they compute.
            is_its_own = node.key == "_flat_weights" or (of_library and not isinstance(value, Tensor))
            if is_its_own or value is node.content.get(key) or key in _made_anew(node):
                continue
            for x in Found(value, everything=True).tensors.values():
                if id(x) not in found.tensors:
                    is_cache = "cache" in f"{node.cls.__module__}.{node.cls.__name__}".lower()
                    hint = ", of a cache (turn it off: use_cache=False)" if is_cache else ""
                    yield x, found.path(number, key) + hint
