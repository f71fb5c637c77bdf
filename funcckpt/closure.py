"""Closure conversion: the tensors that a callable refers to become explicit inputs.

`remat` keeps the inputs of f and runs f again from them. A tensor that f reaches by another way
(a closure cell, a default, a global, an attribute, a parameter or buffer of a module, a container)
is an input as well: it may be differentiated, batched or dual at any level, and it may be another one
by the time of the recomputation (a loop variable that moved on, parameters that `functional_call`
has put back). `Closure` finds those tensors, remembers what f referred to at the time of the call,
and rebuilds f around the tensors that it is given. f itself is never changed, so threads may share it.

Some of what f refers to no copy can stand for: a class, a Python module, a set, a context variable. f
finds the original there, also in the recomputation. What it holds has to be what it was (`changed`).

The search reads Python objects and cannot see everything (C++ objects, generators, what is looked up by
a name that f computes). The tensors that it misses, `net` and `remat` detect. And where it sees that f
is not a function of what it reads (f assigned something, holds an iterator), `is_pure` says so, and
`remat` compares the recomputed values.
"""

from __future__ import annotations

import contextvars
import dis
import enum
import functools
import inspect
import itertools
import operator
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import _torch
from .errors import EscapeError, InputError, MutationError, describe
from .world import PythonStream

# Values that hold no tensor, told by their type alone.
_ATOMS = frozenset(
    {
        int,
        float,
        complex,
        bool,
        str,
        bytes,
        type(None),
        type(Ellipsis),
        type(NotImplemented),
        slice,
        range,
        torch.dtype,
        torch.device,
        torch.Size,
        torch.memory_format,
        torch.layout,
        types.WrapperDescriptorType,
        types.MethodDescriptorType,
        types.GetSetDescriptorType,
        types.CodeType,
    }
)
# Libraries whose globals and classes hold nothing of the user's. Their closures and objects are searched.
# So is every installed package, but for those whose functions are given to remat.
_LIBRARIES = (sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "funcckpt"}
_own_packages: set[str] = set()
# Libraries that have random streams of their own.
_RANDOM = ("random", "numpy", "numpy.random")
# Objects of these packages stand for something outside of Python that a copy would not share.
_OPAQUE = frozenset(
    "asyncio concurrent ctypes datetime enum io logging multiprocessing pathlib queue re socket subprocess "
    "threading weakref".split()
)
_PARTS = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}
_MODULE_STATE = frozenset(nn.Module().__dict__)
_MODULE_HOOKS = frozenset([name for name in _MODULE_STATE - _PARTS.keys() if "_hooks" in name])
_MODULE_FLAGS = _MODULE_STATE - _PARTS.keys() - _MODULE_HOOKS
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_MAX_DEPTH = 128
# Elements up to which a buffer of a training module is copied before the forward, and up to which
# the copy is kept without a sign that the buffer has changed: batch_norm gives none.
_MAX_SNAPSHOT = 1 << 20
_MAX_STATISTICS = 1 << 20
# Bytes of a larger numpy array that are copied, and from how many places.
_MAX_SAMPLED, _SAMPLES = 1 << 15, 64

# Elements up to which a copy on a device is kept rather than compared.
_MAX_WITHOUT_WAITING = 1 << 12

# How far it spreads that something has to be held as it is: a function whose variables may be
# assigned is copied with what binds it; a module, with whatever refers to it.
_THAWED, _BOUND, _HELD = 0, 1, 2

_GONE = object()

T = TypeVar("T")
Mapped = Mapping[int, Tensor]
Content = dict[Any, Any]


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
        and not isinstance(x, nn.Parameter)
    )


def snapshot_of_statistics(x: Tensor) -> _TensorNode | None:
    """`x` as it is now, if it looks like them; to be settled after the first run."""
    if not may_be_statistics(x):
        return None
    node = _TensorNode(x, None, "")
    node.take_snapshot(of_buffer=False)
    return node


class Closure:
    """What a callable refers to, at the time of the search.

    Of an object with attributes, a class or a module, that is what code of the callable may look up by
    name; or `everything`. `stand_in` gives the tensor that the callable will find in place of another one.

    Attributes
    ----------
    tensors : list of Tensor
        Tensors that a transform looks at, without repetition. Dropped by `seal`.
    constants : list of Tensor
        The other tensors that were found.
    loose : list of Tensor
        Those of `tensors` that f reaches by a way that a rebuilt f does not change.
    generators : list of torch.Generator and PythonStream
        Random streams that were found.
    is_pure : bool
        Whether f looks like a function of its arguments and of what it captured. After `settle`.
    reaches_packages : bool
        Whether f reaches code of installed packages, which is not searched, but for torch and numpy.
    """

    def __init__(
        self, root: Any, everything: bool = False, stand_in: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        self._stand_in = stand_in
        self.tensors: list[Tensor] = []
        self.constants: list[Tensor] = []
        self.loose: list[Tensor] = []
        self.generators: list[torch.Generator | PythonStream] = []
        self.is_pure = True
        self.reaches_packages = False
        # Whether some module keeps what it was given for its parameters, as torch's RNNs do.
        self.has_rnn = False
        # The ids of constants that are tracked: the outputs did not depend on them.
        self._unused: set[int] = set()
        # Nodes refer to each other by the ids of their objects, so that no cycle of references keeps
        # a closure alive until the garbage collector comes.
        self._nodes: dict[int, _Node] = {}
        self._caches: list[Any] = []
        self._functions: list[_FunctionNode] = []
        self._mutable: list[_Node] = []
        self._shared: list[_Node] = []
        # What code looks up by name, and where; more code is found there, which looks up more.
        self._names: set[str] = {
            *_CALLED_BY_TORCH,
            *((_EVERYTHING, *_LOOK_UP_ANYTHING) if everything else ()),
        }
        self._named: list[_NamedNode] = []
        # What lies so deep that Python's stack would not reach it.
        self._deep: list[tuple[_Node, Iterable[tuple[Any, Any]]]] = []
        self._root: int | None = None
        # A root that has no nodes; and its code, if it is a function that refers to nothing.
        self._opaque: Any = None
        self._code: types.CodeType | None = None
        if type(root) is types.FunctionType and _refers_to_nothing(root):
            self._names = set(_names(root.__code__))
            self._opaque, self._code = root, root.__code__
        elif everything:
            self._search(root)
        else:
            key = code_of(root[0] if type(root) is tuple else root)  # with its arguments
            plans = _plans.get(key, ())
            if not any(self._follow(plan, root) for plan in plans):
                self._search(root)
                if (plan := self._plan()) is not None:
                    if len(_plans) >= _MAX_PLANS:
                        _plans.clear()
                    _plans[key] = (plan, *plans[: _MAX_PLANS_EACH - 1])
        # Whether f may write where no version counter sees it.
        self.writes_unseen = not self._names.isdisjoint(_WRITES_UNSEEN)
        if self.writes_unseen:
            self._take_snapshots()
        if self._nodes:
            self._share()
            _spread(self._nodes)
        self.is_pure = self.is_pure and "id" not in self._names and not self._is_told_by_identity()
        self._versions = [_version(x) for x in self.constants]
        # Whether f may draw random numbers and leave the streams where they were.
        self.moves_streams = not self._names.isdisjoint(_MOVES_STREAMS)
        # What f may ask of a tensor that it has been given, or has computed.
        self.retains_gradients = "retain_grad" in self._names
        self.registers_hooks = "register_hook" in self._names
        # Whether f may update the statistics that it is given, and read them.
        self.normalizes = not self._names.isdisjoint(_NORMALIZES)

    @property
    def has_updated_buffers(self) -> bool:
        """Whether f has updated buffers, of which the copies are kept. After `settle`."""
        return any(isinstance(node, _TensorNode) and node.snapshot for node in self._nodes.values())

    def _search(self, root: Any) -> None:
        self._nodes = {}
        self._root = self._visit(root, None, "", 0)
        self._opaque = root if self._root is None else None  # a builtin function
        self._visit_named()

    def _plan(self) -> _Plan | None:
        """How to find all of this again without a search, if what was found says so by its types."""
        if self._root is None or self.generators or _is_transient(self._nodes[self._root].value):
            return None
        numbers = {key: i for i, key in enumerate(self._nodes)}
        found_by = {self._root: (-1, 0)}
        steps = []
        for i, node in enumerate(self._nodes.values()):
            items = node.read(node.value)
            pairs = [*items.items(), *node.extra()]
            children, same = [], []
            for position, (name, value) in enumerate(pairs):
                kind = type(value)
                if not _is_plain_name(name) or _is_transient(value):
                    return None
                if kind in _ATOMS:
                    continue
                if (child := node.children.get(name)) is not None and child == id(value):
                    children.append((position, name, numbers[child]))
                    if self._nodes[child].parent == node.key:
                        found_by.setdefault(child, (i, position))
                elif isinstance(value, _HOLDS_UNSEEN):
                    return None
                elif isinstance(value, _TOLD_BY_VALUE):
                    if not isinstance(getattr(value, "__self__", None), types.ModuleType | None):
                        return None
                    same.append((position, value))
            if items.keys() != node.items.keys() or node.key not in found_by:
                return None
            marks = {slot: getattr(node, slot) for slot in ("looked_up", "is_called") if hasattr(node, slot)}
            steps.append(
                _Step(
                    type(node),
                    type(node.value),
                    *found_by[node.key],
                    node.label,
                    node.identity(),
                    tuple(marks.items()),
                    [name for name, _ in pairs],
                    [type(value) for _, value in pairs],
                    children,
                    same,
                )
            )
        return _Plan(steps, self._names, self.is_pure, self.reaches_packages, self.has_rnn)

    def _follow(self, plan: _Plan, root: Any) -> bool:
        """Look where another search has looked; False if it would look elsewhere now.

        What it did depends on the types of what it has met, on the names by which it is referred to, on
        what is the same, and on the code of functions. All this is compared.
        """
        nodes: list[_Node] = []
        contents: list[list[Any]] = []
        value: Any
        for step in plan.steps:
            parent = step.parent
            if parent < 0:
                if type(root) is not step.kind:
                    return False
                value, node = root, step.node(root, None, step.label)
            else:
                value = contents[parent][step.position]
                node = step.node(value, nodes[parent].key, step.label)
            nodes.append(node)
            if step.node is _TensorNode:
                if self._is_left_over(value):
                    return False
                contents.append([])
                continue
            for slot, mark in step.marks:
                setattr(node, slot, mark)
            items = node.items = node.read(value)
            names, content = [*items], [*items.values()]
            for name, item in node.extra():
                names.append(name)
                content.append(item)
            if names != step.names or [*map(type, content)] != step.kinds:
                return False
            if step.identity is not None and node.identity() != step.identity:
                return False
            for position, item in step.same:
                if content[position] is not item:
                    return False
            contents.append(content)
        keys = [node.key for node in nodes]
        self._nodes = dict(zip(keys, nodes, strict=True))
        if len(self._nodes) < len(keys):
            return False
        for step, node, content in zip(plan.steps, nodes, contents, strict=True):
            for position, name, child in step.children:
                key = node.children[name] = keys[child]
                if id(content[position]) != key:
                    return False
        self._root = keys[0]
        self._names, self.is_pure, self.has_rnn = plan.names, plan.is_pure, plan.has_rnn
        self.reaches_packages = plan.reaches_packages
        for node in nodes:
            if type(node) is _TensorNode:
                self._take(node)
            elif type(node.value) is _Cached:
                self._caches.append(node.value)
        for node in nodes:
            if isinstance(node, _ModuleNode):
                self._take_buffers_of(node)
        return True

    def _is_told_by_identity(self) -> bool:
        """Whether f may ask if a tensor, module or object is a certain one. A copy is not."""
        unshared = [node for node in self._nodes.values() if not node.shared]
        met_twice = {node.key for node in self._nodes.values() if node.shared and node.is_copied}
        if met_twice and (
            self._root in met_twice
            or not all([met_twice.isdisjoint(node.children.values()) for node in unshared])
        ):
            return True
        return any(
            [
                any([isinstance(key, _COPIED) for key in node.items])
                for node in unshared
                if isinstance(node, _DictNode) and not _ATOMS.issuperset(map(type, node.items))
            ]
        )

    def _take_snapshots(self) -> None:
        buffers: set[int] = set()
        for node in self._nodes.values():
            if isinstance(node, _ModuleNode) and node.value.training:
                buffers.update([id(x) for x in node.value._parameters.values()])
        for node in self._nodes.values():
            if isinstance(node, _TensorNode) and not node.needed:
                node.take_snapshot(of_buffer=node.key in buffers)

    def rebuild(self, mapped: Mapped) -> Any:
        """The callable as it was at the time of the search, around other tensors.

        `mapped` gives a tensor for the id of each of `tensors`.
        """
        changed = [node for node in self._mutable if node.has_changed()]
        for node in changed:
            node.frozen = _HELD
        if changed:
            _spread(self._nodes)
        if self._root is not None:
            return _Rebuild(self._nodes, mapped, first=False).build(self._root)
        root, code = self._opaque, self._code
        if code is None or (root.__code__ is code and _holds_nothing(root)):
            return root
        # It was given defaults, or other code.
        return types.FunctionType(code, root.__globals__)

    def rebuilt_once(self, mapped: Mapped, name: str) -> AbstractContextManager[Any]:
        """The callable around other tensors for its first run, whose side effects are to be seen.

        What holds no tracked tensor is shared with the original. What f stores in the rest is
        written back.

        Raises
        ------
        EscapeError
            f stored a tensor in something that had to be rebuilt.
        """
        return nullcontext(self._opaque) if self._root is None else self._rebuilt_once(mapped, name)

    @contextmanager
    def _rebuilt_once(self, mapped: Mapped, name: str) -> Iterator[Any]:
        rebuild = _Rebuild(self._nodes, mapped, first=True)
        try:
            yield rebuild.build(self._root)
        except BaseException:
            # Without remat, what f has assigned before it failed would stay.
            with suppress(EscapeError):
                rebuild.write_back(name)
            raise
        rebuild.write_back(name)

    def caches_kept_clean(self) -> AbstractContextManager[None] | None:
        """Forget what f puts into an `lru_cache` while it runs: it belongs to levels that come to an end."""
        return self._caches_kept_clean() if self._caches else None

    @contextmanager
    def _caches_kept_clean(self) -> Iterator[None]:
        sizes = [cache.cache_info().misses for cache in self._caches]
        try:
            yield
        finally:
            if _torch.peek_interpreter_stack() is not None:
                for cache, size in zip(self._caches, sizes, strict=True):
                    if cache.cache_info().misses != size:
                        cache.cache_clear()

    def settle(self, name: str) -> None:
        """After the first run: which captured tensors did it change?

        Raises
        ------
        MutationError
            f changed one of `constants` in place that cannot be put back for the recomputation.
        """
        for i, x in enumerate(self.constants):
            node = self._nodes[id(x)]
            assert isinstance(node, _TensorNode)
            is_put_back = node.settle(self.writes_unseen)
            if is_put_back and (node.is_buffer or may_be_statistics(x)):
                self._versions[i] = None
            elif is_put_back or _version(x) != self._versions[i]:
                raise MutationError(
                    f"remat({name}) changed {self.where(id(x))} ({describe(x)}) in place. The "
                    "recomputation would start from the changed values. Return the new value "
                    f"instead, or make it a buffer, of at most {_MAX_SNAPSHOT} elements, of a module that is "
                    "training."
                )
        # What f has assigned itself is its state. The rest has to be the same in the recomputation.
        for node in self._nodes.values():
            if isinstance(node, _FunctionNode) and node.state:
                node.leave_state()
                self._functions.append(node)
            if node.shared:
                node.assigned = frozenset(node.changes())
                self.is_pure = self.is_pure and not node.assigned
                self._shared.append(node)
            elif isinstance(node, _MUTABLE):
                node.assigned = node.changed_names()
                if node.was_assigned():
                    self.is_pure = False
                if not node.needed:
                    self._mutable.append(node)

    def check_unchanged(self, name: str) -> dict[int, MutationError]:
        """Before a recomputation: is what f captured still what it was?

        Returns what to say of changed tensors that the forward did not differentiate, nor maybe use.
        """
        errors = {}
        for x, version in zip(self.constants, self._versions, strict=True):
            if version is not None and _version(x) != version:
                error = MutationError(
                    f"{self.where(id(x))} ({describe(x)}), which remat({name}) captured, was changed in "
                    f"place between the forward and the recomputation: it is at version "
                    f"{_version(x)}, and was at {version}. Pass a copy of it, or change it after "
                    "the backward."
                )
                if id(x) not in self._unused:
                    raise error
                errors[id(x)] = error
        for function in self._functions:
            for item in function.reassigned():
                raise MutationError(
                    f"{function.label_of(item)} of {self._path(function) or name}, which remat({name}) "
                    "reads, was assigned since the forward, and the recomputation would read the new value. "
                    "Pass it as an argument, or assign it after the backward."
                )
        for node in self._shared:
            for item in set(node.changes()) - node.assigned:
                if isinstance(node, _OfContextNode) and node.was(item) is not _GONE:
                    continue  # `restored` puts it back
                raise MutationError(
                    f"{self._path(node, item)}, which remat({name}) reads, is not what it was in the "
                    "forward, and the recomputation would read the new value. Pass it as an argument, "
                    "or change it after the backward."
                )
        return errors

    def restored(self) -> AbstractContextManager[None] | None:
        """Context variables and thread-local attributes as they were: a backward has a thread of its own."""
        return self._restored() if any([isinstance(n, _OfContextNode) for n in self._shared]) else None

    @contextmanager
    def _restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            for node in self._shared:
                if isinstance(node, _OfContextNode):
                    for name in set(node.changes()) - node.assigned:
                        stack.callback(node.assign(name, node.was(name)))
            yield

    def statistics(self) -> dict[int, Tensor]:
        """What buffers were that f finds where no copy can be put, by the ids of the tensors."""
        return {
            node.key: node.snapshot[1].clone()
            for node in self._shared
            if isinstance(node, _TensorNode) and node.snapshot is not None
        }

    def copies(self) -> list[Tensor]:
        """Copies that are held of what f may update."""
        return [
            node.snapshot[1]
            for node in self._nodes.values()
            if isinstance(node, _TensorNode) and node.snapshot is not None
        ]

    def keep_as_constants(self, tensors: Mapping[int, Tensor]) -> None:
        """Hold tracked tensors that turned out to be no inputs, as they are."""
        for key, x in tensors.items():
            self._nodes[key].needed = False
            self._nodes[key].value = x
            self._unused.add(key)
            self.constants.append(x)
            self._versions.append(_version(x))

    def seal(self) -> None:
        """Let go of the tensors that became inputs: from now on the graph owns them."""
        self.tensors.clear()
        self.loose.clear()
        for node in self._nodes.values():
            if node.needed or node.shared:
                node.seal(self._nodes)

    def where(self, key: int) -> str:
        """How f refers to the tensor with an id, in words."""
        node = self._nodes.get(key)
        return (node and self._path(node)) or "a captured tensor"

    def _path(self, node: _Node, *items: Any) -> str:
        parts = [node.label_of(item) for item in items]
        parent: int | None = node.key
        while parent is not None and not (
            self._nodes[parent].parent == self._root and self._nodes[parent].label.startswith("item ")
        ):
            parts.append(self._nodes[parent].label)
            parent = self._nodes[parent].parent
        return " of ".join([part for part in parts if part])

    def escaped(self) -> Iterator[tuple[Tensor, str]]:
        """Tensors that were stored, since the search, where it has been; and the place in words."""
        for node in list(self._nodes.values()):
            if isinstance(node, _CollectionNode) and not (node.assigned or node.shared):
                continue  # `settle` has looked
            items = node.items
            now = [*node.assignable(node.value).items()]
            now = [(name, value) for name, value in now if value is not items.get(name)]
            before = {id(x) for x in items.values()} if now else set()
            for name, value in now:
                if id(value) in before or type(value) in _ATOMS or id(value) in self._nodes:
                    continue
                if node.is_of_library and not isinstance(value, Tensor):
                    continue
                found = Closure(value, everything=True)
                for x in (*found.tensors, *found.constants):
                    if id(x) not in self._nodes:
                        yield x, node.label_of(name)

    def _visit(self, value: Any, parent: int | None, label: str, depth: int) -> int | None:
        kind = type(value)
        if kind in _ATOMS:
            return None
        key = id(value)
        if key in self._nodes:
            return key
        if isinstance(value, Tensor) and self._is_left_over(value):
            return None
        node: _Node
        if isinstance(value, _UNINITIALIZED):
            raise InputError(
                f"remat of a lazy module: its {label or 'parameter'} has no shape yet. Call the module once "
                "without remat first."
            )
        if isinstance(value, Tensor):
            node = _TensorNode(value, parent, label)
            self._take(node)
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
            return None
        else:
            self.reaches_packages |= _is_of_package(value, kind)
            node_type = _node_type(value, kind)
            if node_type is None:
                stream = PythonStream.of(value)
                if stream is not None:
                    self.generators.append(stream)
                self.is_pure = self.is_pure and (stream is not None or not _moves_on(value))
                if isinstance(value, operator.attrgetter | operator.methodcaller):
                    self._names.update(
                        [s for s in pytree.tree_leaves(value.__reduce__()) if isinstance(s, str)]
                    )
                return None
            node = node_type(value, parent, label)
            self.is_pure = self.is_pure and not isinstance(node, _GeneratorNode)
            self.has_rnn |= isinstance(value, nn.RNNBase)
        self._nodes[key] = node
        if isinstance(value, _Cached):
            self._caches.append(value)
        if isinstance(node, _NamedNode):
            looked_up = set() if isinstance(node, _PythonModuleNode) else self._names
            node.looked_up = looked_up  # type: ignore[misc]  # a slot of each subclass
            if node.is_named:
                self._named.append(node)
        self._names |= node.names()
        node.items = node.read(value)
        self._visit_items(node, (*node.items.items(), *node.extra()), depth)
        self._take_buffers_of(node)
        return key

    def _is_left_over(self, x: Tensor) -> bool:
        return _torch.is_left_over(x) and self._stand_in(x) is x

    def _take(self, node: _TensorNode) -> None:
        x = node.value
        node.needed = is_tracked(x) or self._stand_in(x) is not x
        if node.needed and _torch.takes_only_fake() and not _torch.is_fake(x):
            node.needed = False  # it is replaced before it is used (`functional_call`), or torch refuses it
        if not node.needed and may_be_statistics(x):
            node.take_snapshot(of_buffer=False)
        (self.tensors if node.needed else self.constants).append(x)

    def _take_buffers_of(self, node: _Node) -> None:
        for x in node.updated_buffers():
            found = self._nodes[id(x)]
            if isinstance(found, _TensorNode) and not found.needed:
                found.take_snapshot(of_buffer=True)

    def _visit_items(self, node: _Node, items: Iterable[tuple[Any, Any]], depth: int) -> None:
        if depth > _MAX_DEPTH:
            self._deep.append((node, items))
            return
        for name, item in items:
            if type(item) not in _ATOMS:
                child = self._visit(item, node.key, node.label_of(name), depth + 1)
                if child is not None:
                    node.children[name] = child
                    found = self._nodes[child]
                    if isinstance(found, _ClassNode) and name not in _TYPE_OF:
                        found.is_called = True
                    if isinstance(found, _PythonModuleNode):
                        found.looked_up |= (
                            node.looked_up if isinstance(node, _PythonModuleNode) else node.names()
                        )

    def _visit_named(self) -> None:
        """Follow what code may look up by name, until there is no more code."""
        seen, now = 0, 1
        while seen < now or self._deep:
            while self._deep:
                self._visit_items(*self._deep.pop(), 0)
            seen = now
            for named in list(self._named):
                found = named.read(named.value)
                new = [(name, item) for name, item in found.items() if name not in named.items]
                named.items.update(new)
                self._visit_items(named, new, 0)
            now = len(self._names) + sum([len(named.items) for named in self._named])

    def _share(self) -> None:
        """What no copy can stand for, f finds as it is, and all that it reaches from there."""
        nodes = self._nodes
        functions = [node for node in nodes.values() if type(node) is _FunctionNode]
        assigned = {cell for function in functions for cell in function.assigned_cells()}
        for function in functions:
            function.share(assigned)
        # What is reached from there is shared with the original, whatever other ways lead to it.
        pending: list[_Node] = [node for node in nodes.values() if isinstance(node, _FixedNode)]
        while pending:
            node = pending.pop()
            if not node.shared:
                node.shared = True
                pending.extend([nodes[child] for child in node.children.values()])
                if isinstance(node, _TensorNode) and node.needed:
                    self.loose.append(node.value)


class _Step(NamedTuple):
    """How a search has met one object, and by what it would know one in its place."""

    node: type[_Node]
    kind: type
    # Which step has met what refers to it, and at which position.
    parent: int
    position: int
    label: str
    identity: Any
    marks: Sequence[tuple[str, Any]]
    # What it refers to: by name, and of which type.
    names: list[Any]
    kinds: list[type]
    # Of this what was followed, by position, name and step; and what was not, and has to be the same object.
    children: list[tuple[int, Any, int]]
    same: list[tuple[int, Any]]


class _Plan(NamedTuple):
    """Where a search has looked. Holds types, code, names and modules of Python, and no values."""

    steps: list[_Step]
    names: set[str]
    is_pure: bool
    reaches_packages: bool
    has_rnn: bool


# Plans of earlier searches, by the code or type of their root: some for each, and for so many of them.
_plans: dict[Any, tuple[_Plan, ...]] = {}
_MAX_PLANS_EACH = 4
_MAX_PLANS = 256


def code_of(root: Any) -> Any:
    """The code of a function or method, or the type of any other callable."""
    if type(root) is types.MethodType:
        root = root.__func__
    return root.__code__ if type(root) is types.FunctionType else type(root)


def _is_transient(value: Any) -> bool:
    """Whether a plan would keep alive what comes and goes with a function: a class, or a module of Python."""
    if isinstance(value, types.ModuleType):
        return sys.modules.get(value.__name__) is not value
    return "<locals>" in (value if isinstance(value, type) else type(value)).__qualname__


def _is_plain_name(name: Any) -> bool:
    """Whether a name holds nothing, and compares like a value."""
    return all(map(_is_plain_name, name)) if type(name) is tuple else type(name) in _ATOMS


class _Node:
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
        return isinstance(self.value, nn.Module) and _is_library(type(self.value).__module__)

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

    def allocate(self, rebuild: _Rebuild) -> Any:
        """A new object; complete if it is immutable, and empty otherwise."""
        raise NotImplementedError

    def put(self, target: Any, name: Any, value: Any) -> None:
        """Make an object of this kind refer to something else."""
        raise NotImplementedError

    def remove(self, target: Any, name: Any) -> None:
        """Make it refer to something no more."""
        del target[name]

    def fill(self, new: Any, rebuild: _Rebuild) -> None:
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
                if now.get(name, _GONE) is not self.items.get(name, _GONE)
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
            if now.get(name, _GONE) is not (item() if isinstance(item, _Sealed) else item):
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

    def seal(self, nodes: Mapping[int, _Node]) -> None:
        needed = {name for name, child in self.children.items() if nodes[child].needed}
        if not self.shared:
            self.value = self.empty(needed)
        for name in needed & self.items.keys():
            item = self.items[name]
            if not self.shared:
                self.items[name] = None
            elif isinstance(item, Tensor):
                self.items[name] = _Sealed(item)

    def is_rebuilt(self, rebuild: _Rebuild) -> bool:
        return self.needed or (self.frozen > _THAWED and not rebuild.first)


class _OfClass(Generic[T]):
    """A function of a class, computed once for each, which it does not keep alive."""

    def __init__(self, function: Callable[[type], T]) -> None:
        self._function = function
        self._known: weakref.WeakKeyDictionary[type, T] = weakref.WeakKeyDictionary()

    def __call__(self, kind: type) -> T:
        try:
            return self._known[kind]
        except KeyError:
            found = self._known[kind] = self._function(kind)
            return found

    def forget(self) -> None:
        self._known.clear()


class _Sealed(weakref.ref[Tensor]):
    """Stands for a tensor that the graph owns, to tell whether it is still in its place."""

    __slots__ = ()


class _NamedNode(_Node):
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
        return not (self.is_named and self.looked_up.isdisjoint(_LOOK_UP_ANYTHING))

    def may_look_up(self, name: Any) -> bool:
        return name in self.looked_up or self._may_look_up_anything()


class _TensorNode(_Node):
    __slots__ = ("is_buffer", "snapshot")

    def __init__(self, value: Any, parent: int | None, label: str) -> None:
        super().__init__(value, parent, label)
        self.is_buffer = False
        # The version and a copy of a tensor that f may update.
        self.snapshot: tuple[int | None, Tensor] | None = None

    def take_snapshot(self, of_buffer: bool) -> None:
        self.is_buffer |= of_buffer
        if self.snapshot is None and self.value.numel() <= _MAX_SNAPSHOT:
            copy, _ = _torch.physical(self.value.clone())  # active levels wrap what they make
            self.snapshot = _version(self.value), copy
            self.frozen = _HELD

    def settle(self, writes_unseen: bool) -> bool:
        """Forget a copy that is not needed; whether there is one that is."""
        if self.snapshot is None:
            return False
        version, copy = self.snapshot
        seen = _version(self.value) != version
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

    def allocate(self, rebuild: _Rebuild) -> Any:
        if self.needed:
            return rebuild.mapped[self.key]
        return self.value.clone() if self.snapshot is None else self.snapshot[1].clone()

    def fill(self, new: Any, rebuild: _Rebuild) -> None:
        pass

    def seal(self, nodes: Mapping[int, _Node]) -> None:
        if self.needed:
            self.value = None


class _FunctionNode(_Node):
    """A Python function: its cells, defaults, attributes, and the globals that its code names."""

    __slots__ = ("cells", "left", "state")

    def __init__(self, value: Any, parent: int | None, label: str) -> None:
        super().__init__(value, parent, label)
        # The ids of its cells, which other functions may share.
        self.cells = dict(zip(value.__code__.co_freevars, map(id, value.__closure__ or ()), strict=True))
        # The variables that some function assigns. They are state, and not constants of the call.
        self.state = _assigned(value.__code__)
        # Those of them that the first run has not assigned, and what they were.
        self.left: Content = {}

    def assigned_cells(self) -> set[int]:
        return {self.cells[name] for name in self.state if name in self.cells}

    def share(self, assigned: Collection[int]) -> None:
        self.state |= {name for name, cell in self.cells.items() if cell in assigned}
        if self.cells.keys() - self.state:
            self.frozen = _BOUND

    def identity(self) -> Any:
        return self.value.__code__, _is_of_library(self.value)

    def leave_state(self) -> None:
        now = self.assignable(self.value)
        self.left = {
            name: item
            for name, item in self.items.items()
            if name in now and now[name] is item and not isinstance(item, Tensor)
        }

    def reassigned(self) -> Iterator[Any]:
        if self.left:
            now = self.assignable(self.value)
            for name, item in self.left.items():
                if now.get(name, _GONE) is not item:
                    yield name

    def names(self) -> frozenset[str]:
        function = self.value
        return frozenset() if _is_of_library(function) else _names(function.__code__)

    def extra(self) -> Iterable[tuple[Any, Any]]:
        if not _is_of_library(self.value):
            for name in _imported(self.value.__code__):
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
        if not _is_of_library(value):
            for name in _global_names(code):
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
        }[kind]

    def allocate(self, rebuild: _Rebuild) -> Any:
        function = self.value
        namespace = function.__globals__
        if any(self._replaces(name, rebuild) for name in self.items):
            namespace = rebuild.namespace(namespace)
        cells = None
        if function.__closure__ is not None:
            names = function.__code__.co_freevars
            cells = tuple(
                [
                    cell if self._shares(name, rebuild) else rebuild.cell(self.cells[name])
                    for name, cell in zip(names, function.__closure__, strict=True)
                ]
            )
        return _function(function, namespace, cells)

    def _shares(self, name: str, rebuild: _Rebuild) -> bool:
        """Whether a copy keeps the original's cell."""
        child = self.children.get(("cell", name))
        if child is not None and rebuild.nodes[child].is_rebuilt(rebuild):
            return False
        return rebuild.first or ("cell", name) not in self.items or name in self.state

    def _replaces(self, name: tuple[str, str], rebuild: _Rebuild) -> bool:
        """Whether a copy has another value for a global variable than the original has now."""
        kind, variable = name
        if kind != "global":
            return False
        child = self.children.get(name)
        if child is not None and rebuild.nodes[child].is_rebuilt(rebuild):
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
        )

    def changes(self) -> Iterator[Any]:
        return (name for name in super().changes() if name[1] not in self.state)

    def was_assigned(self) -> bool:
        return any(
            self.items.get(name, _GONE) is not item for name, item in self.assignable(self.value).items()
        )

    def fill(self, new: Any, rebuild: _Rebuild) -> None:
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
        content = {}
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
                    for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
                ]
            )
        return _function(function, function.__globals__, cells)


_DETAILS = (
    "__qualname__",
    "__module__",
    "__doc__",
    "__type_params__",
    "__annotate__" if sys.version_info >= (3, 14) else "__annotations__",
)


def _function(
    like: types.FunctionType, namespace: dict[str, Any], cells: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    """A function like another one, around other variables."""
    new = types.FunctionType(like.__code__, namespace, like.__name__, None, cells)
    for name in _DETAILS:
        if hasattr(like, name):
            setattr(new, name, getattr(like, name))
    return new


class _FrozenNode(_Node):
    """An object that is complete when it is made."""

    __slots__ = ()

    def label_of(self, name: Any) -> str:
        return f"item {name}" if isinstance(name, int) else ""

    def fill(self, new: Any, rebuild: _Rebuild) -> None:
        pass

    def assignable(self, value: Any) -> Content:
        return {}

    def kind(self) -> type:
        return self.value if isinstance(self.value, type) else type(self.value)


class _MethodNode(_FrozenNode):
    __slots__ = ()

    def read(self, value: Any) -> Content:
        return {"function": value.__func__, "self": value.__self__}

    def allocate(self, rebuild: _Rebuild) -> Any:
        return types.MethodType(rebuild.item(self, "function"), rebuild.item(self, "self"))


class _CompiledNode(_FrozenNode):
    """A module that `torch.compile` has wrapped: recomputed as it was written."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        return {"": value._orig_mod}

    def allocate(self, rebuild: _Rebuild) -> Any:
        return rebuild.item(self, "")


class _BuiltinMethodNode(_FrozenNode):
    """A bound method that is no Python function: of a tensor, a dict, an iterator, a context variable."""

    __slots__ = ("name",)

    def read(self, value: Any) -> Content:
        self.name = value.__name__
        return {"self": value.__self__}

    def allocate(self, rebuild: _Rebuild) -> Any:
        return getattr(rebuild.item(self, "self"), self.name)


class _PartialNode(_FrozenNode):
    __slots__ = ()

    def read(self, value: Any) -> Content:
        return {
            "function": value.func,
            "args": value.args,
            "keywords": value.keywords,
            "dict": value.__dict__,
        }

    def allocate(self, rebuild: _Rebuild) -> Any:
        new = self.kind()(
            rebuild.item(self, "function"),
            *rebuild.item(self, "args"),
            **rebuild.item(self, "keywords"),
        )
        new.__dict__.update(rebuild.item(self, "dict"))
        return new


class _TupleNode(_FrozenNode):
    __slots__ = ()

    def read(self, value: Any) -> Content:
        return dict(enumerate(value))

    def allocate(self, rebuild: _Rebuild) -> Any:
        # A named tuple may have a __new__ of its own, which was called when the original was made.
        return tuple.__new__(self.kind(), [rebuild.item(self, i) for i in self.items])


class _CollectionNode(_Node):
    """A list, deque or dict. It may be long: each item that holds nothing should cost as little as it can."""

    __slots__ = ()

    def label_of(self, name: Any) -> str:
        return f"item {name!r}"

    def changed_names(self) -> frozenset[Any]:
        now = self.read(self.value)
        return frozenset() if _are_identical(now, self.items) else self.differing_names(now)

    def allocate(self, rebuild: _Rebuild) -> Any:
        return _cleared(self.value)

    def empty(self, needed: Collection[Any]) -> Any:
        return _cleared(self.value)


class _SequenceNode(_CollectionNode):
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


class _DictNode(_CollectionNode):
    __slots__ = ()

    def read(self, value: Any) -> Content:
        return dict(value)

    def put(self, target: Any, name: Any, value: Any) -> None:
        target[name] = value


class _ObjectNode(_NamedNode):
    """An instance of a Python class: of its `__dict__` and its slots, what some code may look up."""

    __slots__ = ("looked_up", "origin")

    def __init__(self, value: Any, parent: int | None, label: str) -> None:
        super().__init__(value, parent, label)
        self.origin = _weak(value)

    @property
    def is_named(self) -> bool:
        return _is_own(type(self.value))

    def read(self, value: Any) -> Content:
        content = _attributes(value)
        return self.named(content)

    def extra(self) -> Iterable[tuple[Any, Any]]:
        call = inspect.getattr_static(type(self.value), "__call__", None)
        if isinstance(call, types.FunctionType):
            yield "__call__", call
        yield "__class__", type(self.value)

    def label_of(self, name: Any) -> str:
        return "" if name in ("__call__", "__class__") else f"attribute {name!r}"

    def allocate(self, rebuild: _Rebuild) -> Any:
        kind = self.value if isinstance(self.value, type) else type(self.value)
        new: Any = next(base for base in _ALLOCATORS if issubclass(kind, base)).__new__(kind)
        # What nobody looks up by a name that is known is what it is now.
        for name, item in _attributes(self.origin()).items():
            if not self.may_look_up(name):
                self.put(new, name, item)
        return new

    def put(self, target: Any, name: Any, value: Any) -> None:
        object.__setattr__(target, name, value)

    def remove(self, target: Any, name: Any) -> None:
        object.__delattr__(target, name)


class _Places(dict[str, tuple[str, str]]):
    """The names by which `_ModuleNode` knows what is in one part of a module: the same tuples each time."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __missing__(self, name: str) -> tuple[str, str]:
        if len(self) >= _MANY_PLACES:
            self.clear()
        place = self[name] = self._part, name
        return place


_MANY_PLACES = 4096
_PLACES = {part: _Places(part) for part in (*_PARTS, "")}


class _ModuleNode(_NamedNode):
    """An `nn.Module`: parameters, buffers, submodules and attributes, as they are at the call.

    Buffers of a module that is training are copied before the forward: f may update them (running
    statistics, the vectors of spectral norm), and the recomputation has to start from what they
    were, and must not update them again.
    """

    __slots__ = ("computed", "hooks", "looked_up", "origin", "parameters", "state", "type")

    def __init__(self, value: Any, parent: int | None, label: str) -> None:
        super().__init__(value, parent, label)
        self.frozen = _HELD
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
        self.state = {name: state[name] for name in _MODULE_FLAGS if name in state}
        # Hooks may be registered and removed later: these are there now.
        self.hooks = {name: state[name].copy() for name in _MODULE_HOOKS if state.get(name)}

    @property
    def is_named(self) -> bool:
        return _is_own(self.type)

    def read(self, value: Any) -> Content:
        state = value.__dict__
        content: Content = {}
        for part in _PARTS:
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
        for name in _MODULE_HOOKS:
            if (now.get(name) or None) != self.hooks.get(name):
                yield "", name

    def label_of(self, name: Any) -> str:
        part, attribute = name
        if attribute == "__class__":
            return ""
        return f"{_PARTS.get(part, 'attribute')} {attribute!r}"

    def allocate(self, rebuild: _Rebuild) -> Any:
        new = object.__new__(self.type)
        state = {**self.state, **{name: OrderedDict() for name in _MODULE_HOOKS}, **self.hooks}
        for part in _PARTS:
            state[part] = {}
        origin = self.origin()
        if origin is not None and not self._may_look_up_anything():
            for name, item in origin.__dict__.items():
                if name not in _MODULE_STATE and name not in self.looked_up:
                    state[name] = item  # as in other objects
        object.__setattr__(new, "__dict__", state)
        forward = self.children.get(("", "forward"))
        if forward is not None and ("", "forward") not in self.items:
            # The class is shared; an instance may have a forward of its own.
            node = rebuild.nodes[forward]
            if node.needed or node.frozen == _HELD or getattr(self.type, "forward", None) is not node.value:
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


class _FixedNode(_Node):
    """What no copy can stand for: f finds the original."""

    __slots__ = ()

    @property
    def is_copied(self) -> bool:
        return False

    def is_rebuilt(self, rebuild: _Rebuild) -> bool:
        return False

    def label_of(self, name: Any) -> str:
        return f"item {name!r}"


class _SetNode(_FixedNode):
    """A set. A copy could have another order."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        return {id(item): item for item in value}

    def label_of(self, name: Any) -> str:
        return "an item of a set"

    def changes(self) -> Iterator[Any]:
        yield from super().changes()
        if len(self.value) != len(self.items):
            yield ""


class _MappingNode(_FixedNode):
    """A mapping, or its keys, values or items, that only shows another one."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        return dict(value if isinstance(value, types.MappingProxyType) else enumerate(value))


class _ContainerNode(_FixedNode):
    """A container of a class of its own, which may do anything with what is put into it."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        content: Content = {("", name): item for name, item in getattr(value, "__dict__", {}).items()}
        if isinstance(value, dict):
            items: Iterable[tuple[Any, Any]] = dict.items(value)
        else:
            items = enumerate(next(kind for kind in _CONTAINERS if isinstance(value, kind)).__iter__(value))
        for name, item in items:
            content["item", name] = item
        return content

    def label_of(self, name: Any) -> str:
        kind, key = name
        return f"item {key!r}" if kind else f"attribute {key!r}"


class _ArrayNode(_FixedNode):
    """A numpy array or a bytearray, told by its content, or by samples of it if that is large."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        if not isinstance(value, np.ndarray):
            return {"": bytes(value) if len(value) <= _MAX_SNAPSHOT else _samples(value, len(value), 1)}
        if value.dtype == object:
            return dict(enumerate(value.flat))
        if value.nbytes <= _MAX_SNAPSHOT:
            return {"": value.tobytes()}
        in_memory = value.ravel("K") if value.flags.forc else value.flat
        return {"": _samples(in_memory, value.size, value.itemsize)}

    def differing(self, now: Content) -> Iterator[Any]:
        if isinstance(self.items.get(""), bytes):
            return iter(() if now == self.items else ("",))
        return super().differing(now)

    def label_of(self, name: Any) -> str:
        return "the content"


class _WeakNode(_FixedNode):
    """A weak reference. One to a tensor is how a module tells whether a parameter is still its own."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        referent = value()
        return {} if isinstance(referent, Tensor) else {"": referent}

    def label_of(self, name: Any) -> str:
        return "what is weakly referred to"


class _WeakMappingNode(_FixedNode):
    __slots__ = ()

    def read(self, value: Any) -> Content:
        by_key = isinstance(value, weakref.WeakValueDictionary)
        return {key if by_key else id(key): item for key, item in value.items()}

    def label_of(self, name: Any) -> str:
        return "an item of a weak dictionary"


class _StayingNode(_FixedNode, _NamedNode):
    """An object whose class would notice a copy."""

    __slots__ = ("looked_up",)

    def read(self, value: Any) -> Content:
        return self.named(_attributes(value))

    def extra(self) -> Iterable[tuple[Any, Any]]:
        yield "__class__", type(self.value)

    def label_of(self, name: Any) -> str:
        return "" if name == "__class__" else f"attribute {name!r}"


class _GeneratorNode(_FixedNode):
    """A generator, which holds the variables of its function."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        return {} if value.gi_frame is None else dict(value.gi_frame.f_locals)

    def changes(self) -> Iterator[Any]:
        return iter(())  # the values that it gives are compared

    def label_of(self, name: Any) -> str:
        return f"variable {name!r} of a generator"


class _MemberNode(_FixedNode):
    """A member of an enumeration, which is told by its identity."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        return {"": value.value}

    def label_of(self, name: Any) -> str:
        return f"the value of {self.value}"


class _StayingModuleNode(_FixedNode, _ModuleNode):
    """A module whose class would notice a copy."""

    __slots__ = ()

    def label_of(self, name: Any) -> str:
        return _ModuleNode.label_of(self, name)


class _OfContextNode(_FixedNode):
    """What has another value in each thread or context."""

    __slots__ = ()

    def was(self, name: Any) -> Any:
        """The value at the time of the search; `_GONE` if there was none, or it is no more."""
        item = self.items[name]
        if isinstance(item, _Sealed):
            item = item()
            return _GONE if item is None else item
        return item

    def assign(self, name: Any, value: Any) -> Callable[[], None]:
        """Assign, here and now; returns what undoes it."""
        raise NotImplementedError


class _VariableNode(_OfContextNode):
    """A context variable."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        return {"": value.get(_GONE)}

    def assign(self, name: Any, value: Any) -> Callable[[], None]:
        return functools.partial(self.value.reset, self.value.set(value))

    def label_of(self, name: Any) -> str:
        return f"context variable {self.value.name!r}"


class _ThreadLocalNode(_OfContextNode):
    __slots__ = ()

    def read(self, value: Any) -> Content:
        return dict(value.__dict__)

    def assign(self, name: Any, value: Any) -> Callable[[], None]:
        here = self.value.__dict__
        undo = (
            functools.partial(here.__setitem__, name, here[name])
            if name in here
            else functools.partial(here.__delitem__, name)
        )
        here[name] = value
        return undo

    def label_of(self, name: Any) -> str:
        return f"thread-local attribute {name!r}"


class _DescriptorNode(_FixedNode):
    """What makes an attribute of a class from functions."""

    __slots__ = ()

    def read(self, value: Any) -> Content:
        names = ("fget", "fset", "__func__", "__wrapped__")
        return {name: getattr(value, name) for name in names if hasattr(value, name)}

    def label_of(self, name: Any) -> str:
        return ""


class _PythonModuleNode(_FixedNode, _NamedNode):
    """A Python module: of what is in it, what some code looks up that names the module as well."""

    __slots__ = ("looked_up",)

    def identity(self) -> Any:
        return self.value

    def read(self, value: Any) -> Content:
        content = value.__dict__
        return {name: content[name] for name in self.looked_up if name in content}

    def label_of(self, name: Any) -> str:
        return f"attribute {name!r} of {self.value.__name__}"


class _ClassNode(_FixedNode, _NamedNode):
    __slots__ = ("is_called", "looked_up")

    def __init__(self, value: Any, parent: int | None, label: str) -> None:
        super().__init__(value, parent, label)
        # Whether code may make an instance; an instance that is there has been made.
        self.is_called = False

    def identity(self) -> Any:
        return self.value

    def read(self, value: Any) -> Content:
        content: Content = {}
        is_module = issubclass(value, nn.Module)
        for base in reversed(_own_classes(value)):
            for name, member in base.__dict__.items():
                # The forward of a module is followed from its instances, which may have a copy of it.
                # Methods with two underscores Python itself looks up.
                if _EVERYTHING in self.looked_up:
                    content[name] = member
                if (name in self.looked_up and not (is_module and name == "forward")) or (
                    name.startswith("__")
                    and isinstance(member, types.FunctionType)
                    and (self.is_called or name not in _MAKES_INSTANCES)
                ):
                    content[name] = member
        return content

    def label_of(self, name: Any) -> str:
        return f"attribute {name!r} of {self.value.__name__}" if name else ""

    def extra(self) -> Iterable[tuple[Any, Any]]:
        yield "", type(self.value)


# Whether these are followed depends on which they are.
_TOLD_BY_VALUE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.ModuleType,
    type,
    operator.attrgetter,
)
# What no plan may hold, and is not followed.
_HOLDS_UNSEEN = (Tensor, torch.Generator, operator.methodcaller)
_BINDERS = (_FunctionNode, _FrozenNode)
_MUTABLE = (_SequenceNode, _DictNode, _ObjectNode, _FunctionNode)
# Types written in C whose instances have nothing but attributes, and object itself.
_ALLOCATORS = (types.SimpleNamespace, object)
_COPIED = (Tensor, nn.Module)
_CONTAINERS = (dict, list, tuple, deque)
_Cached = type(functools.lru_cache(lambda: None))
_LOOK_UP_ANYTHING = (
    *("getattr", "setattr", "__getattribute__", "vars", "__dict__", "__slots__"),
    *("attrgetter", "asdict", "astuple", "fields", "copy"),
)
_EVERYTHING = "*"
_UNINITIALIZED = (nn.UninitializedParameter, nn.UninitializedBuffer)
# How an object, a module and a method of theirs refer to the class, which make no instances.
_TYPE_OF = ("__class__", ("", "__class__"), ("cell", "__class__"))
_MAKES_INSTANCES = ("__new__", "__init__", "__post_init__")
_MOVES_STREAMS = ("fork_rng", "manual_seed", "manual_seed_all", "set_rng_state", "set_state", "seed")
_WRITES_UNSEEN = ("data", "set_", "numpy", "untyped_storage", "data_ptr", "from_dlpack", "detach_")
_NORMALIZES = ("batch_norm", "native_batch_norm", "instance_norm", "running_mean", "running_var")
_CALLED_BY_TORCH = ("forward", "setup_context", "backward", "vjp", "jvp", "vmap")


class _Rebuild:
    """One rebuilding of a closure: shared and cyclic references stay shared and cyclic."""

    def __init__(self, nodes: Mapping[int, _Node], mapped: Mapped, first: bool) -> None:
        self.nodes = nodes
        self.mapped = mapped
        self.first = first
        self._built: dict[int, Any] = {}
        self._namespaces: dict[int, dict[str, Any]] = {}
        self._placed: list[tuple[_Node, Any, Content]] = []
        self._unfilled: list[tuple[_Node, Any]] = []
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
            if isinstance(node, _DictNode):  # a partial function takes what is in it
                self._fill(node, new)
            else:
                self._unfilled.append((node, new))
            # One after another, since references may be longer than Python's stack is deep.
            while is_outermost and self._unfilled:
                self._fill(*self._unfilled.pop())
        finally:
            self._filling = not is_outermost
        return new

    def _fill(self, node: _Node, new: Any) -> None:
        node.fill(new, self)
        if self.first:
            self._placed.append((node, new, node.assignable(new)))

    def item(self, node: _Node, name: Any) -> Any:
        """What stands for the thing that `node` calls `name`."""
        child = node.children.get(name)
        return node.items[name] if child is None else self.build(child)

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
            if isinstance(node, _FixedNode):
                for name, value in node.read(node.value).items():
                    if id(value) in originals and value is not originals[id(value)]:
                        raise EscapeError(
                            f"remat({name_of_f}) stores an object ({type(value).__name__}) as "
                            f"{node.label_of(name)}. Under a transform it is a copy: return it from the "
                            "function."
                        )


def _spread(nodes: Mapping[int, _Node]) -> None:
    """What refers to something that is rebuilt has to be rebuilt."""
    # Most of what an object refers to was met after it.
    backwards = [n for n in nodes.values() if n.children and not isinstance(n, _FixedNode)][::-1]
    spreading = True
    while spreading:
        spreading = False
        for node in backwards:
            needed, frozen = node.needed, node.frozen
            for key in node.children.values():
                child = nodes[key]
                needed |= child.needed
                if child.frozen > frozen and (child.frozen != _BOUND or isinstance(node, _BINDERS)):
                    frozen = child.frozen
            if needed != node.needed or frozen != node.frozen:
                node.needed, node.frozen = needed, frozen
                spreading = True


def _samples(values: Any, count: int, size: int) -> bytes:
    """Blocks from all over a large array of `count` values: there is no time to read all of it."""
    block = min(count, _MAX_SAMPLED // size // _SAMPLES + 1)
    starts = [(count - block) * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
    return b"".join([bytes(values[start : start + block]) for start in starts])


def _is_parameter(x: Any) -> bool:
    return type(x) is nn.Parameter or isinstance(x, nn.Parameter)


def _version(x: Tensor) -> int | None:
    """How often `x` was changed in place; inference tensors do not count."""
    return None if x.is_inference() else x._version


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


def _node_type(value: Any, kind: type) -> type[_Node] | None:
    if kind is types.FunctionType:
        return None if _is_of_library(value) and _holds_nothing(value) else _FunctionNode
    if kind is types.MethodType:
        return _MethodNode
    if isinstance(value, functools.partial):
        return _PartialNode
    if isinstance(value, nn.Module):
        if kind.__name__ == "OptimizedModule" and hasattr(value, "_orig_mod"):
            return _CompiledNode
        if isinstance(value, torch.jit.ScriptModule):
            return None
        return _StayingModuleNode if _notices_copies(kind) else _ModuleNode
    if kind in (dict, OrderedDict, defaultdict):
        return _DictNode
    if kind in (list, deque):
        return _SequenceNode
    if isinstance(value, tuple) and (kind is tuple or hasattr(kind, "_fields")):
        return _TupleNode
    if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        is_bound = value.__self__ is not None and not isinstance(value.__self__, type | types.ModuleType)
        return _BuiltinMethodNode if is_bound else None
    if isinstance(value, type):
        return _ClassNode if _own_classes(value) else None
    if isinstance(value, types.ModuleType):
        is_followed = value.__name__ in _RANDOM or not _is_library(value.__name__)
        return _PythonModuleNode if is_followed else None
    for fixed, node_type in _FIXED.items():
        if isinstance(value, fixed):
            return node_type
    if not _is_plain_python(kind):
        return None
    return _StayingNode if _notices_copies(kind) else _ObjectNode


_FIXED: dict[type | tuple[type, ...], type[_Node]] = {
    (set, frozenset): _SetNode,
    (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items())): _MappingNode,
    contextvars.ContextVar: _VariableNode,
    threading.local: _ThreadLocalNode,
    (staticmethod, classmethod, property, _Cached): _DescriptorNode,
    _CONTAINERS: _ContainerNode,
    (np.ndarray, bytearray): _ArrayNode,
    weakref.ref: _WeakNode,
    (weakref.WeakKeyDictionary, weakref.WeakValueDictionary): _WeakMappingNode,
    enum.Enum: _MemberNode,
    types.GeneratorType: _GeneratorNode,
}


def take_for_own(f: Any) -> None:
    """Search the package of a function as the user's own code."""
    package = _package(getattr(f, "__module__", None) or type(f).__module__)
    if package not in _own_packages and package not in _LIBRARIES:
        _own_packages.add(package)
        _is_installed.cache_clear()
        _is_own.forget()
        _has_code_of_package.forget()
        _is_library.cache_clear()
        _plans.clear()


@functools.lru_cache(maxsize=4096)
def _is_library(module: Any) -> bool:
    package = _package(module)
    return package in _LIBRARIES or _is_installed(package)


def _package(module: Any) -> str:
    # Cython's types may have something else in the place of the name.
    return module.partition(".")[0] if isinstance(module, str) else ""


@functools.lru_cache(maxsize=4096)
def _is_installed(package: str) -> bool:
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    is_installed = "site-packages" in file or "dist-packages" in file
    return is_installed and package not in _own_packages


def _is_of_package(value: Any, kind: type) -> bool:
    """Whether an object has, or is, code of an installed package."""
    if isinstance(value, types.FunctionType):
        return _is_installed_beside_torch(value.__globals__.get("__name__"))
    if isinstance(value, types.BuiltinFunctionType):
        return _is_installed_beside_torch(value.__module__)
    if isinstance(value, types.ModuleType):
        return _is_installed_beside_torch(value.__name__)
    return _has_code_of_package(value if isinstance(value, type) else kind)


def _is_installed_beside_torch(module: Any) -> bool:
    package = _package(module)
    return package not in _LIBRARIES and _is_installed(package)


@_OfClass
def _has_code_of_package(kind: type) -> bool:
    return any([_is_installed_beside_torch(base.__module__) for base in kind.__mro__])


def _holds_nothing(function: types.FunctionType) -> bool:
    """Whether a function refers to nothing but to its globals."""
    return not (function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__)


def _refers_to_nothing(function: types.FunctionType) -> bool:
    code = function.__code__
    return _holds_nothing(function) and not _global_names(code) and not _imported(code)


def _is_of_library(function: types.FunctionType) -> bool:
    # Not `__module__`, which functools.wraps copies.
    return _is_library(function.__globals__.get("__name__"))


def _own_classes(kind: type) -> tuple[type, ...]:
    """A class and its bases, without those of libraries."""
    return tuple([base for base in kind.__mro__ if not _is_library(base.__module__)])


def _moves_on(value: Any) -> bool:
    """Whether an object that cannot be followed gives something else each time."""
    return isinstance(value, random.SystemRandom) or hasattr(type(value), "__next__")


@_OfClass
def _notices_copies(kind: type) -> bool:
    """Whether a class would close what a copy shares with the original, or remember each copy."""
    return hasattr(kind, "__del__") or any(
        isinstance(member, _Cached) for base in kind.__mro__ for member in base.__dict__.values()
    )


@_OfClass
def _is_plain_python(kind: type) -> bool:
    """Whether an instance is fully described by its `__dict__` and slots."""
    heap_type = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or by an extension

    def is_python(base: type) -> bool:
        new = base.__dict__.get("__new__")
        return bool(base.__flags__ & heap_type) and not isinstance(new, types.BuiltinFunctionType)

    return _package(kind.__module__) not in _OPAQUE and all(
        base in _ALLOCATORS or is_python(base) for base in kind.__mro__
    )


def _weak(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: None


@_OfClass
def _is_own(kind: type) -> bool:
    """Whether no library has code for instances of a class."""
    return len(_own_classes(kind)) == len([b for b in kind.__mro__ if b not in (object, nn.Module)])


def _attributes(value: Any) -> Content:
    content = dict(getattr(value, "__dict__", ()))
    for name in _slots(type(value)):
        with suppress(AttributeError):
            content[name] = getattr(value, name)
    return content


@_OfClass
def _slots(kind: type) -> tuple[str, ...]:
    return tuple(
        [
            name
            for base in kind.__mro__
            for name, member in base.__dict__.items()
            if isinstance(member, types.MemberDescriptorType) and name != "__dict__"
        ]
    )


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The global names that code loads, in itself or in a function within it."""
    names = dict.fromkeys(_operands(code, "LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_global_names(constant)))
    return tuple(names)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """All names that code looks up, and its strings, which it may hand to `getattr`."""
    names = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
        else:  # a tuple is of a loop over names, or of a class pattern
            names.update([s for s in pytree.tree_leaves(constant) if isinstance(s, str) and s.isidentifier()])
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def _imported(code: types.CodeType) -> frozenset[str]:
    """The modules that code imports, in itself or in a function within it."""
    names = {*_operands(code, "IMPORT_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _imported(constant)
    return frozenset(names)


def _operands(code: types.CodeType, *opnames: str) -> list[str]:
    return [i.argval for i in dis.get_instructions(code) if i.opname in opnames]


@functools.lru_cache(maxsize=4096)
def _assigned(code: types.CodeType) -> frozenset[str]:
    """The closure and global variables that code assigns, in itself or in a function within it."""
    assigned = _operands(code, "STORE_DEREF", "DELETE_DEREF", "STORE_GLOBAL")
    names = {name for name in assigned if name not in code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _assigned(constant) - set(code.co_cellvars)
    return frozenset(names)
