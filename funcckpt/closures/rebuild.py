"""f around other tensors, and as it was at the call.

A rebuilding copies what leads to something that is replaced, or that is not what it was: functions with new
cells and globals, containers, shallow copies of modules and objects. All else is shared with the original.
Copies need no lock and no undo, and threads may share f.

A class and a context variable cannot be copied. What has changed in them is put back for the time of a run.
"""

from __future__ import annotations

import operator
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from . import kinds
from .code import is_library, slots_of
from .find import Found
from .kinds import Hole, Node

_WRITABLE = frozenset({kinds.CELL, kinds.LIST, *kinds.MAPPINGS, *kinds.OBJECTS})


class Rebuilt:
    """One rebuilding, to be used around one run; `callable` is what stands for the root of the search.

    Shared and cyclic references stay shared and cyclic.
    """

    def __init__(
        self,
        found: Found,
        mapped: Mapping[int, Tensor],
        changed: Iterable[int] = (),
        repeats_effects: bool = False,
    ) -> None:
        """With `repeats_effects`, what the run appends to copies of lists is appended to the originals."""
        self._nodes, self._changed = found.nodes, {*changed}
        self._dirty = found.leading_to({*mapped, *self._changed, *found.gone})
        # What stands for something, by the id of that; and for what it stands, by the id of the other.
        self._built: dict[int, Any] = {**mapped}
        self._originals = {id(x): found.tensors.get(number) for number, x in mapped.items()}
        # What was put into the copies that f may write to.
        self._placed: dict[int, dict[Any, Any]] = {}
        self._undo = ExitStack()
        self._repeats_effects = repeats_effects
        self.callable = found.root

    def __enter__(self) -> Any:
        with self._undo as undo:
            for number, node in self._nodes.items():
                if node.kind in kinds.FIXED and (
                    number in self._changed or not self._dirty.isdisjoint(node.refers)
                ):
                    now, then = kinds.read(node.kind, node.value, node.names), self._items(node.content)
                    undo.callback(_put, node, then, now)
                    _put(node, now, then)
            self.callable = self._items({"": self.callable})[""]
            self._undo = undo.pop_all()
        return self.callable

    def __exit__(self, kind: Any, *exception: Any) -> None:
        if self._repeats_effects and kind is None:
            for number, placed in self._placed.items():
                there = self._nodes[number].value
                if isinstance(there, list):
                    there.extend(self._built[number][len(placed) :])
        self._undo.close()

    def _items(self, content: dict[Any, Any]) -> dict[Any, Any]:
        """What stands for the things that an original refers to."""
        built, dirty = self._built, self._dirty
        items = {}
        for name, x in content.items():
            number = int(x) if type(x) is Hole else id(x)
            if number in built:
                x = built[number]
            elif number in dirty:
                x = self._make(number)
            elif type(x) is Hole:
                x = x.ref()
            items[name] = x
        return items

    def _make(self, number: int) -> Any:
        """A copy of an object around other things."""
        node = self._nodes[number]
        kind, value, cls = node.kind, node.value, node.cls
        if kind in kinds.FIXED:
            return value
        new: Any = None
        if kind in _WRITABLE:  # it is known before what refers to it is made
            if kind is kinds.CELL:
                new = types.CellType()
            elif kind in kinds.OBJECTS:
                base = types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object
                new = base.__new__(cls)
            else:
                new = {} if cls is dict else kinds.emptied(node.like if value is None else value)
            self._built[number] = new
        items = self._items(node.content)
        parts = items.values()
        if kind in _WRITABLE:
            self._placed[number] = items
        if kind is kinds.CELL:
            for x in parts:
                new.cell_contents = x
        elif kind in kinds.MAPPINGS:
            if node.key == "_parameters":
                for x in parts:
                    if type(x) is Tensor:
                        x._is_param = True  # what `isinstance(x, nn.Parameter)` asks
            put = OrderedDict.__setitem__ if isinstance(new, OrderedDict) else dict.__setitem__
            for name, x in {**(value if kind is kinds.GLOBALS else {}), **items}.items():
                put(new, name, x)
        elif kind is kinds.LIST:
            _fill(new, parts)
        elif kind in kinds.OBJECTS:
            original, state = node.like and node.like() if value is None else value, {**items}
            if original is not None and node.names is not None:  # what does not count is as it is now
                now = kinds.read(kind, original)
                state = {name: x for name, x in now.items() if name not in node.names} | items
            for name in slots_of(cls):
                if name in state:
                    object.__setattr__(new, name, state.pop(name))
            if state:
                new.__dict__.update(state)
        elif kind is kinds.FUNCTION:
            code, namespace, name, defaults, *_ = parts
            cells = (*map(items.__getitem__, code.co_freevars),) or None
            new = types.FunctionType(code, namespace, name, defaults, cells)
            for name in kind.parts[4:]:
                setattr(new, name, items[name])
        elif kind is kinds.BUILTIN:
            new = getattr(*parts)
        elif kind is kinds.PARTIAL:
            new = cls.__new__(cls, items["func"])
            new.__setstate__((*parts,))
        elif kind is kinds.TUPLE:
            # A named tuple may have a __new__ of its own, which was called when the original was made.
            new = frozenset(parts) if cls is frozenset else tuple.__new__(cls, parts)
        elif kind is kinds.COMPILED:
            (new,) = parts  # recomputed as it was written
        else:
            new = cls(*parts)
        self._built[number] = new
        self._originals.setdefault(id(new), value)
        return new

    def write_back(self) -> None:
        """Repeat on the originals what f has assigned on copies in its first run."""
        get = self._originals.get
        for number, placed in self._placed.items():
            node = self._nodes[number]
            now = kinds.read(node.kind, self._built[number], node.names)
            if len(now) != len(placed) or not all(map(operator.is_, map(placed.get, now), now.values())):
                for name in _made_anew(node):
                    for items in (now, placed):
                        items.pop(name, None)
                after = dict(zip(now, map(get, map(id, now.values()), now.values()), strict=True))
                before = dict(zip(placed, map(get, map(id, placed.values()), placed.values()), strict=True))
                _put(node, before, after)


def _put(node: Node, before: dict[Any, Any], after: dict[Any, Any]) -> None:
    """Have an object refer to some things, where it refers to others."""
    kind, value = node.kind, node.value
    if kind is kinds.LIST:
        value.clear()
        _fill(value, after.values())
    elif kind is kinds.VARIABLE:
        value.set(after[""])
    else:
        of: Any = type if kind is kinds.CLASS and isinstance(value, type) else object
        give: Any = operator.setitem if kind in kinds.MAPPINGS else of.__setattr__
        take: Any = operator.delitem if kind in kinds.MAPPINGS else of.__delattr__
        for name in before.keys() - after.keys():
            take(value, name)
        for name, x in after.items():
            if name not in before or before[name] is not x:
                give(value, name, x)


def _fill(there: Any, items: Iterable[Any]) -> None:
    there.update(items) if isinstance(there, set) else there.extend(items)


def _made_anew(node: Node) -> set[str]:
    """The attributes that hooks compute before each forward, as `torch.nn.utils.spectral_norm` does."""
    # Without a hook it is f that stores them, and others may read them.
    if node.kind is not kinds.MODULE or not node.value._forward_pre_hooks:
        return set()
    return {name.rpartition("_")[0] for name in node.value._parameters}


def stored(found: Found, changed: Iterable[int]) -> Iterator[tuple[Tensor, str]]:
    """The tensors that f has stored in what has changed in its first run, and where."""
    for number in changed:
        node = found.nodes[number]
        of_library = node.kind is kinds.MODULE and is_library(node.cls.__module__)
        for key, value in kinds.read(node.kind, node.value, node.names).items():
            is_its_own = of_library and not isinstance(value, Tensor)  # as _flat_weights of LSTM
            if is_its_own or value is node.content.get(key) or key in _made_anew(node):
                continue
            for x in Found(value, everything=True).tensors.values():
                if id(x) not in found.tensors:
                    yield x, found.path(number, key)
