"""f around other tensors, and as it was at the call.

A rebuilding copies what leads to something that is replaced, or that is not what it was: functions with new
cells and globals, containers, shallow copies of modules and objects. All else is shared with the original.
Copies need no lock and no undo, and threads may share f.

A class and a context variable cannot be copied. What has changed in them is put back for the time of a run.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from .code import is_library, slots_of
from .find import FIXED, Found
from .kinds import (
    ATOMS,
    ATTRIBUTES,
    DEFAULTS,
    GLOBALS,
    KWDEFAULTS,
    OBJECTS,
    SPACES,
    Hole,
    Key,
    Kind,
    Node,
    emptied,
    new_function,
    read,
)

_NOTHING = object()
_WRITABLE = frozenset({Kind.CELL, Kind.GLOBALS, Kind.DICT, Kind.LIST, *OBJECTS})


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
        self._found, self._nodes = found, found.nodes
        self._mapped = mapped
        self._changed = {*changed}
        self._dirty = found.leading_to({*mapped, *self._changed, *found.gone})
        # What stands for something, by the id of that.
        self._built: dict[int, Any] = {**mapped}
        # What was put into the copies that f may write to.
        self._placed: dict[int, dict[Any, Any]] = {}
        self._undo: list[Callable[[], Any]] = []
        self._repeats_effects = repeats_effects
        self.callable = found.root

    def __enter__(self) -> Any:
        try:
            for number, node in self._nodes.items():
                if node.kind in FIXED and (
                    number in self._changed or not self._dirty.isdisjoint(node.refers)
                ):
                    self._put_back(node)
            self.callable = self._item(self.callable)
            # What f reaches through a class alone, as the globals of a method.
            for number in self._changed - self._built.keys():
                if self._nodes[number].kind in _WRITABLE:
                    self._put_back_content(self._nodes[number])
        except BaseException:
            self.__exit__(BaseException)
            raise
        return self.callable

    def __exit__(self, kind: Any, *exception: Any) -> None:
        if self._repeats_effects and kind is None:
            for number, placed in self._placed.items():
                there = self._nodes[number].value
                if isinstance(there, list):
                    there.extend(self._built[number][len(placed) :])
        while self._undo:
            self._undo.pop()()

    def _item(self, item: Any) -> Any:
        """What stands for something that the original refers to."""
        return self._items({"": item})[""]

    def _items(self, content: dict[Any, Any]) -> dict[Any, Any]:
        built, dirty = self._built, self._dirty
        items = {}
        for name, x in content.items():
            kind = type(x)
            number = x.number if kind is Hole else int(x) if kind is Key else id(x)
            if number in built:
                x = built[number]
            elif kind is Hole:
                x = x()
            elif number in dirty and kind not in ATOMS:
                x = self._make(number, self._nodes[number])
            items[name] = x
        return items

    def _make(self, number: int, node: Node) -> Any:
        """A copy of an object around other things. It is known before what refers to it is made."""
        kind, value = node.kind, node.value
        like = node.like if value is None else value
        cls: Any = like if value is None else type(value)
        new: Any
        if kind is Kind.CELL:
            new = self._built[number] = types.CellType()
        elif kind is Kind.GLOBALS:
            new = self._built[number] = dict(value)
        elif kind is Kind.DICT or kind is Kind.LIST:
            new = self._built[number] = {} if type(like) is dict else emptied(like)
        elif kind in OBJECTS:
            cls, original = like if value is None else (cls, value)
            if value is None:
                original = original()
            new = (types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object).__new__(cls)
            self._built[number] = new
        items = self._items(node.content)
        if kind is Kind.CELL:
            if items:
                new.cell_contents = items[""]
        elif kind is Kind.GLOBALS:
            new.update(items)
        elif kind is Kind.DICT:
            if type(new) is dict:
                new.update(items)
            else:
                put = OrderedDict.__setitem__ if isinstance(new, OrderedDict) else dict.__setitem__
                for name, x in items.items():
                    put(new, name, x)
        elif kind is Kind.LIST:
            new.update(items.values()) if isinstance(new, set) else new.extend(items.values())
        elif kind in OBJECTS:
            _fill_object(new, node, original, items)
        elif kind is Kind.FUNCTION:
            names = like.__code__.co_freevars
            cells = None if like.__closure__ is None else (*map(items.__getitem__, names),)
            new = new_function(like, items.get(GLOBALS, like.__globals__), cells)
            new.__defaults__, new.__kwdefaults__ = items[DEFAULTS], items[KWDEFAULTS]
            if items[ATTRIBUTES]:
                new.__dict__.update(items[ATTRIBUTES])
        elif kind is Kind.METHOD:
            new = types.MethodType(items["function"], items["self"])
        elif kind is Kind.BUILTIN:
            new = getattr(items["self"], like if value is None else value.__name__)
        elif kind is Kind.PARTIAL:
            new = cls(items["function"], *items["args"], **items["keywords"])
            new.__dict__.update(items["attributes"])
        elif kind is Kind.TUPLE:
            # A named tuple may have a __new__ of its own, which was called when the original was made.
            new = frozenset(items.values()) if cls is frozenset else tuple.__new__(cls, items.values())
        elif kind is Kind.MEMBER:
            new = cls(items[""])
        elif kind is Kind.COMPILED:
            new = items[""]  # recomputed as it was written
        else:
            new = value  # a class, a module of Python or a context variable
        self._built[number] = new
        if kind in _WRITABLE:
            self._placed[number] = items
        return new

    def _put_back(self, node: Node) -> None:
        if node.kind is Kind.VARIABLE:
            token = node.value.set(self._item(node.content[""]))
            self._undo.append(lambda: node.value.reset(token))
            return
        now = read(node.kind, node.value, node.names)
        for name, x in node.content.items():
            new = self._item(x)
            if name not in now:
                setattr(node.value, name, new)
                self._undo.append(functools.partial(delattr, node.value, name))
            elif now[name] is not new:
                setattr(node.value, name, new)
                self._undo.append(functools.partial(setattr, node.value, name, now[name]))

    def _put_back_content(self, node: Node) -> None:
        value = node.value
        if node.kind is Kind.LIST:
            now = value.copy()
            _fill(value, [self._item(x) for x in node.content.values()])
            self._undo.append(functools.partial(_fill, value, now))
            return
        there = read(node.kind, value, node.names)
        for name in {**there, **node.content}:
            self._undo.append(functools.partial(_give, node, name, there.get(name, _NOTHING)))
            _give(node, name, self._item(node.content.get(name, _NOTHING)))

    def write_back(self) -> None:
        """Repeat on the originals what f has assigned on copies in its first run."""
        originals = {}
        for number, new in self._built.items():
            there = self._found.tensors[number] if number in self._mapped else self._nodes[number].value
            originals[id(new)] = there
        for number, placed in self._placed.items():
            node, new = self._nodes[number], self._built[number]
            if node.kind is Kind.LIST:
                if [*map(id, new)] != [*map(id, placed.values())]:
                    _fill(node.value, [originals.get(id(x), x) for x in new])
                continue
            if node.kind is Kind.DICT or (node.kind in SPACES and node.names is None):
                now = new if node.kind is Kind.DICT else new.__dict__
            else:
                now = read(node.kind, new, node.names)
            for name, x in now.items():
                if (name not in placed or placed[name] is not x) and not _is_made_anew(node, name):
                    _assign(node, name, originals.get(id(x), x))
            for name in placed.keys() - now.keys():
                _remove(node, name)


def _fill_object(new: Any, node: Node, original: Any, items: dict[Any, Any]) -> None:
    kind: Any = type(new)
    slots, state = slots_of(kind), {**items}
    if original is not None and (node.names is not None or slots):
        # What does not count is as it is now. A module may have slots too, which are not followed.
        state = read(Kind.SLOTTED if slots else node.kind, original)
        for name in [*state]:
            if name not in items and (node.names is None or name in node.names):
                if node.kind is Kind.SLOTTED or name not in slots:
                    del state[name]
        state.update(items)
    if node.kind is Kind.MODULE:
        parameters = state["_parameters"]
        if parameters is not node.content["_parameters"]:
            for x in parameters.values():
                if type(x) is Tensor:
                    x._is_param = True  # what `isinstance(x, nn.Parameter)` asks
    for name in slots:
        if name in state:
            object.__setattr__(new, name, state.pop(name))
    if state:
        new.__dict__.update(state)


def _fill(there: Any, items: Iterable[Any]) -> None:
    there.clear()
    there.update(items) if isinstance(there, set) else there.extend(items)


def _give(node: Node, name: Any, x: Any) -> None:
    if x is not _NOTHING:
        _assign(node, name, x)
    elif name in read(node.kind, node.value, node.names):
        _remove(node, name)


def _assign(node: Node, name: Any, x: Any) -> None:
    if node.kind is Kind.CELL:
        node.value.cell_contents = x
    elif node.kind is Kind.SLOTTED and name in slots_of(node.value.__class__):
        object.__setattr__(node.value, name, x)
    else:
        (node.value.__dict__ if node.kind in OBJECTS else node.value)[name] = x


def _remove(node: Node, name: Any) -> None:
    if node.kind is Kind.CELL:
        del node.value.cell_contents
    else:
        del (node.value.__dict__ if node.kind in OBJECTS else node.value)[name]


def _is_made_anew(node: Node, name: Any) -> bool:
    """Whether an attribute is computed before each forward, as by `torch.nn.utils.spectral_norm`."""
    # Without a hook it is f that stores it, and others may read it.
    if node.kind is not Kind.MODULE or not node.value._forward_pre_hooks:
        return False
    return any(key.startswith(f"{name}_") for key in node.value._parameters)


def stored(found: Found, changed: Iterable[int]) -> Iterator[tuple[Tensor, str]]:
    """The tensors that f has stored in what has changed in its first run, and where."""
    for number in changed:
        node = found.nodes[number]
        of_library = node.kind is Kind.MODULE and is_library(type(node.value).__module__)
        for key, value in read(node.kind, node.value, node.names).items():
            if value is node.content.get(key) or _is_made_anew(node, key):
                continue
            if of_library and not isinstance(value, Tensor):
                continue  # it stores what it likes, as LSTM does for _flat_weights
            for x in Found(value, everything=True).tensors.values():
                if id(x) not in found.tensors:
                    yield x, found.path(number, key)
