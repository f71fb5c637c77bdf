"""One search for the calls of a forward that refer to the same objects.

A method or a lambda that names `self` leads to the whole model. If each call searched that anew, a step would
cost the square of the number of blocks. So a call takes over the search of an earlier call of the same
function whose backward is still to come. Since then, only what is made for a call may have changed: a
partial, a bound method, the cells of a closure. That earlier call holds the search: none is kept for longer.
"""

from __future__ import annotations

import copy
import functools
import operator
import sys
import threading
import types
import weakref
from itertools import compress
from typing import Any

from . import kinds
from .find import Found
from .kinds import Node

# What is often made anew for each call, as the partial in `remat(partial(self.block, i))`.
_MADE_FOR_A_CALL = frozenset(
    {kinds.FUNCTION, kinds.METHOD, kinds.PARTIAL, kinds.TUPLE, kinds.LIST, kinds.CELL}
)
_VALUES = kinds.ATOMS - {types.CodeType}  # which decide nothing that a search finds
_SMALL = 4  # Objects that are searched anew as fast as they are compared.
_MOST = 100  # Objects made for a call, beyond which the comparison stops: it may be a chain.
_LONG = 100  # Items of one object, from which even a small search is shared: each search has a copy of them.
# The last larger search of a function or an object by a thread, as long as some call holds it.
_held: weakref.WeakValueDictionary[Any, Found] = weakref.WeakValueDictionary()


def search(root: Any) -> Found:
    """What f refers to: `root`, or the first item of it."""
    f = root[0] if type(root) is tuple else root
    while type(f) is functools.partial:
        f = f.func
    if type(f) is types.FunctionType:
        of: Any = f.__code__
    else:
        of = (id(f.__func__), id(f.__self__)) if type(f) is types.MethodType else id(f)
    key = of, threading.get_ident()  # another thread may let tensors go meanwhile
    before = _held.get(key)
    found = (before is not None and _continued(before, root)) or Found(root)
    if len(found.nodes) > _SMALL or any(map(_LONG.__lt__, map(len, map(_content_of, found.nodes.values())))):
        _held[key] = found
    return found


_content_of = operator.attrgetter("content")

# A node, the object that takes the place of its value, and the content of that object.
_Pair = tuple[Node, Any, dict[Any, Any]]


def _continued(before: Found, root: Any) -> Found | None:
    """A search of `root` that finds what `before` has found; None if it would find something else."""
    pairs: dict[int, _Pair] = {}
    empty: list[Any] = []
    if before.marks or before.noted or not _is_alike(before, before.root, root, pairs, empty):
        return None
    if not pairs.keys() >= before.changed() or before.has_other_classes():
        return None
    # What f imports may be there by now, or be something else.
    if any([sys.modules.get(name) is not module for name, module in before.imported]):
        return None
    renamed = {id(node.value): id(value) for node, value, _ in pairs.values() if node.value is not value}
    if len({*renamed.values()}) < len(renamed):  # one takes the place of two
        return None
    # By the ids that the first of these searches has found.
    firsts = {new: old for old, new in before.renamed.items()}
    replaced = {firsts.get(old, old): new for old, new in renamed.items()}
    # Something else may refer to what is replaced, or to what takes its place.
    numbers, holders = before.edges_of(_MADE_FOR_A_CALL)
    elsewhere = {*compress(holders, map(replaced.__contains__, numbers))}
    if not {0, *pairs}.issuperset(map(before.renamed.get, elsewhere, elsewhere)):
        return None
    if not before.nodes.keys().isdisjoint(renamed.values()):
        return None
    found = copy.copy(before)
    found.root, found.marks, found.gone, found.noted = root, {}, set(), set()
    found.led = set(), set()
    found.rest = [*map(renamed.get, before.rest, before.rest)]
    found.tensors, found.nodes = before.tensors.copy(), before.nodes.copy()
    found.renamed = before.renamed | replaced
    found.made = {*found.renamed.values()}
    for number in renamed:
        del found.nodes[number]
    for node, value, content in pairs.values():
        found.nodes[id(value)] = Node(node.kind, node.cls, value, content, node.parent, node.key)
    found.empty = before.empty_of_first + empty
    before.shares_nodes = found.shares_nodes = True
    return found


def _is_alike(before: Found, old: Any, new: Any, pairs: dict[int, _Pair], empty: list[Any]) -> bool:
    """Whether a search of `new` finds what that of `old` has found, but for the objects in `pairs`.

    These are by id of the old one. `empty` gets empty dicts: attributes of a function, keywords of a partial.
    """
    node, cls = before.nodes.get(id(old)), type(new)
    if node is None or node.kind not in _MADE_FOR_A_CALL or cls is not node.cls:
        if cls is dict and type(old) is dict and not (old or new):
            empty.append(new)
            return True
        return old is new or (type(old) in _VALUES and cls in _VALUES)
    if id(old) in pairs:
        return pairs[id(old)][1] is new
    # (What is empty of something made for an earlier call is asked for anew.)
    if old is new and node.kind is not kinds.CELL and old is not before.root and id(old) not in before.made:
        return True
    content = kinds.read(node.kind, new)
    pairs[id(old)] = node, new, content
    return (
        len(pairs) < _MOST
        and content.keys() == node.content.keys()
        and content.get("__name__") == node.content.get("__name__")  # one of the names that code looks up
        and all([_is_alike(before, x, content[name], pairs, empty) for name, x in node.content.items()])
    )
