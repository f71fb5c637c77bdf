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
import enum
import functools
import operator
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import _torch
from .errors import EscapeError, MutationError, describe
from .fixed import (
    CONTAINERS,
    EVERYTHING,
    ArrayNode,
    ClassNode,
    ContainerNode,
    DescriptorNode,
    GeneratorNode,
    MappingNode,
    MemberNode,
    OfContextNode,
    PythonModuleNode,
    SetNode,
    StayingModuleNode,
    StayingNode,
    ThreadLocalNode,
    VariableNode,
    WeakMappingNode,
    WeakNode,
)
from .lookup import (
    ATOMS,
    GONE,
    Cached,
    count_as_own,
    holds_nothing,
    is_library,
    is_of_library,
    is_of_package,
    is_plain_python,
    moves_on,
    names_of,
    notices_copies,
    own_classes,
    refers_to_nothing,
)
from .nodes import (
    BOUND,
    HELD,
    ITERATORS,
    LOOK_UP_ANYTHING,
    MAX_SNAPSHOT,
    BuiltinMethodNode,
    CollectionNode,
    CompiledNode,
    DictNode,
    FixedNode,
    FrozenNode,
    FunctionNode,
    IteratorNode,
    Mapped,
    MethodNode,
    ModuleNode,
    NamedNode,
    Node,
    ObjectNode,
    PartialNode,
    Rebuild,
    SequenceNode,
    TensorNode,
    TupleNode,
    is_tracked,
    may_be_statistics,
    version_of,
    versions_of,
)
from .world import PythonStream

# Libraries that have random streams of their own.
_RANDOM = ("random", "numpy", "numpy.random")
_MAX_DEPTH = 128


class Uninitialized(Exception):
    """A parameter has no shape yet: the first call of a lazy module gives it one."""


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
        self, root: Any, everything: bool = False, stand_in: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._stand_in = stand_in or _itself
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
        self._nodes: dict[int, Node] = {}
        self._caches: list[Any] = []
        self._functions: list[FunctionNode] = []
        self._mutable: list[Node] = []
        self._shared: list[Node] = []
        # What code looks up by name, and where; more code is found there, which looks up more.
        self._names: set[str] = {
            *_CALLED_BY_TORCH,
            *((EVERYTHING, *LOOK_UP_ANYTHING) if everything else ()),
        }
        self._named: list[NamedNode] = []
        # What lies so deep that Python's stack would not reach it.
        self._deep: list[tuple[Node, Iterable[tuple[Any, Any]]]] = []
        self._root: int | None = None
        # A root that has no nodes; and its code, if it is a function that refers to nothing.
        self._opaque: Any = None
        self._code: types.CodeType | None = None
        if type(root) is types.FunctionType and refers_to_nothing(root):
            self._names = set(names_of(root.__code__))
            self._opaque, self._code = root, root.__code__
        else:
            self._search(root)
        habits = _habits_of(self._names)
        self.writes_unseen = habits.writes_unseen
        self.moves_streams = habits.moves_streams
        self.retains_gradients = habits.retains_gradients
        self.registers_hooks = habits.registers_hooks
        self.normalizes = habits.normalizes
        if self.writes_unseen:
            self._take_snapshots()
        if self._nodes:
            self._share()
            _spread(self._nodes)
        self.is_pure = self.is_pure and not habits.tells_by_identity and not self._is_told_by_identity()
        self._versions = versions_of(self.constants)

    @property
    def has_updated_buffers(self) -> bool:
        """Whether f has updated buffers, of which the copies are kept. After `settle`."""
        return any(isinstance(node, TensorNode) and node.snapshot for node in self._nodes.values())

    def _search(self, root: Any) -> None:
        self._nodes = {}
        self._root = self._visit(root, None, "", 0)
        self._opaque = root if self._root is None else None  # a builtin function
        self._visit_named()

    def _file(self, node: Node) -> None:
        """Note what to look at before a recomputation."""
        if isinstance(node, FunctionNode) and node.state:
            self._functions.append(node)
        if node.shared:
            self._shared.append(node)
        elif isinstance(node, _MUTABLE) and not node.needed:
            self._mutable.append(node)

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
                if isinstance(node, DictNode) and not ATOMS.issuperset(map(type, node.items))
            ]
        )

    def _take_snapshots(self) -> None:
        buffers: set[int] = set()
        for node in self._nodes.values():
            if isinstance(node, ModuleNode) and node.value.training:
                buffers.update([id(x) for x in node.value._parameters.values()])
        for node in self._nodes.values():
            if isinstance(node, TensorNode) and not node.needed:
                node.take_snapshot(of_buffer=node.key in buffers)

    def rebuild(self, mapped: Mapped) -> Any:
        """The callable as it was at the time of the search, around other tensors.

        `mapped` gives a tensor for the id of each of `tensors`.
        """
        changed = [node for node in self._mutable if node.has_changed()]
        for node in changed:
            node.frozen = HELD
        if changed:
            _spread(self._nodes)
        if self._root is not None:
            return Rebuild(self._nodes, mapped, first=False).build(self._root)
        root, code = self._opaque, self._code
        if code is None or (root.__code__ is code and holds_nothing(root)):
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
        rebuild = Rebuild(self._nodes, mapped, first=True)
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
        self._functions, self._shared, self._mutable = [], [], []
        for i, x in enumerate(self.constants):
            node = self._nodes.get(id(x))
            is_put_back = isinstance(node, TensorNode) and node.settle(self.writes_unseen)
            if isinstance(node, TensorNode) and is_put_back and (node.is_buffer or may_be_statistics(x)):
                self._versions[i] = None
            elif is_put_back or version_of(x) != self._versions[i]:
                raise MutationError(
                    f"remat({name}) changed {self.where(id(x))} ({describe(x)}) in place. The "
                    "recomputation would start from the changed values. Return the new value "
                    f"instead, or make it a buffer, of at most {MAX_SNAPSHOT} elements, of a module that is "
                    "training."
                )
        # What f has assigned itself is its state. The rest has to be the same in the recomputation.
        for node in self._nodes.values():
            if node.shared:
                node.assigned = frozenset(node.changes())
                self.is_pure = self.is_pure and not node.assigned
            elif isinstance(node, _MUTABLE):
                node.assigned = node.changed_names()
                if node.was_assigned():
                    self.is_pure = False
            if isinstance(node, FunctionNode) and node.state:
                node.leave_state(node.assignable(node.value))
            self._file(node)

    def check_unchanged(self, name: str) -> dict[int, MutationError]:
        """Before a recomputation: is what f captured still what it was?

        Returns what to say of changed tensors that the forward did not differentiate, nor maybe use.
        """
        errors = {}
        now = versions_of(self.constants)
        for x, version, version_now in zip(self.constants, self._versions, now, strict=True):
            if version is not None and version_now != version:
                error = MutationError(
                    f"{self.where(id(x))} ({describe(x)}), which remat({name}) captured, was changed in "
                    f"place between the forward and the recomputation: it is at version "
                    f"{version_now}, and was at {version}. Pass a copy of it, or change it after "
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
                if isinstance(node, OfContextNode) and node.was(item) is not GONE:
                    continue  # `restored` puts it back
                raise MutationError(
                    f"{self._path(node, item)}, which remat({name}) reads, is not what it was in the "
                    "forward, and the recomputation would read the new value. Pass it as an argument, "
                    "or change it after the backward."
                )
        return errors

    def restored(self) -> AbstractContextManager[None] | None:
        """Context variables and thread-local attributes as they were: a backward has a thread of its own."""
        return self._restored() if any([isinstance(n, OfContextNode) for n in self._shared]) else None

    @contextmanager
    def _restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            for node in self._shared:
                if isinstance(node, OfContextNode):
                    for name in set(node.changes()) - node.assigned:
                        stack.callback(node.assign(name, node.was(name)))
            yield

    def statistics(self) -> dict[int, Tensor]:
        """What buffers were that f finds where no copy can be put, by the ids of the tensors."""
        return {
            node.key: node.snapshot[1].clone()
            for node in self._shared
            if isinstance(node, TensorNode) and node.snapshot is not None
        }

    def copies(self) -> list[Tensor]:
        """Copies that are held of what f may update."""
        return [
            node.snapshot[1]
            for node in self._nodes.values()
            if isinstance(node, TensorNode) and node.snapshot is not None
        ]

    def keep_as_constants(self, tensors: Mapping[int, Tensor]) -> None:
        """Hold tracked tensors that turned out to be no inputs, as they are."""
        for key in tensors.keys() & self._nodes.keys():
            self._nodes[key].needed, self._nodes[key].value = False, tensors[key]
        self._unused.update(tensors)
        self.constants += tensors.values()
        self._versions += versions_of(tensors.values())

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

    def _path(self, node: Node, *items: Any) -> str:
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
            if isinstance(node, CollectionNode) and not (node.assigned or node.shared):
                continue  # `settle` has looked
            items = node.items
            now = [*node.assignable(node.value).items()]
            now = [(name, value) for name, value in now if value is not items.get(name)]
            before = {id(x) for x in items.values()} if now else set()
            for name, value in now:
                if id(value) in before or type(value) in ATOMS or id(value) in self._nodes:
                    continue
                if node.is_of_library and not isinstance(value, Tensor):
                    continue
                found = Closure(value, everything=True)
                for x in (*found.tensors, *found.constants):
                    if id(x) not in self._nodes:
                        yield x, node.label_of(name)

    def _visit(self, value: Any, parent: int | None, label: str, depth: int) -> int | None:
        kind = type(value)
        if kind in ATOMS:
            return None
        key = id(value)
        if key in self._nodes:
            return key
        if isinstance(value, Tensor) and self._is_left_over(value):
            return None
        node: Node
        if isinstance(value, _UNINITIALIZED):
            raise Uninitialized
        if isinstance(value, Tensor):
            node = TensorNode(value, parent, label)
            self._take(node)
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
            return None
        else:
            self.reaches_packages |= is_of_package(value, kind)
            node_type = _node_type(value, kind)
            if node_type is None:
                stream = PythonStream.of(value)
                if stream is not None:
                    self.generators.append(stream)
                self.is_pure = self.is_pure and (stream is not None or not moves_on(value))
                if isinstance(value, operator.attrgetter | operator.methodcaller):
                    self._names.update(
                        [s for s in pytree.tree_leaves(value.__reduce__()) if isinstance(s, str)]
                    )
                return None
            node = node_type(value, parent, label)
            self.is_pure = self.is_pure and not isinstance(node, GeneratorNode)
            self.has_rnn |= isinstance(value, nn.RNNBase)
        self._nodes[key] = node
        if isinstance(value, Cached):
            self._caches.append(value)
        if isinstance(node, NamedNode):
            looked_up = set() if isinstance(node, PythonModuleNode) else self._names
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

    def _take(self, node: TensorNode) -> None:
        x = node.value
        node.needed = is_tracked(x) or self._stand_in(x) is not x
        if node.needed and _torch.takes_only_fake() and not _torch.is_fake(x):
            node.needed = False  # it is replaced before it is used (`functional_call`), or torch refuses it
        if not node.needed and may_be_statistics(x):
            node.take_snapshot(of_buffer=False)
        (self.tensors if node.needed else self.constants).append(x)

    def _take_buffers_of(self, node: Node) -> None:
        for x in node.updated_buffers():
            found = self._nodes[id(x)]
            if isinstance(found, TensorNode) and not found.needed:
                found.take_snapshot(of_buffer=True)

    def _visit_items(self, node: Node, items: Iterable[tuple[Any, Any]], depth: int) -> None:
        if depth > _MAX_DEPTH:
            self._deep.append((node, items))
            return
        for name, item in items:
            if type(item) not in ATOMS:
                child = self._visit(item, node.key, node.label_of(name), depth + 1)
                if child is not None:
                    node.children[name] = child
                    found = self._nodes[child]
                    if isinstance(found, ClassNode) and name not in _TYPE_OF:
                        found.is_called = True
                    if isinstance(found, PythonModuleNode):
                        found.looked_up |= (
                            node.looked_up if isinstance(node, PythonModuleNode) else node.names()
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
        functions = [node for node in nodes.values() if type(node) is FunctionNode]
        assigned = {cell for function in functions for cell in function.assigned_cells()}
        for function in functions:
            function.share(assigned)
        # What is reached from there is shared with the original, whatever other ways lead to it.
        pending: list[Node] = [node for node in nodes.values() if isinstance(node, FixedNode)]
        while pending:
            node = pending.pop()
            if not node.shared:
                node.shared = True
                pending.extend([nodes[child] for child in node.children.values()])
                self.is_pure = self.is_pure and not isinstance(node, IteratorNode)
                if isinstance(node, TensorNode) and node.needed:
                    self.loose.append(node.value)


class _Habits(NamedTuple):
    """What code may do, judged by the names that it looks up."""

    # Write where no version counter sees it.
    writes_unseen: bool
    # Draw random numbers, and leave the streams where they were.
    moves_streams: bool
    # Ask this of a tensor that it was given, or has computed.
    retains_gradients: bool
    registers_hooks: bool
    # Update the statistics that it is given, and read them.
    normalizes: bool
    tells_by_identity: bool
    asks_for_state: bool


# The names that tell each.
WRITES_UNSEEN = (
    *("data", "set_", "numpy", "untyped_storage", "data_ptr", "from_dlpack", "detach_"),
    *("apply_", "map_", "map2_", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"),
)
_SIGNS = (
    WRITES_UNSEEN,
    ("fork_rng", "manual_seed", "manual_seed_all", "set_rng_state", "set_state", "seed"),
    ("retain_grad",),
    ("register_hook",),
    ("batch_norm", "native_batch_norm", "instance_norm", "running_mean", "running_var"),
    ("id",),
    ("state_dict", "load_state_dict"),
)


def _habits_of(names: set[str]) -> _Habits:
    return _Habits(*[not names.isdisjoint(signs) for signs in _SIGNS])


def _itself(x: Tensor) -> Tensor:
    return x


def code_of(root: Any) -> Any:
    """The code of a function or method, or the type of any other callable."""
    if type(root) is types.MethodType:
        root = root.__func__
    return root.__code__ if type(root) is types.FunctionType else type(root)


_BINDERS = (FunctionNode, FrozenNode)
_MUTABLE = (SequenceNode, DictNode, ObjectNode, FunctionNode)
_COPIED = (Tensor, nn.Module)
_UNINITIALIZED = (nn.UninitializedParameter, nn.UninitializedBuffer)
# How an object, a module and a method of theirs refer to the class, which make no instances.
_TYPE_OF = ("__class__", ("", "__class__"), ("cell", "__class__"))
_CALLED_BY_TORCH = ("forward", "setup_context", "backward", "vjp", "jvp", "vmap")


def _spread(nodes: Mapping[int, Node]) -> None:
    """What refers to something that is rebuilt has to be rebuilt."""
    # Most of what an object refers to was met after it.
    backwards = [n for n in nodes.values() if n.children and not isinstance(n, FixedNode)][::-1]
    spreading = True
    while spreading:
        spreading = False
        for node in backwards:
            needed, frozen = node.needed, node.frozen
            for key in node.children.values():
                child = nodes[key]
                needed |= child.needed
                if child.frozen > frozen and (child.frozen != BOUND or isinstance(node, _BINDERS)):
                    frozen = child.frozen
            if needed != node.needed or frozen != node.frozen:
                node.needed, node.frozen = needed, frozen
                spreading = True


def _node_type(value: Any, kind: type) -> type[Node] | None:
    if kind is types.FunctionType:
        return None if is_of_library(value) and holds_nothing(value) else FunctionNode
    if kind is types.MethodType:
        return MethodNode
    if isinstance(value, functools.partial):
        return PartialNode
    if isinstance(value, nn.Module):
        if kind.__name__ == "OptimizedModule" and hasattr(value, "_orig_mod"):
            return CompiledNode
        if isinstance(value, torch.jit.ScriptModule):
            return None
        return StayingModuleNode if notices_copies(kind) else ModuleNode
    if kind in (dict, OrderedDict, defaultdict):
        return DictNode
    if kind in (list, deque):
        return SequenceNode
    if kind in ITERATORS:
        return IteratorNode
    if isinstance(value, tuple) and (kind is tuple or hasattr(kind, "_fields")):
        return TupleNode
    if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        is_bound = value.__self__ is not None and not isinstance(value.__self__, type | types.ModuleType)
        return BuiltinMethodNode if is_bound else None
    if isinstance(value, type):
        return ClassNode if own_classes(value) else None
    if isinstance(value, types.ModuleType):
        is_followed = value.__name__ in _RANDOM or not is_library(value.__name__)
        return PythonModuleNode if is_followed else None
    for fixed, node_type in _FIXED.items():
        if isinstance(value, fixed):
            return node_type
    if not is_plain_python(kind):
        return None
    return StayingNode if notices_copies(kind) else ObjectNode


_FIXED: dict[type | tuple[type, ...], type[Node]] = {
    (set, frozenset): SetNode,
    (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items())): MappingNode,
    contextvars.ContextVar: VariableNode,
    threading.local: ThreadLocalNode,
    (staticmethod, classmethod, property, Cached): DescriptorNode,
    CONTAINERS: ContainerNode,
    (np.ndarray, bytearray): ArrayNode,
    weakref.ref: WeakNode,
    (weakref.WeakKeyDictionary, weakref.WeakValueDictionary): WeakMappingNode,
    enum.Enum: MemberNode,
    types.GeneratorType: GeneratorNode,
}


def take_for_own(f: Any) -> None:
    """Search the package of a function as the user's own code."""
    count_as_own(getattr(f, "__module__", None) or type(f).__module__)
