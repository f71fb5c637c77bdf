"""What a function refers to, as it was in its forward: a recomputation has to find the same.

A region keeps the inputs of f. What f finds elsewhere (the parameters and buffers of its module, variables
of the enclosing function, globals) may be another when the backward runs: an optimizer has stepped it,
`functional_call` has put the module's own back, a loop has gone on, or f itself has changed it. What can be
put back is put back for the time of a recomputation: variables, contents of lists, dicts and small arrays,
attributes, buffers, code and defaults of functions, and what `functional_call` had replaced. What cannot, a
parameter or another tensor that was changed in place, is an error if it is used.

So f finds what it has itself assigned in the forward as it was before. What it does to that in the
recomputation is undone, but for what a caller looks at: counters count on, and lists grow. Numbers in lists
and closure variables to which f adds are not put back at all: by those, programs tell the forward from the
recomputation, and torch's checkpoint lets them. There, what is saved is compared by value.

The search goes where code of f leads directly: modules with all that is inside of them and their hooks,
classes with their methods, closures, defaults, globals that the code names, partial arguments, containers and
plain objects; not into the code of libraries, nor what their modules have for attributes. Leaves that
require grad are found wherever they come from, in the graph of what f has returned.
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import world
from ..errors import CheckpointError, MutationError, describe
from ..lookup import (
    OfClass,
    attributes_of,
    global_names,
    is_library,
    is_of_library,
    is_plain_python,
    names_of,
    own_classes,
)
from ..nodes import may_be_statistics
from .contents import (
    EMPTY,
    Array,
    Attributes,
    Bag,
    Contents,
    Members,
    Weak,
    added_to,
    assign,
    changed,
    is_count,
    leave_cell,
    version,
)
from .modules import Modules, modules_of
from .reach import is_of_torch_or_ours, is_torch, looks_further, refers_to_torch_alone

_CONSTANTS = {type(None), bool, int, float, complex, str, bytes}
_PLAIN = {*_CONSTANTS, Tensor, nn.Parameter}
_CONTAINERS = (list, tuple, dict)
# Those whose contents are put back.
_MUTABLE = {list, dict, OrderedDict, defaultdict, Counter}
_BAGS = (set, deque)
_DEEPEST = 4
_STREAMS = (
    torch.Generator,
    random.Random,
    numpy.random.RandomState,
    numpy.random.Generator,
    numpy.random.BitGenerator,
)
# Of which functions written in C are.
_NO_STREAMS = {type(None), type, ModuleType}
# Lists and dicts among globals up to this length are searched.
_LONGEST = 1000


class Held:
    """What `f` refers to, now."""

    __slots__ = (
        "_again_as_before",
        "_cells",
        "_contents",
        "_counted",
        "_functions",
        "_gradients",
        "_is_closed",
        "_iterators",
        "_kinds",
        "_modules",
        "_results",
        "_seen",
        "_tensors",
        "_variables",
        "_wholes",
        "has_all_statistics",
        "may_count",
        "running",
        "streams",
    )

    def __init__(self, f: Any, others: Sequence[Any] = (), again_as_before: bool = False) -> None:
        self._again_as_before = again_as_before
        self._modules: list[Modules] = []
        # The ids of what batch_norm updates without a word to the version counter.
        self.running: set[int] = set()
        # Tensors beside those of modules, and leaves that are found in the graph; and their versions.
        self._tensors: list[tuple[weakref.ref[Tensor], int]] = []
        # The gradients of leaves, when one is asked for inside of f.
        self._gradients: list[tuple[Tensor, Any]] = []
        # What is put back as a whole.
        self._wholes: list[Array | Bag | Members] = []
        self._functions: list[tuple[FunctionType, tuple[Any, ...]]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._contents: list[Contents] = []
        self._iterators: list[tuple[Any, Any]] = []
        # The classes of objects, and to which names the code of those, of modules and functions adds.
        self._kinds: set[type] = set()
        self._counted: set[str] | None = None
        # Whether f may count something by which it tells its recomputation.
        self.may_count = False
        # Where in contents and modules there are tensors with a graph.
        self._results: list[tuple[Any, Any]] = []
        self._variables: list[tuple[ContextVar[Any], Any]] = []
        # Random streams that are not torch's own.
        self.streams: list[world.Stream] = []
        self._seen: set[int] = set()
        # Whether all tensors are found that f may use: otherwise leaves are searched in its graph.
        self._is_closed = True
        # Whether there are no others that batch_norm may update than those.
        self.has_all_statistics = False
        alone = _PLAIN.issuperset(map(type, others))
        if isinstance(f, nn.Module):
            self._take_module(f, alone)
            self.has_all_statistics = alone and self._is_closed and self._modules[0].layout.is_of_torch
        else:
            self._search(f, 0)
        if not alone:
            for x in others:
                if type(x) not in _PLAIN and not isinstance(x, Tensor):
                    self._search(x, 0)
        if self.may_count:
            counts = [x for _, x in self._cells]
            for contents in self._contents:
                counts += contents.was.values() if contents.in_order else ()
            self.may_count = int in map(type, counts)

    def _take_contents(self, there: Any, in_order: bool) -> None:
        was = dict(there.items() if isinstance(there, dict) else enumerate(there))
        if not _CONSTANTS.issuperset(map(type, was.values())):
            for key, x in was.items():
                if type(x) not in _CONSTANTS and isinstance(x, Tensor) and x.grad_fn is not None:
                    self._results.append((was, key))
        self._contents.append(Contents(there, was, len(was), in_order))

    # -- the search ---------------------------------------------------------------------------------

    def _search(self, x: Any, depth: int) -> None:
        kind = type(x)
        if kind in _CONSTANTS or id(x) in self._seen:
            return
        if depth > _DEEPEST:
            self._is_closed = False
            return
        self._seen.add(id(x))
        if kind is FunctionType:
            self._take_function(x, depth)
        elif kind is BuiltinFunctionType and type(x.__self__) in _NO_STREAMS:
            self._is_closed &= refers_to_torch_alone(x)
        elif isinstance(x, nn.Module):
            self._take_module(x)
        elif isinstance(x, Tensor):
            self._is_closed &= kind in _PLAIN
            if (now := version(x)) is not None:
                self._tensors.append((weakref.ref(x), now))
        elif kind is MethodType:
            self._search(x.__self__, depth)
            self._search(x.__func__, depth)
        elif isinstance(x, functools.partial):
            self._take_contents(x.keywords, in_order=True)
            for y in (x.func, *x.args, *x.keywords.values()):
                self._search(y, depth + 1)
        elif isinstance(x, _CONTAINERS):
            if _is_mutable(kind):
                self._take_contents(x, in_order=True)
                if attributes := getattr(x, "__dict__", None):
                    self._take_attributes(attributes, depth)
            else:
                self._is_closed &= kind is tuple
            items = x.values() if isinstance(x, dict) else x
            if not _CONSTANTS.issuperset(map(type, items)):
                for y in items:
                    self._search(y, depth if type(y) in _MUTABLE else depth + 1)
        else:
            self._is_closed = False
            self._search_object(x, depth)

    def _search_object(self, x: Any, depth: int) -> None:
        kind = type(x)
        if kind is ContextVar:
            self._variables.append((x, x.get(EMPTY)))
        elif kind is numpy.ndarray:
            if not x.dtype.hasobject:
                self._wholes.append(Array(x))
        elif kind in _BAGS:
            self._wholes.append(Bag(x))
            for y in x:
                self._search(y, depth + 1)
        elif isinstance(x, type):
            self._take_class(x, depth)
        elif kind in _ITERATORS:
            self._iterators.append((x, _position(x)))
        elif self._take_stream(x) or not is_plain_python(kind):
            pass
        elif depth < 2 or not is_library(kind.__module__):
            self._take_object(x, depth)

    def _take_object(self, x: Any, depth: int) -> None:
        there, attributes = getattr(x, "__dict__", None), attributes_of(x)
        if there is None or len(there) < len(attributes):
            there = Attributes(x, attributes)
        self._kinds.add(type(x))
        self._take_attributes(there, depth)
        for base in own_classes(type(x)):
            self._search(base, depth)

    def _take_class(self, x: type, depth: int, is_closed: bool = False) -> None:
        there, (data, members) = vars(x), _members_of(x)
        if data:
            self._take_attributes(Attributes(x, {name: there[name] for name in data if name in there}), depth)
        if members:
            was = {name: there[name] for name in members if name in there}
            self._wholes.append(Members(x, was))
            for y in was.values():
                if is_closed and type(y) is FunctionType:  # which refers to torch alone
                    self._take_parts(y)
                else:
                    self._search(_function_of(y), depth + 1)

    def _take_attributes(self, there: dict[str, Any], depth: int) -> None:
        self._take_contents(there, in_order=False)
        for y in there.values():
            self._search(y, depth + 1)

    def _take_module(self, root: nn.Module, alone: bool = False) -> None:
        modules = modules_of(root, alone)
        self._modules.append(modules)
        self._seen |= modules.layout.keys
        self._is_closed &= modules.is_closed
        self._results += [(modules.values, at) for at in modules.results]
        if modules.kept:
            self.running.update(map(id, modules.running))
        if not (modules.is_closed and modules.layout.is_of_torch):
            self._search_below(modules)

    def _search_below(self, modules: Modules) -> None:
        is_closed = self._is_closed
        for kind in modules.layout.own:
            if id(kind) not in self._seen:
                self._seen.add(id(kind))
                self._take_class(kind, 0, modules.is_closed)
        for x in modules.elsewhere():
            self._search(x, 1)
        for hook in modules.hooks():
            self._search(hook, 2)  # which does not go into objects of libraries, which are at work there
        # Of what is closed, layouts know that this leads to no tensors.
        self._is_closed = is_closed

    def _take_function(self, f: FunctionType, depth: int) -> None:
        for cell in f.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # empty
                continue
            self._cells.append((cell, value))
            if type(value) is ModuleType:
                self._is_closed &= is_torch(value)
                self._take_stream(value, f)
            else:
                self._search(value, depth + 1)
        if is_of_torch_or_ours(f):
            return
        self._take_parts(f)
        self._is_closed &= not looks_further(f.__code__)
        for value in f.__defaults__ or ():
            self._search(value, depth + 1)
        if f.__kwdefaults__:
            for value in f.__kwdefaults__.values():
                self._search(value, depth + 1)
        self._take_globals(f, f.__globals__, global_names(f.__code__), depth)

    def _take_globals(self, f: FunctionType, there: dict[str, Any], names: Iterable[str], depth: int) -> None:
        variables: dict[str, Any] = {}
        for name in names:
            value = there.get(name, EMPTY)
            if value is EMPTY:
                continue
            if type(value) is ModuleType:
                self._is_closed &= is_torch(value)
                self._take_stream(value, f)
                if depth < _DEEPEST and not is_library(value.__name__):
                    self._take_globals(f, vars(value), names_of(f.__code__), depth + 1)
            elif isinstance(value, type):
                self._search(value, depth + 1)
            elif isinstance(value, FunctionType):
                if value.__globals__ is there or not is_of_library(value):
                    variables[name] = value
                    self._search(value, depth + 1)
                else:
                    self._is_closed &= refers_to_torch_alone(value)
            elif self._take_stream(value, f) or isinstance(value, ModuleType):
                self._is_closed = False
            else:
                variables[name] = value
                if type(value) not in _CONTAINERS or len(value) <= _LONGEST:
                    self._search(value, depth + 1)
                else:
                    self._is_closed = False
        if variables:
            self._contents.append(Contents(there, variables, None))

    def _take_parts(self, f: FunctionType) -> None:
        self._functions.append((f, _parts(f)))
        self.may_count |= "" in added_to(f.__code__)

    def _take_stream(self, x: Any, f: FunctionType | None = None) -> bool:
        """Whether it is a random stream, or draws from one where f uses it."""
        if isinstance(x, ModuleType):
            if x is numpy and f is not None and "random" in names_of(f.__code__):
                x = numpy.random
            stream: world.Stream | None = world.OF_THE_PROCESS.get(x)
            if stream is not None:
                self.streams.append(stream)
            return stream is not None
        if isinstance(x, (BuiltinFunctionType, MethodType)):
            x = x.__self__
        if not isinstance(x, _STREAMS):
            return False
        stream = x if isinstance(x, torch.Generator) else world.PythonStream.of(x)
        if stream is not None:
            self.streams.append(stream)
        return True

    def statistics(self, given: Iterable[Any]) -> list[Tensor]:
        """What f may hand to batch_norm, beside what modules hold."""
        tensors = [ref() for ref, _ in self._tensors] if self._tensors else ()
        return [x for x in (*tensors, *given) if type(x) is Tensor and may_be_statistics(x)]

    # -- after the forward --------------------------------------------------------------------------

    def gradient_begins(self, given: Any) -> None:
        """Inside of f, someone asks for a gradient: of `backward`, leaves would have it twice."""
        if not self._gradients:
            leaves = [x for modules in self._modules for x in modules.tensors]
            leaves += [x for ref, _ in self._tensors if (x := ref()) is not None]
            leaves += [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
            self._gradients = [(x, _gradient(x)) for x in leaves if x.is_leaf]

    def forward_is_done(self, name: object, out: Any, first: int) -> None:
        """Look at what f has changed itself, and at the leaves in the graph of what it has returned."""
        for x, gradient in self._gradients:
            if _gradient(x) != gradient:
                raise MutationError(
                    f"{name}: the function calls backward(), which accumulates the gradient of a tensor that "
                    f"it has from outside ({describe(x)}), and would do so again in the recomputation. Use "
                    "torch.autograd.grad inside of it."
                )
        self._gradients = []
        for iterator, position in self._iterators:
            if _position(iterator) != position:
                raise MutationError(
                    f"{name}: the function takes items from a {type(iterator).__name__} that it has from "
                    "outside, and would get the next ones in the recomputation. Pass it the items, or a list."
                )
        self._modules = [modules.initialized() for modules in self._modules]
        for modules in self._modules:
            if modules.may_be_unchanged:
                modules.forget_unchanged()
        if self._results or not self._is_closed:
            self._search_graph(out, first)

    def _search_graph(self, out: Any, first: int) -> None:
        leaves, sources = _edges(out, first)
        for there, key in self._results:
            if there[key].grad_fn not in sources:
                there[key] = Weak(there[key])
        self._results.clear()
        known: set[int] = set()
        for modules in self._modules:
            known.update(map(id, modules.tensors))
        for x in leaves:
            if id(x) not in known and (now := version(x)) is not None:
                self._tensors.append((weakref.ref(x), now))

    def undo(self, name: object) -> None:
        """After a forward that is to be started anew: put back what it has changed."""
        for modules in self._modules:
            for there, key, x, copy in modules.updated():
                there[key] = x
                if copy is None:
                    raise _started_anew(name, key, x)
                assign(x, copy)
            modules.put_back_calls(name)
            for contents in modules.contents():
                contents.put_back(name, self.counts)
        for cell, value in self._cells:
            cell.cell_contents = value
        for contents in self._contents:
            contents.put_back(name, self.counts)
        for variable, value in self._variables:
            if value is not EMPTY:
                variable.set(value)
        for label, x in self._changed():
            raise _started_anew(name, label, x)

    # -- the recomputation --------------------------------------------------------------------------

    def _changed(self) -> list[tuple[str, Tensor]]:
        """The tensors that were changed in place since the forward, and their names if they have one."""
        found: list[tuple[str, Tensor]] = []
        for modules in self._modules:
            found += modules.changed()
        for ref, before in self._tensors:
            if (x := ref()) is not None and x._version != before:
                found.append(("", x))
        return found

    def counts(self, name: str) -> bool:
        """Whether f adds to a variable or attribute of this name, or to items, of no name."""
        if self._counted is None:
            codes = [f.__code__ for f, _ in self._functions]
            for kind in self._kinds.union(*[modules.layout.kinds for modules in self._modules]):
                for base in own_classes(kind):
                    codes += [f.__code__ for f in vars(base).values() if isinstance(f, FunctionType)]
            self._counted = {name for code in codes for name in added_to(code)}
        return name in self._counted and not (name and self._again_as_before)

    def here(self, name: object, check: bool) -> Here:
        """A context in which what f refers to is as it was."""
        return Here(self, name, check)


class Here:
    """What f refers to is as it was in its forward, for the time of a block."""

    def __init__(self, held: Held, name: object, check: bool) -> None:
        self._held = held
        self._name = name
        self._check = check
        self._undo: list[Callable[[], object]] = []
        self._watch: Watch | None = None
        # The storages of copies, whose versions mean nothing.
        self.copies: set[int] = set()

    def __enter__(self) -> Here:
        try:
            self._put_back_variables()
            for modules in self._held._modules:
                self._put_back_modules(modules)
            if self._check:
                self._watch_changed()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
        while self._undo:
            self._undo.pop()()

    def _put_back_variables(self) -> None:
        held, undo = self._held, self._undo
        for function, parts in held._functions:
            if not all(map(operator.is_, present := _parts(function), parts)):
                undo.append(functools.partial(_set_parts, function, present))
                _set_parts(function, parts)
        for whole in held._wholes:
            if (put_back := whole.put_back(self._name, self._check)) is not None:
                undo.append(put_back)
        for cell, value in held._cells:
            if not is_count(value, now := _contents(cell), held.counts):
                undo.append(functools.partial(leave_cell, cell, now))
                cell.cell_contents = value
        for contents in held._contents:
            undo.append(contents.put_back(self._name, held.counts))
        for variable, value in held._variables:
            if variable.get(EMPTY) is not value and value is not EMPTY:
                undo.append(functools.partial(variable.reset, variable.set(value)))

    def _put_back_modules(self, modules: Modules) -> None:
        if modules.is_here():
            self._undo.append(functools.partial(self._leave_modules, modules))
        else:
            self._undo.append(modules.put_back_calls(self._name))
            for contents in modules.contents():
                self._undo.append(contents.put_back(self._name, self._held.counts))
        if modules.snapshots:
            for there, name, _, copy in modules.updated(for_another_run=True):
                self.copies.add(copy.untyped_storage()._cdata)
                self._undo.append(functools.partial(there.__setitem__, name, there[name]))
                there[name] = copy

    def _leave_modules(self, modules: Modules) -> None:
        if not modules.is_here():
            modules.put_back_calls(self._name)
            for contents in reversed(modules.contents()):
                contents.leave(None, self._held.counts)

    def _watch_changed(self) -> None:
        if found := self._held._changed():
            errors: dict[int, Callable[[], Exception]] = {
                id(x): functools.partial(changed, self._name, _labelled(label, x)) for label, x in found
            }
            self._watch = Watch(errors)
            self._watch.__enter__()


def _started_anew(name: object, label: str, x: Tensor) -> MutationError:
    return MutationError(
        f"{name}: the function uses a torch.func transform, so that its forward has to be started anew, and "
        f"has changed {_labelled(label, x)} in place before. Use funcckpt.remat, or change it outside of the "
        "function."
    )


def _labelled(label: str, x: Tensor) -> str:
    return f"{label!r}, {describe(x)}" if label else describe(x)


class Watch(world.Mode):
    """Notices that a tensor is used, also where autograd does not save it."""

    def __init__(self, errors: dict[int, Callable[[], Exception]]) -> None:
        super().__init__()
        self._errors = errors

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(isinstance(y, Tensor) for y in pytree.tree_leaves(out)):  # and not, say, its shape
            # A counter counts on, as long as no one reads it.
            read = args[1:] if args and out is args[0] else args
            for x in pytree.tree_leaves((read, kwargs)):
                if id(x) in self._errors:
                    raise self._errors[id(x)]()
        return out


def another(name: object, x: Tensor) -> CheckpointError:
    kind = "parameter" if isinstance(x, nn.Parameter) else "buffer"
    return CheckpointError(
        f"{name}: the recomputation finds another {kind} ({describe(x)}) than the forward used; "
        "torch.func.functional_call, for one, puts the module's own back when it returns. Use "
        "funcckpt.remat, which takes those of the call, or pass the parameters as arguments of the function."
    )


def _parts(f: FunctionType) -> tuple[Any, ...]:
    return f.__code__, f.__defaults__, f.__kwdefaults__


def _set_parts(f: FunctionType, parts: tuple[Any, ...]) -> None:
    f.__code__, f.__defaults__, f.__kwdefaults__ = parts


@OfClass
def _is_mutable(kind: type) -> bool:
    """Whether contents of such lists or dicts are put back."""
    if kind in _MUTABLE or is_library(kind.__module__):
        return kind in _MUTABLE
    base = dict if issubclass(kind, dict) else list
    read = ("__iter__", "__len__", "items", "values")
    return issubclass(kind, base) and all(
        getattr(kind, name, None) is getattr(base, name, None) for name in read
    )


@OfClass
def _members_of(kind: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of data in a class of the user's, and of what leads to functions."""
    if is_library(kind.__module__) or issubclass(kind, (Tensor, enum.Enum)):
        return (), ()
    members = {name: x for name, x in vars(kind).items() if name[:2] != "__" or name == "__call__"}
    functions = [name for name, x in members.items() if _function_of(x) is not None]
    # A descriptor gives something else than what it is.
    data = [name for name, x in members.items() if not hasattr(type(x), "__get__")]
    return tuple(data), tuple(functions)


def _function_of(x: Any) -> Any:
    """What a member of a class calls: a method, a property or the like."""
    if isinstance(x, FunctionType):
        return x
    if isinstance(x, property):
        return x.fget
    if isinstance(x, functools.cached_property):
        return x.func
    return x.__func__ if isinstance(x, (staticmethod, classmethod)) else None


# A generator, and iterators that say where they are.
_ITERATORS = {GeneratorType, itertools.count, enumerate, zip, map, filter, reversed}
_ITERATORS.update(map(type, map(iter, ([], (), range(0), {}, {}.values(), {}.items()))))  # type: ignore[arg-type]


def _position(x: Any) -> Any:
    """What changes when an item is taken."""
    if isinstance(x, GeneratorType):
        frame = x.gi_frame
        return None if frame is None else (frame.f_lasti, *map(id, frame.f_locals.values()))
    if isinstance(x, itertools.count):
        return repr(x)
    if (left := operator.length_hint(x, -1)) >= 0:
        return left
    return [_position(y) for y in x.__reduce__()[1] if type(y) in _ITERATORS]


def _gradient(x: Tensor) -> Any:
    """What tells whether the gradient of a leaf was assigned, or added to."""
    return None if x.grad is None else (id(x.grad), x.grad._version)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


def _edges(out: Any, first: int) -> tuple[list[Tensor], set[Any]]:
    """The leaves that are used by what was recorded since node number `first`, and the nodes of before."""
    outputs = (out,) if isinstance(out, Tensor) else pytree.tree_leaves(out)
    nodes: list[Any] = [*{y.grad_fn for y in outputs if isinstance(y, Tensor)} - {None}]
    seen: set[Any] = {None, *nodes}
    leaves, sources = [], set()
    for node in nodes:
        following = node.next_functions
        if not following:
            if (x := getattr(node, "variable", None)) is not None:
                leaves.append(x)
        elif node._sequence_nr() >= first:
            for other, _ in following:
                if other not in seen:
                    seen.add(other)
                    nodes.append(other)
        else:
            sources.add(node)
    return leaves, sources
